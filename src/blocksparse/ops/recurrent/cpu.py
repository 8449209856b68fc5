"""All steps of a recurrence on the CPU: tensors and plans to addresses, one call into the compiled core."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..checks import SUM_DTYPES, check_rows_of_table
from ..cpu_core import CoreTensor, address_or_zero
from ..linear.cpu import linear_fast, tasks_of, working_memory
from .recurrence import Steps

if TYPE_CHECKING:
    from .op import Trajectory

Weights = Sequence[tuple[Tensor, BlockLayout]]


class Multiplied(NamedTuple):
    """What a multiplicative LSTM has besides, m = factor * of_h: `[rows, hidden]`, or a table where there is an index.

    The second weight is that of the state, of_h = h M^T; the first one's product is that of m.
    """

    factor: Tensor
    of_h: Tensor
    m: Tensor


def forward(
    weights: Weights, steps: Steps, pre: Tensor, index: Tensor | None, hs: Trajectory, cs: Trajectory,
    gates: Tensor | None, multiplied: Multiplied | None = None,
) -> None:  # fmt: skip
    """The states that the steps leave, `hs` and `cs`, and the gates `[rows, 4 hidden]` if they are to be kept.

    Args:
        pre: `[rows, 4 hidden]`, added to the product of the state; with an index `[rows]` the rows of it.
    """
    hidden, dtype = _sizes(weights)
    inputs = steps.rows if index is None else len(pre)
    z = weights[0][0].new_empty(steps.batch * 4 * hidden)
    operands: list[CoreTensor] = [
        ("z", z, (len(z),), dtype),
        ("pre", pre, (inputs, 4 * hidden), dtype),
        *_index(index, steps, inputs),
        *_states(steps, hs, cs, hidden, dtype),
        ("gates", gates, (steps.rows, 4 * hidden), dtype),
    ]
    if multiplied is not None:
        flat = steps.rows * hidden
        operands += [
            ("factor", multiplied.factor, (inputs, hidden), dtype),
            ("of_h", multiplied.of_h.view(-1), (flat,), dtype),
            ("m", multiplied.m.view(-1), (flat,), dtype),
        ]
    _run("lstm_forward", weights, steps, False, operands)


Layer = tuple[Tensor, BlockLayout, Sequence[Tensor], Tensor, BlockLayout]


def lstm_step_fast(x: Tensor, h: Tensor, c: Tensor, layers: Sequence[Layer]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The whole of a usual step of LSTMs, one above the other, without gradients; None for what `forward` has to see.

    As `linear.cpu.linear_fast`, which makes the products of the inputs.

    Args:
        x: `[1, batch, input]` or `[batch, 1, input]`, as y is.
        h, c: `[layers, batch, hidden]`, as the final ones are.
        layers: of each V and its layout, what is added, W and its layout.
    """
    shape, dtype = h.shape, x.dtype
    _, batch, hidden = shape
    h_before, c_before = address_or_zero(h, shape, dtype), address_or_zero(c, shape, SUM_DTYPES.get(dtype, dtype))
    if not (h_before and c_before):
        return None
    core, isa, _ = cpu_core.arguments()
    (h_final, h_after), (c_final, c_after) = cpu_core.allocate(shape, h), cpu_core.allocate(shape, c)
    gates = 4 * batch * hidden
    z = working_memory(gates * x.element_size())
    of_h, of_c = (batch * hidden * state.element_size() for state in (h, c))  # bytes from one layer to the next
    y = x
    for input_values, input_layout, biases, values, layout in layers:
        values = values.data  # as in `linear`
        address, tasks = (
            address_or_zero(values, layout.values_shape, dtype),
            layout._derived.get(("linear tasks", False)),
        )
        bias = torch.add(*biases) if biases else None
        pre = linear_fast(y, input_values, bias, input_layout, False, None) if address and tasks else None
        if pre is None or pre.numel() != gates:
            return None
        y, y_address = cpu_core.allocate((*x.shape[:-1], hidden), x)
        core.lstm_forward(
            isa=isa, dtype=cpu_core.DTYPES[dtype], rows=batch, hidden=hidden, step=_starts((0, batch)), reverse=False,
            weights=[(address, tasks)], z=z.data_ptr(), pre=(pre.data_ptr(), 4 * hidden), index=0,
            h_before=(h_before, hidden), h_after=(y_address, hidden), h_final=h_after,
            c_before=(c_before, hidden), c_after=(c_after, hidden), c_final=0, gates=(0, 0),
        )  # fmt: skip
        h_before, h_after, c_before, c_after = h_before + of_h, h_after + of_h, c_before + of_c, c_after + of_c
    return y, h_final, c_final


