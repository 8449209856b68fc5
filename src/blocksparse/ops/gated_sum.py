"""Gated sums x + a * sigmoid(b), in one pass over memory on the CPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import cpu_core, workspace
from .checks import SUM_DTYPES
from .cpu_core import DTYPES, address
from .registry import can_call_core


def gated_sum(x: Tensor, pair: Tensor) -> Tensor:
    """Return x + a * sigmoid(b), where a and b are the halves of the channels of `pair`.

    Args:
        x: `[n, channels, *]`.
        pair: `[n, 2 channels, *]`.

    >>> import torch
    >>> gated_sum(torch.ones(1, 2), torch.tensor([[4.0, 6.0, 0.0, 0.0]]))
    tensor([[3., 4.]])
    """
    if x.dtype in SUM_DTYPES and x.is_contiguous() and pair.is_contiguous() and can_call_core(x, pair):
        y: Tensor = _Node.apply(x, pair)  # type: ignore[no-untyped-call]
        return y
    return _composed(x, pair)


def _composed(x: Tensor, pair: Tensor) -> Tensor:
    a, b = pair.chunk(2, 1)
    return torch.addcmul(x, a, b.sigmoid())


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: Tensor) -> Tensor:
        ctx.save_for_backward(pair)
        y = workspace.empty_like(x)
        _call(x, pair, None, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (pair,) = ctx.saved_tensors
        batched = torch._C._functorch.is_legacy_batchedtensor(grad)  # by `is_grads_batched`
        second = torch.is_grad_enabled()  # for second derivatives
        if batched or second or not (grad.is_contiguous() and can_call_core(grad, pair)):
            a, b = pair.chunk(2, 1)
            gate = b.sigmoid()
            return grad, torch.cat([grad * gate, grad * a * gate * (1 - gate)], 1)
        grad_pair = workspace.empty_like(pair)
        _call(None, pair, grad, grad_pair)
        return grad, grad_pair


def _call(x: Tensor | None, pair: Tensor, grad: Tensor | None, to: Tensor) -> None:
    """Write the sums to `to`; with `grad`, the gradient at `pair`."""
    n, channels, *space = pair.shape
    one, dtype = (n, channels // 2, *space), pair.dtype
    cpu_core.core().gated_sum(
        isa=cpu_core.isa(), dtype=DTYPES[dtype], rows=n, features=math.prod(one[1:]),
        x=address("x", x, one, dtype), pair=address("pair", pair, tuple(pair.shape), dtype),
        grad=address("grad", grad, one, dtype), to=to.data_ptr(),
    )  # fmt: skip
