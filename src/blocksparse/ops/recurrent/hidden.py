"""GRUs and plain recurrences without gradients: one call of the compiled core runs all steps."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import BlockLayout
from ..registry import can_bypass_dispatcher, needs_grad
from . import cpu
from .op import WeightProduct, core_weights, empty
from .recurrence import Steps, Times


def hidden_states(
    steps: Steps | Times, kind: str, pre: Tensor, index: Tensor | None, h: Tensor, weight: Tensor,
    layout: BlockLayout | None, bias: Tensor | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Return y `[rows, hidden]` and the final h, or None if the core cannot run the call or autograd records it.

    Args:
        steps: the time steps.
        kind: "gru", "tanh" or "relu".
        pre: `[rows, gates * hidden]`, the products of the inputs, or with an index a table of such rows.
        index: `[rows]`, the row of `pre` for each row, or None.
        h: `[batch, hidden]`, the initial states.
        weight, layout, bias: of the product of the state; without a layout the weight is dense.
    """
    tensors = pre, index, h, weight, bias
    if isinstance(steps, Times) or needs_grad(*tensors) or not can_bypass_dispatcher(*tensors):
        return None
    in_core = core_weights([WeightProduct(weight, layout, steps.batch)])
    if in_core is None:
        return None
    y, final = empty(steps.rows, h.shape[1], h), h.clone(memory_format=torch.contiguous_format)
    cpu.hidden_forward(in_core, steps, kind, pre, index, bias if bias is None else bias.contiguous(), y, final)
    return y, final
