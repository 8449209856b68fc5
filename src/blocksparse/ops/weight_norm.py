"""Weight normalization on the CPU, in one call of the compiled core each for the weights and their gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layout import BlockLayout
from . import cpu_core, workspace
from .cpu_core import DTYPES, address
from .registry import can_call_core

Composed = Callable[[Tensor, BlockLayout, Tensor | None], Tensor]


def can_normalize(values: Tensor, gain: Tensor | None) -> bool:
    """Return whether `normalize` serves these tensors."""
    return values.dtype in (torch.float32, torch.float64) and values.numel() > 0 and can_call_core(values, gain)


def normalize(values: Tensor, layout: BlockLayout, gain: Tensor | None, least: float, composed: Composed) -> Tensor:
    """Return gain * values / norm, where the norm of an output is at least `least`.

    `composed` computes the same by operations that can be differentiated any number of times.
    """
    normalized: Tensor = _Node.apply(values, gain, layout, least, composed)  # type: ignore[no-untyped-call]
    return normalized


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, gain: Tensor | None, layout: BlockLayout, least: float, composed: Composed
    ) -> Tensor:
        ctx.save_for_backward(values, gain)
        ctx.layout, ctx.least, ctx.composed = layout, least, composed
        return _call(values, gain, layout, least, None)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, gain = ctx.saved_tensors
        batched = torch._C._functorch.is_legacy_batchedtensor(grad)  # by `is_grads_batched`
        if not batched and not torch.is_grad_enabled() and can_normalize(grad, None):
            return *_call(values, gain, ctx.layout, ctx.least, grad), None, None, None
        needed = [tensor for tensor, need in zip((values, gain), ctx.needs_input_grad, strict=False) if need]
        second = torch.is_grad_enabled()
        with torch.enable_grad():
            again = ctx.composed(values, ctx.layout, gain)
            grads = iter(torch.autograd.grad(again, needed, grad, create_graph=second))
        return *(next(grads) if need else None for need in ctx.needs_input_grad[:2]), None, None, None


def _call(
    values: Tensor, gain: Tensor | None, layout: BlockLayout, least: float, grad: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the normalized values and None; with `grad`, the gradients of the values and of the gain."""
    dtype, shape = values.dtype, tuple(values.shape)
    values = values.data.contiguous()
    gain = None if gain is None else gain.data.contiguous()
    grad = None if grad is None else grad.contiguous()
    to = workspace.empty(shape, dtype, values.device)
    grad_gain = None if grad is None or gain is None else torch.empty_like(gain)
    outputs = layout.shape[:1]
    cpu_core.core().weight_norm(
        isa=cpu_core.isa(), dtype=DTYPES[dtype], outputs=shape[1], inner=math.prod(shape[2:]),
        start=layout.derived("weight norm rows", lambda: layout.row_start.astype(np.int64)),
        values=address("values", values, shape, dtype), gain=address("gain", gain, outputs, dtype), least=least,
        grad=address("grad", grad, shape, dtype), to=to.data_ptr(),
        grad_gain=address("grad_gain", grad_gain, outputs, dtype),
    )  # fmt: skip
    return to, grad_gain
