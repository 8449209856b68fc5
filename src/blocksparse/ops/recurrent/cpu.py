"""Recurrences on the CPU: one call of the compiled core runs all steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..checks import SUM_DTYPES, check_rows_of_table
from ..cpu_core import CoreTensor, address_or_zero
from ..cpu_plan import row_plan
from ..linear.cpu import linear_fast, working_memory
from .recurrence import Steps

if TYPE_CHECKING:
    from .op import StateTrajectory

Weights = Sequence[tuple[Tensor, BlockLayout]]


States = tuple[Tensor | None, Tensor, Tensor | None]


class MultiplicativeTerms(NamedTuple):
    """Additional tensors of a multiplicative LSTM, m = factor * of_h, each `[rows, hidden]`.

    With an index, `factor` is a table. The first weight multiplies m, the second one the state: of_h = h M^T.
    """

    factor: Tensor
    of_h: Tensor
    m: Tensor


def forward(
    weights: Weights, steps: Steps, pre: Tensor, index: Tensor | None, hs: StateTrajectory, cs: StateTrajectory,
    gates: Tensor | None, multiplicative: MultiplicativeTerms | None = None,
) -> None:  # fmt: skip
    """Compute the states `hs` and `cs` of all steps, and the activated gates unless `gates` is None.

    Args:
        weights: values and layout of each weight.
        steps: the time steps.
        pre: `[rows, 4 hidden]`, added to the product of the state, or with an index a table of such rows.
        index: `[rows]`, the row of `pre` for each row, or None.
        hs, cs: the states, which are written.
        gates: `[rows, 4 hidden]`, written, or None.
        multiplicative: the additional tensors of a multiplicative LSTM.
    """
    hidden, dtype = _sizes(weights)
    inputs = steps.rows if index is None else len(pre)
    z = weights[0][0].new_empty(steps.batch * 4 * hidden)
    tensors: list[CoreTensor] = [
        ("z", z, (len(z),), dtype),
        ("pre", pre, (inputs, 4 * hidden), dtype),
        *_index(index, steps, inputs),
        *_states(steps, hs, cs, hidden, dtype),
        ("gates", gates, (steps.rows, 4 * hidden), dtype),
    ]
    if multiplicative is not None:
        flat = steps.rows * hidden
        tensors += [
            ("factor", multiplicative.factor, (inputs, hidden), dtype),
            ("of_h", multiplicative.of_h.view(-1), (flat,), dtype),
            ("m", multiplicative.m.view(-1), (flat,), dtype),
        ]
    _run("lstm_forward", weights, steps, False, tensors)


def hidden_forward(
    weights: Weights, steps: Steps, kind: str, pre: Tensor, index: Tensor | None, bias: Tensor | None,
    h: States, products: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute the states of all steps of a GRU or a plain recurrence.

    Args:
        weights, steps, index: as in `forward`.
        kind: "gru", "tanh" or "relu".
        pre: `[rows, gates * hidden]`, the products of the inputs, or with an index a table of such rows.
        bias: `[gates * hidden]`, added to the product of the state, or None.
        h: the states before and behind all steps, and the final ones, which are the initial ones before. The first or
            the last may be None, see `StatePath` in csrc/recurrent/lstm.hpp.
        products: `[rows, gates * hidden]`, written: the products of the states, for `hidden_backward`.
    """
    hidden, dtype = _sizes(weights)
    features, inputs = weights[0][1].shape[0], steps.rows if index is None else len(pre)
    keep = products is not None
    z = weights[0][0].new_empty(steps.batch * features) if products is None else products.view(-1)
    (before, after, final), size = h, (steps.rows if keep else steps.batch) * features
    tensors: list[CoreTensor] = [
        ("z", z, (size,), dtype),
        ("pre", pre, (inputs, features), dtype),
        *_index(index, steps, inputs),
        ("bias", bias, (features,), dtype),
        ("h_before", before, (steps.rows, hidden), dtype),
        ("h_after", after, (steps.rows, hidden), dtype),
        ("h_final", None if final is None else final.view(-1), (steps.batch * hidden,), dtype),
    ]
    _run("hidden_forward", weights, steps, False, tensors, kind=kind, keep=keep)


