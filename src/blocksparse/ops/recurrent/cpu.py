"""All steps of an LSTM on the CPU: tensors and plans to addresses, one call into the compiled core."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..checks import SUM_DTYPES
from ..linear.cpu import plan_of
from .recurrence import Steps


def forward(
    values: Tensor, layout: BlockLayout, steps: Steps, pre: Tensor, index: Tensor | None, hs: Any, cs: Any,
    gates: Tensor | None,
) -> None:  # fmt: skip
    """The states that the steps leave, `hs` and `cs`, and the gates `[rows, 4 hidden]` if they are to be kept.

    Args:
        pre: `[rows, 4 hidden]`, added to the product of the state; with an index `[rows]` the rows of it.
    """
    rows, hidden = steps.rows, layout.shape[1]
    dtype, state = values.dtype, SUM_DTYPES[values.dtype]
    all_four, states = (rows, 4 * hidden), (rows, hidden)
    if index is not None and rows:
        low, high = torch.aminmax(index)
        if low < 0 or high >= len(pre):
            raise BlockSparseError.expected("input", f"rows of a table that has {len(pre)}", f"{low} to {high}")
    z = values.new_empty(steps.batch, 4 * hidden)
    core, isa, found = cpu_core.operands(
        ("values", values, layout.values_shape, dtype),
        ("z", z.view(-1), (z.numel(),), dtype),
        ("pre", pre, all_four if index is None else (len(pre), 4 * hidden), dtype),
        ("index", index, (rows,), torch.int64),
        ("h_before", hs.all_before, states, dtype),
        ("h_after", hs.all_after, states, dtype),
        ("h_final", None if steps.aligned else hs.final.view(-1), (steps.batch * hidden,), dtype),
        ("c_before", cs.all_before, states, state),
        ("c_after", cs.all_after, states, state),
        ("c_final", None if steps.aligned else cs.final.view(-1), (steps.batch * hidden,), state),
        ("gates", gates, all_four, dtype),
    )
    (values_, _), (z_, _), pre_, (index_, _), h, h_after, (h_final, _), c, c_after, (c_final, _), gates_ = found
    core.lstm_forward(
        **_common(isa, layout, steps, dtype, transpose=False), values=values_, z=z_, pre=pre_, index=index_,
        h_before=h, h_after=h_after, h_final=h_final, c_before=c, c_after=c_after, c_final=c_final, gates=gates_,
    )  # fmt: skip


def backward(
    values: Tensor, layout: BlockLayout, steps: Steps, kept: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """As `lstm.back_in_time`: the gradients before the gates of all steps, and at the initial h and c."""
    rows, hidden = steps.rows, layout.shape[1]
    dtype, state = values.dtype, SUM_DTYPES[values.dtype]
    (gates, before, after), (grad_y, grad_h, grad_c) = kept, grads
    grad_pre, grad_h, grad_c = workspace.empty_like(gates), grad_h.clone(), grad_c.clone()
    core, isa, found = cpu_core.operands(
        ("values", values, layout.values_shape, dtype),
        ("gates", gates, (rows, 4 * hidden), dtype),
        ("c_before", before, (rows, hidden), state),
        ("c_after", after, (rows, hidden), state),
        ("grad_y", grad_y, (rows, hidden), dtype),
        ("grad_h", grad_h.view(-1), (steps.batch * hidden,), dtype),
        ("grad_c", grad_c.view(-1), (steps.batch * hidden,), state),
        ("grad_pre", grad_pre, (rows, 4 * hidden), dtype),
    )
    (values_, _), gates_, c_before, c, grad_y_, (grad_h_, _), (grad_c_, _), grad_pre_ = found
    core.lstm_backward(
        **_common(isa, layout, steps, dtype, transpose=True), values=values_, gates=gates_, c_before=c_before, c=c,
        grad_y=grad_y_, grad_h=grad_h_, grad_c=grad_c_, grad_pre=grad_pre_,
    )  # fmt: skip
    return grad_pre, grad_h, grad_c


def _common(isa: str, layout: BlockLayout, steps: Steps, dtype: torch.dtype, transpose: bool) -> dict[str, Any]:
    """What both passes take of the layout and the steps."""
    plan = plan_of(layout, transpose)
    return {
        "isa": isa,
        "dtype": cpu_core.DTYPES[dtype],
        "rows": steps.rows,
        "hidden": layout.shape[1],
        "step": _starts(steps.start),
        "reverse": steps.reverse,
        "block": layout.block_shape,
        "start": plan.start,
        "col": plan.col,
        "position": plan.block,
        "row": plan.row,
        "begin": plan.begin,
        "end": plan.end,
        "task_start": plan.task_start,
    }


@lru_cache(maxsize=64)
def _starts(start: tuple[int, ...]) -> np.ndarray:
    return np.array(start, dtype=np.int64)
