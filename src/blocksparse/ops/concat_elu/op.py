"""ELUs of both signs with dropout: the choice of the backend, and the autograd node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...checked import integer
from ...errors import BlockSparseError
from ..dropout import LEVELS
from ..registry import Op, can_bypass_dispatcher
from . import cpu, reference

CONCAT_ELU = Op("concat_elu", cpu, reference, fallback=reference)


def forward(x: Tensor, scale: float = 1.0, seed: int = 0, least: int = 0) -> Tensor:
    """Return the outputs, contiguous, without autograd."""
    _check(x, seed, least)
    y: Tensor = CONCAT_ELU.on(x.device, x.dtype).forward(x.contiguous(), scale, seed, least)
    return y


def backward(grad: Tensor, x: Tensor, scale: float = 1.0, seed: int = 0, least: int = 0) -> Tensor:
    """Return the gradient at x from the gradient at y, contiguous, without autograd."""
    _check(x, seed, least)
    if grad.shape != (x.shape[0], 2 * x.shape[1]) or grad.dtype != x.dtype or grad.device != x.device:
        expected = f"{x.dtype} {[x.shape[0], 2 * x.shape[1]]} on {x.device} for x {list(x.shape)}"
        raise BlockSparseError.expected("grad", expected, f"{grad.dtype} {list(grad.shape)} on {grad.device}")
    backend = CONCAT_ELU.on(x.device, x.dtype)
    grad_x: Tensor = backend.backward(grad.contiguous(), x.contiguous(), scale, seed, least)
    return grad_x


def _check(x: Tensor, seed: int, least: int) -> None:
    """Check the numbers' ranges, and that x is a matrix."""
    integer("seed", seed, 0, below=2**64), integer("least", least, 0, below=LEVELS)
    if x.dim() != 2:
        raise BlockSparseError.expected("x", "[rows, features]", list(x.shape))


class ConcatEluNode(torch.autograd.Function):
    """`forward` with the gradient `backward`; gradients of gradients are computed by PyTorch's operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, seed: int, least: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.options = scale, seed, least
        return forward(x, *ctx.options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        direct = can_bypass_dispatcher(grad, x) and not torch.is_grad_enabled()  # enabled for second derivatives
        direct = direct and not torch._C._functorch.is_legacy_batchedtensor(grad)  # by `is_grads_batched`
        return (backward if direct else _differentiable_backward)(grad, x, *ctx.options), None, None, None


def _differentiable_backward(grad: Tensor, x: Tensor, scale: float, seed: int, least: int) -> Tensor:
    """Return the same as `backward`, differentiable in both tensors."""
    upper, lower = torch.where(reference.keep_mask(x, seed, least), grad, 0).chunk(2, 1)
    slope = (-x.abs()).exp()
    return scale * torch.where(x > 0, upper - lower * slope, upper * slope - lower)