def backward(
    weights: Weights, steps: Steps, kept: Sequence[Tensor], grads: Sequence[Tensor], index: Tensor | None = None,
    multiplied: Multiplied | None = None, grad_multiplied: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `lstm.back_in_time`: the gradients before the gates of all steps, and at the initial h and c.

    Args:
        grad_multiplied: where those at the factors of all steps and at of_h go, `[rows, hidden]`.
    """
    (hidden, dtype), rows = _sizes(weights), steps.rows
    grad_pre, grad_h, grad_c, operands = _gradients(steps, kept, grads, hidden, dtype)
    if multiplied is not None and grad_multiplied is not None:
        inputs = rows if index is None else len(multiplied.factor)
        operands += [
            ("factor", multiplied.factor, (inputs, hidden), dtype),
            *_index(index, steps, inputs),
            ("of_h", multiplied.of_h, (rows, hidden), dtype),
            *_working(weights, steps, "grad_m"),
            ("grad_factor", grad_multiplied[0], (rows, hidden), dtype),
            ("grad_of_h", grad_multiplied[1], (rows, hidden), dtype),
        ]
    _run("lstm_backward", weights, steps, True, operands)
    return grad_pre, grad_h, grad_c


class Norms(NamedTuple):
    """What is kept of a small-world LSTM's layer norms: their numbers before gain and bias, and 1 / deviation.

    Those of the gates are z `[rows, 4 hidden]` and z_scale `[rows, 4]`; those of the units' steps, and what the next
    product takes of each, normed and given `[depth, rows, hidden]` and scale `[depth, rows, 1]`.
    """

    z: Tensor
    z_scale: Tensor
    normed: Tensor
    given: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, rows: int, depth: int, h: Tensor, c: Tensor) -> Norms:
        """Memory for them, of these dtypes."""
        hidden = c.shape[1]
        normed, given = (workspace.empty((depth, rows, hidden), h.dtype, h.device) for _ in range(2))
        z = workspace.empty((rows, 4 * hidden), h.dtype, h.device)
        return cls(z, c.new_empty(rows, 4), normed, given, c.new_empty(depth, rows, 1))


def small_world_forward(
    weights: Weights, steps: Steps, inputs: Sequence[Tensor | None], index: Tensor | None, gains: Sequence[Tensor],
    biases: Sequence[Tensor], epsilon: float, hs: Trajectory, cs: Trajectory, gates: Tensor | None, norms: Norms,
) -> None:  # fmt: skip
    """As `forward`, with the norms.

    Args:
        inputs: the factors and, unless None, the terms, `[rows, hidden]`, or tables where there is an index.
        norms: are kept as the gates are; if not, this is working memory for the rows of one step.
    """
    (hidden, dtype), keep = _sizes(weights), gates is not None
    factors, terms = inputs
    rows = steps.rows if factors is None or index is None else len(factors)
    operands: list[CoreTensor] = [
        *_affine(weights, gains, biases),
        *_index(index, steps, rows),
        ("factor", factors, (rows, hidden), dtype),
        ("term", terms, (rows, hidden), dtype),
        *_states(steps, hs, cs, hidden, dtype),
        ("gates", gates, (steps.rows, 4 * hidden), dtype),
        *_working(weights, steps, "y"),
        *_norms(weights, norms, steps.rows if keep else steps.batch, keep),
    ]
    _run("small_world_forward", weights, steps, False, operands, epsilon=epsilon, keep=keep)


class SmallWorldGradients(NamedTuple):
    """Of factors and terms `[rows, hidden]`; at z and at what the other norms take, as `Norms`.

    And of the norms' gains and biases `[(depth + 4) hidden]`, one behind the other, in the type of sums.
    """

    factors: Tensor
    terms: Tensor
    z: Tensor
    taken: Tensor
    gains: Tensor
    biases: Tensor


def small_world_backward(
    weights: Weights, steps: Steps, factors: Tensor, index: Tensor | None, gains: Sequence[Tensor],
    biases: Sequence[Tensor], kept: Sequence[Tensor], norms: Norms, grads: Sequence[Tensor], into: SmallWorldGradients,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `backward`; the other gradients go into memory that is given, where those of gains and biases are added."""
    (hidden, dtype), rows, depth = _sizes(weights), steps.rows, len(weights) - 1
    grad_pre, grad_h, grad_c, operands = _gradients(steps, kept, grads, hidden, dtype)
    inputs, affine = rows if index is None else len(factors), (depth + 4) * hidden
    operands += [
        *_affine(weights, gains, biases),
        *_index(index, steps, inputs),
        ("factor", factors, (inputs, hidden), dtype),
        *_norms(weights, norms, rows, True),
        *_working(weights, steps, "grad", "grad_affine"),
        ("grad_factor", into.factors, (rows, hidden), dtype),
        ("grad_term", into.terms, (rows, hidden), dtype),
        ("grad_z", into.z.view(-1), (rows * 4 * hidden,), dtype),
        ("grad_taken", into.taken, (depth, rows, hidden), dtype),
        ("grad_gains", into.gains, (affine,), SUM_DTYPES[dtype]),
        ("grad_biases", into.biases, (affine,), SUM_DTYPES[dtype]),
    ]
    _run("small_world_backward", weights, steps, True, operands)
    return grad_pre, grad_h, grad_c


# -- operands that recurrences share ----------------------------------------------------------------------------------


def _sizes(weights: Weights) -> tuple[int, torch.dtype]:
    values, layout = weights[0]
    return layout.shape[1], values.dtype


def _index(index: Tensor | None, steps: Steps, inputs: int) -> list[CoreTensor]:
    if index is not None:
        check_rows_of_table(index, inputs)
    return [("index", index, (steps.rows,), torch.int64)]


def _states(steps: Steps, hs: Trajectory, cs: Trajectory, hidden: int, dtype: torch.dtype) -> list[CoreTensor]:
    """The states on their way forward; of sequences that all have the same length, the last step leaves the final."""
    operands: list[CoreTensor] = []
    for name, path, of in (("h", hs, dtype), ("c", cs, SUM_DTYPES[dtype])):
        final = None if steps.aligned else path.final.view(-1)
        operands += [
            (f"{name}_before", path.all_before, (steps.rows, hidden), of),
            (f"{name}_after", path.all_after, (steps.rows, hidden), of),
            (f"{name}_final", final, (steps.batch * hidden,), of),
        ]
    return operands


def _gradients(
    steps: Steps, kept: Sequence[Tensor], grads: Sequence[Tensor], hidden: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[CoreTensor]]:
    """The gradients before the gates, at h and at c as steps go back, and all operands of that."""
    (gates, before, after), (grad_y, grad_h, grad_c) = kept, grads
    grad_pre, grad_h, grad_c = workspace.empty_like(gates), grad_h.clone(), grad_c.clone()
    rows, state = steps.rows, SUM_DTYPES[dtype]
    return grad_pre, grad_h, grad_c, [
        ("gates", gates, (rows, 4 * hidden), dtype),
        ("c_before", before, (rows, hidden), state),
        ("c_after", after, (rows, hidden), state),
        ("grad_y", grad_y, (rows, hidden), dtype),
        ("grad_h", grad_h.view(-1), (steps.batch * hidden,), dtype),
        ("grad_c", grad_c.view(-1), (steps.batch * hidden,), state),
        ("grad_pre", grad_pre, (rows, 4 * hidden), dtype),
    ]  # fmt: skip


def _working(weights: Weights, steps: Steps, *names: str) -> list[CoreTensor]:
    """Working memory of these names, `[batch, hidden]` each."""
    (hidden, dtype), values = _sizes(weights), weights[0][0]
    size = steps.batch * hidden
    return [(name, values.new_empty(size), (size,), dtype) for name in names]


def _affine(weights: Weights, gains: Sequence[Tensor], biases: Sequence[Tensor]) -> list[CoreTensor]:
    hidden, dtype = _sizes(weights)
    size = (len(weights) + 3) * hidden
    return [(name, torch.cat([*of]), (size,), dtype) for name, of in (("gains", gains), ("biases", biases))]


def _norms(weights: Weights, norms: Norms, rows: int, keep: bool) -> list[CoreTensor]:
    (hidden, dtype), depth = _sizes(weights), len(weights) - 1
    state = SUM_DTYPES[dtype]
    return [
        ("z", norms.z.view(-1), (rows * 4 * hidden,), dtype),
        ("z_scale", norms.z_scale.view(-1) if keep else None, (rows * 4,), state),
        ("normed", norms.normed if keep else None, (depth, rows, hidden), dtype),
        ("given", norms.given, (depth, rows, hidden), dtype),
        ("scale", norms.scale if keep else None, (depth, rows, 1), state),
    ]


def _run(
    name: str, weights: Weights, steps: Steps, transpose: bool, operands: Sequence[CoreTensor], **rest: float
) -> None:
    """Calls the core's function; matrices are rows and their distance, all others contiguous."""
    hidden, dtype = _sizes(weights)
    values: list[CoreTensor] = [
        (f"values[{i}]", each, layout.values_shape, dtype) for i, (each, layout) in enumerate(weights)
    ]
    core, isa, found = cpu_core.arguments(*values, *operands)
    products = [
        (address, tasks_of(layout, transpose)) for (_, layout), (address, _) in zip(weights, found, strict=False)
    ]
    addresses = {
        operand[0]: pair if len(operand[2]) == 2 else pair[0]
        for operand, pair in zip(operands, found[len(weights) :], strict=True)
    }
    getattr(core, name)(
        isa=isa, dtype=cpu_core.DTYPES[dtype], rows=steps.rows, hidden=hidden, step=_starts(steps.start),
        reverse=steps.reverse, weights=products, **addresses, **rest,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _starts(start: tuple[int, ...]) -> np.ndarray:
    return np.array(start, dtype=np.int64)
