"""All steps of a recurrence on the CPU: tensors and plans to addresses, one call into the compiled core."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..checks import SUM_DTYPES
from ..cpu_core import Operand
from ..linear.cpu import plan_of
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
    operands: list[Operand] = [
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
        grad_m = weights[0][0].new_empty(steps.batch * hidden)
        operands += [
            ("factor", multiplied.factor, (inputs, hidden), dtype),
            *_index(index, steps, inputs),
            ("of_h", multiplied.of_h, (rows, hidden), dtype),
            ("grad_m", grad_m, (steps.batch * hidden,), dtype),
            ("grad_factor", grad_multiplied[0], (rows, hidden), dtype),
            ("grad_of_h", grad_multiplied[1], (rows, hidden), dtype),
        ]
    _run("lstm_backward", weights, steps, True, operands)
    return grad_pre, grad_h, grad_c


# -- operands that recurrences share ----------------------------------------------------------------------------------


def _sizes(weights: Weights) -> tuple[int, torch.dtype]:
    values, layout = weights[0]
    return layout.shape[1], values.dtype


def _index(index: Tensor | None, steps: Steps, inputs: int) -> list[Operand]:
    if index is not None and len(index):
        low, high = torch.aminmax(index)
        if low < 0 or high >= inputs:
            raise BlockSparseError.expected("input", f"rows of a table that has {inputs}", f"{low} to {high}")
    return [("index", index, (steps.rows,), torch.int64)]


def _states(steps: Steps, hs: Trajectory, cs: Trajectory, hidden: int, dtype: torch.dtype) -> list[Operand]:
    """The states on their way forward; of sequences that all have the same length, the last step leaves the final."""
    operands: list[Operand] = []
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
) -> tuple[Tensor, Tensor, Tensor, list[Operand]]:
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


def _run(name: str, weights: Weights, steps: Steps, transpose: bool, operands: Sequence[Operand]) -> None:
    """Calls the core's function; matrices are rows and their distance, all others contiguous."""
    hidden, dtype = _sizes(weights)
    values: list[Operand] = [
        (f"values[{i}]", each, layout.values_shape, dtype) for i, (each, layout) in enumerate(weights)
    ]
    core, isa, found = cpu_core.operands(*values, *operands)
    products = []
    for (_, layout), (address, _) in zip(weights, found, strict=False):
        plan = plan_of(layout, transpose)
        parts = plan.start, plan.col, plan.block, plan.row, plan.begin, plan.end, plan.task_start
        products.append((address, layout.shape, layout.block_shape, *parts))
    addresses = {
        operand[0]: pair if len(operand[2]) == 2 else pair[0]
        for operand, pair in zip(operands, found[len(weights) :], strict=True)
    }
    getattr(core, name)(
        isa=isa, dtype=cpu_core.DTYPES[dtype], rows=steps.rows, hidden=hidden, step=_starts(steps.start),
        reverse=steps.reverse, weights=products, **addresses,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _starts(start: tuple[int, ...]) -> np.ndarray:
    return np.array(start, dtype=np.int64)