def hidden_backward(
    weights: Weights, steps: Steps, kind: str, pre: Tensor, bias: Tensor | None,
    saved: tuple[Tensor | None, Tensor, Tensor], grad_y: Tensor, grad_h: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients at the products of the inputs and of the states, and at the initial states.

    Args:
        weights, steps, kind, pre, bias: as in `hidden_forward`.
        saved: its `products`, which only a GRU needs, and the states before and behind all steps.
        grad_y, grad_h: the gradients at the states behind all steps, and at the final ones.
    """
    (hidden, dtype), features, rows = _sizes(weights), weights[0][1].shape[0], steps.rows
    (products, before, after), batch = saved, steps.batch * hidden
    grad_h = grad_h.clone(memory_format=torch.contiguous_format)
    carried = torch.zeros_like(grad_h)  # a part of the gradient at the state, which passes by the products
    grad_products = workspace.empty((rows, features), dtype, grad_h.device)
    grad_pre = workspace.empty((rows, features), dtype, grad_h.device) if kind == "gru" else grad_products
    tensors: list[CoreTensor] = [
        ("z", None if products is None else products.view(-1), (rows * features,), dtype),
        ("pre", pre, (rows, features), dtype),
        ("bias", bias, (features,), dtype),
        ("h_before", before, (rows, hidden), dtype),
        ("h_after", after, (rows, hidden), dtype),
        ("grad_y", grad_y, (rows, hidden), dtype),
        ("grad_h", grad_h.view(-1), (batch,), dtype),
        ("carried", carried.view(-1), (batch,), dtype),
        ("grad_z", grad_products, (rows, features), dtype),
        ("grad_pre", grad_pre, (rows, features), dtype),
    ]
    _run("hidden_backward", weights, steps, True, tensors, kind=kind)
    return grad_pre, grad_products, grad_h.add_(carried)


Layer = tuple[Tensor, BlockLayout, Sequence[Tensor], Tensor, BlockLayout]


def recurrence_fast(
    kind: str, x: Tensor, h: Tensor, c: Tensor | None, layers: Sequence[Layer]
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return y and the states of a usual call of stacked layers without gradients; None if this path does not apply.

    `linear.cpu.linear_fast` computes the products of the inputs.

    Args:
        kind: "lstm", "gru", "tanh" or "relu".
        x: `[steps, batch, input]`; if there is one step, the first two axes may be swapped. y has the same axes.
        h, c: the states `[layers, batch, hidden]`, which are not changed. Only LSTMs have c.
        layers: for each layer V and its layout, the biases, W and its layout.
    """
    shape, dtype = h.shape, x.dtype
    _, batch, hidden = shape
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    if not address_or_zero(h, shape, dtype):
        return None
    h, h_size = h.clone(), batch * hidden * h.element_size()
    c_final = c_size = 0
    if c is not None:
        if not address_or_zero(c, shape, SUM_DTYPES.get(dtype, dtype)):
            return None
        c, c_size = c.clone(), batch * hidden * c.element_size()
        c_final = c.data_ptr()
    core, isa, _ = cpu_core.arguments()
    rows, h_final = x.numel() // x.shape[-1], h.data_ptr()
    step, z = _starts(tuple(range(0, rows + 1, batch))), working_memory(gates * batch * hidden * x.element_size())
    y = x
    for input_values, input_layout, biases, values, layout in layers:
        values = values.data  # as in `linear`
        address = address_or_zero(values, layout.values_shape, dtype)
        tasks = layout._derived.get(("linear tasks", False))
        bias, state_bias = biases or (None, None)
        if c is not None and biases:  # an LSTM adds both to the products of the inputs
            bias, state_bias = torch.add(*biases), None
        bias_address = 0 if state_bias is None else address_or_zero(state_bias, (gates * hidden,), dtype)
        if not address or not tasks or (state_bias is not None and not bias_address):
            return None
        pre = linear_fast(y, input_values, bias, input_layout, False, None)
        if pre is None or pre.numel() != gates * rows * hidden:
            return None
        y, y_address = cpu_core.allocate((*x.shape[:-1], hidden), x)
        arguments: dict[str, Any] = {
            "isa": isa, "dtype": cpu_core.DTYPES[dtype], "rows": rows, "hidden": hidden, "step": step, "reverse": False,
            "weights": [(address, tasks)], "z": z.data_ptr(), "pre": (pre.data_ptr(), gates * hidden), "index": 0,
            "h_before": (0, 0), "h_after": (y_address, hidden), "h_final": h_final,
        }  # fmt: skip
        if c is None:
            core.hidden_forward(kind=kind, bias=bias_address, **arguments)
        else:
            core.lstm_forward(gates=(0, 0), c_before=(0, 0), c_after=(0, 0), c_final=c_final, **arguments)
        h_final, c_final = h_final + h_size, c_final + c_size
    return y, h, c


def backward(
    weights: Weights, steps: Steps, saved: Sequence[Tensor], grads: Sequence[Tensor], index: Tensor | None = None,
    multiplicative: MultiplicativeTerms | None = None, grad_multiplicative: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients at the gates' inputs of all steps, and at the initial h and c, as `lstm.back_in_time`.

    Args:
        weights, steps, index, multiplicative: as in `forward`.
        saved, grads: as in `lstm.back_in_time`.
        grad_multiplicative: `[rows, hidden]` each, written: the gradients at the factors and at of_h.
    """
    (hidden, dtype), rows = _sizes(weights), steps.rows
    grad_pre, grad_h, grad_c, tensors = _gradients(steps, saved, grads, hidden, dtype)
    if multiplicative is not None and grad_multiplicative is not None:
        inputs = rows if index is None else len(multiplicative.factor)
        tensors += [
            ("factor", multiplicative.factor, (inputs, hidden), dtype),
            *_index(index, steps, inputs),
            ("of_h", multiplicative.of_h, (rows, hidden), dtype),
            *_working(weights, steps, "grad_m"),
            ("grad_factor", grad_multiplicative[0], (rows, hidden), dtype),
            ("grad_of_h", grad_multiplicative[1], (rows, hidden), dtype),
        ]
    _run("lstm_backward", weights, steps, True, tensors)
    return grad_pre, grad_h, grad_c


class Norms(NamedTuple):
    """Outputs of a small-world LSTM's layer norms before gain and bias, and 1 / deviation, for the backward pass."""

    z: Tensor  # [rows, 4 hidden], of the gates
    z_scale: Tensor  # [rows, 4], 1 / deviation of z
    normed: Tensor  # [depth, rows, hidden], of the steps within a time step
    inputs: Tensor  # [depth, rows, hidden], the inputs of the products behind these norms
    scale: Tensor  # [depth, rows, 1], 1 / deviation of normed

    @classmethod
    def empty(cls, rows: int, depth: int, h: Tensor, c: Tensor) -> Norms:
        """Return memory for the norms, with the dtypes of h and c."""
        hidden = c.shape[1]
        normed, inputs = (workspace.empty((depth, rows, hidden), h.dtype, h.device) for _ in range(2))
        z = workspace.empty((rows, 4 * hidden), h.dtype, h.device)
        return cls(z, c.new_empty(rows, 4), normed, inputs, c.new_empty(depth, rows, 1))


def small_world_forward(
    weights: Weights, steps: Steps, inputs: Sequence[Tensor | None], index: Tensor | None, gains: Sequence[Tensor],
    biases: Sequence[Tensor], epsilon: float, hs: StateTrajectory, cs: StateTrajectory, gates: Tensor | None,
    norms: Norms,
) -> None:  # fmt: skip
    """Compute the states of a small-world LSTM, as `forward`.

    Args:
        inputs: the factors and the terms (or None), `[rows, hidden]`, or with an index tables of such rows.
        norms: written for all rows if there are `gates`; else working memory for the rows of one step.
    """
    (hidden, dtype), keep = _sizes(weights), gates is not None
    factors, terms = inputs
    rows = steps.rows if factors is None or index is None else len(factors)
    tensors: list[CoreTensor] = [
        *_affine(weights, gains, biases),
        *_index(index, steps, rows),
        ("factor", factors, (rows, hidden), dtype),
        ("term", terms, (rows, hidden), dtype),
        *_states(steps, hs, cs, hidden, dtype),
        ("gates", gates, (steps.rows, 4 * hidden), dtype),
        *_working(weights, steps, "y"),
        *_norms(weights, norms, steps.rows if keep else steps.batch, keep),
    ]
    _run("small_world_forward", weights, steps, False, tensors, epsilon=epsilon, keep=keep)


class SmallWorldGradients(NamedTuple):
    """Memory for the gradients of a small-world LSTM."""

    factors: Tensor  # [rows, hidden]
    terms: Tensor  # [rows, hidden]
    z: Tensor  # [rows, 4 hidden], at the input of the gates' norms
    products: Tensor  # [depth, rows, hidden], at the inputs of the other norms
    gains: Tensor  # [(depth + 4) hidden], of all norms, in the dtype of sums
    biases: Tensor  # [(depth + 4) hidden]


def small_world_backward(
    weights: Weights, steps: Steps, factors: Tensor, index: Tensor | None, gains: Sequence[Tensor],
    biases: Sequence[Tensor], saved: Sequence[Tensor], norms: Norms, grads: Sequence[Tensor], into: SmallWorldGradients,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of `backward`; write the others to `into`, where those of gains and biases are added."""
    (hidden, dtype), rows, depth = _sizes(weights), steps.rows, len(weights) - 1
    grad_pre, grad_h, grad_c, tensors = _gradients(steps, saved, grads, hidden, dtype)
    inputs, affine = rows if index is None else len(factors), (depth + 4) * hidden
    tensors += [
        *_affine(weights, gains, biases),
        *_index(index, steps, inputs),
        ("factor", factors, (inputs, hidden), dtype),
        *_norms(weights, norms, rows, True),
        *_working(weights, steps, "grad", "grad_affine"),
        ("grad_factor", into.factors, (rows, hidden), dtype),
        ("grad_term", into.terms, (rows, hidden), dtype),
        ("grad_z", into.z.view(-1), (rows * 4 * hidden,), dtype),
        ("grad_taken", into.products, (depth, rows, hidden), dtype),
        ("grad_gains", into.gains, (affine,), SUM_DTYPES[dtype]),
        ("grad_biases", into.biases, (affine,), SUM_DTYPES[dtype]),
    ]
    _run("small_world_backward", weights, steps, True, tensors)
    return grad_pre, grad_h, grad_c


# -- tensors that recurrences share ----------------------------------------------------------------------------------


def _sizes(weights: Weights) -> tuple[int, torch.dtype]:
    """Return the number of features of h and the dtype."""
    values, layout = weights[0]
    return layout.shape[1], values.dtype


def _index(index: Tensor | None, steps: Steps, inputs: int) -> list[CoreTensor]:
    """Return the index as a tensor of the core, after a check of its range."""
    if index is not None:
        check_rows_of_table(index, inputs)
    return [("index", index, (steps.rows,), torch.int64)]


def _states(
    steps: Steps, hs: StateTrajectory, cs: StateTrajectory, hidden: int, dtype: torch.dtype
) -> list[CoreTensor]:
    """Return the tensors of both states."""
    return [*_states_of("h", steps, hs, hidden, dtype), *_states_of("c", steps, cs, hidden, SUM_DTYPES[dtype])]


def _states_of(name: str, steps: Steps, states: StateTrajectory, hidden: int, dtype: torch.dtype) -> list[CoreTensor]:
    """Return the tensors of a state; the final states of aligned sequences are those behind the last step."""
    return [
        (f"{name}_before", states.all_before, (steps.rows, hidden), dtype),
        (f"{name}_after", states.all_after, (steps.rows, hidden), dtype),
        (f"{name}_final", None if steps.aligned else states.final.view(-1), (steps.batch * hidden,), dtype),
    ]


def _gradients(
    steps: Steps, saved: Sequence[Tensor], grads: Sequence[Tensor], hidden: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[CoreTensor]]:
    """Return the gradients at the gates' inputs, at h and at c, and all tensors of the backward pass."""
    (gates, before, after), (grad_y, grad_h, grad_c) = saved, grads
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
    """Return working memory with these names, `[batch, hidden]` each."""
    (hidden, dtype), values = _sizes(weights), weights[0][0]
    size = steps.batch * hidden
    return [(name, values.new_empty(size), (size,), dtype) for name in names]


def _affine(weights: Weights, gains: Sequence[Tensor], biases: Sequence[Tensor]) -> list[CoreTensor]:
    """Return the norms' gains and biases, each as one vector."""
    hidden, dtype = _sizes(weights)
    size = (len(weights) + 3) * hidden
    return [(name, torch.cat([*of]), (size,), dtype) for name, of in (("gains", gains), ("biases", biases))]


def _norms(weights: Weights, norms: Norms, rows: int, keep: bool) -> list[CoreTensor]:
    """Return the tensors of the norms; without `keep`, only working memory."""
    (hidden, dtype), depth = _sizes(weights), len(weights) - 1
    state = SUM_DTYPES[dtype]
    return [
        ("z", norms.z.view(-1), (rows * 4 * hidden,), dtype),
        ("z_scale", norms.z_scale.view(-1) if keep else None, (rows * 4,), state),
        ("normed", norms.normed if keep else None, (depth, rows, hidden), dtype),
        ("given", norms.inputs, (depth, rows, hidden), dtype),
        ("scale", norms.scale if keep else None, (depth, rows, 1), state),
    ]


def _run(
    name: str, weights: Weights, steps: Steps, transpose: bool, tensors: Sequence[CoreTensor], **rest: float | str
) -> None:
    """Call a function of the core. Rows of matrices may have any stride; other tensors must be contiguous."""
    hidden, dtype = _sizes(weights)
    values: list[CoreTensor] = [
        (f"values[{i}]", each, layout.values_shape, dtype) for i, (each, layout) in enumerate(weights)
    ]
    core, isa, resolved = cpu_core.arguments(*values, *tensors)
    products = [
        (address, row_plan(layout, transpose)) for (_, layout), (address, _) in zip(weights, resolved, strict=False)
    ]
    addresses = {
        tensor[0]: pair if len(tensor[2]) == 2 else pair[0]
        for tensor, pair in zip(tensors, resolved[len(weights) :], strict=True)
    }
    getattr(core, name)(
        isa=isa, dtype=cpu_core.DTYPES[dtype], rows=steps.rows, hidden=hidden, step=_starts(steps.start),
        reverse=steps.reverse, weights=products, **addresses, **rest,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _starts(start: tuple[int, ...]) -> np.ndarray:
    return np.array(start, dtype=np.int64)
