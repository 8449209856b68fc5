"""Dropout with a leaky ReLU: the choice of its backend, and its autograd node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...checked import integer
from ...errors import BlockSparseError
from ..registry import Op, can_bypass_dispatcher
from . import cpu, reference

DROPOUT = Op("dropout", cpu, reference, fallback=reference)

LEVELS = 2**16

Factors = tuple[float, float, float]


def forward(x: Tensor, factors: Factors, seed: int, least: int) -> tuple[Tensor, Tensor]:
    """Return the outputs and the codes, contiguous and of x's shape, without autograd.

    >>> import torch
    >>> forward(torch.tensor([-1.0, 2.0]), (0.0, 1.0, 0.5), seed=0, least=0)
    (tensor([-0.5000,  2.0000]), tensor([2, 1], dtype=torch.uint8))
    """
    integer("seed", seed, 0, below=2**64), integer("least", least, 0, below=LEVELS)
    _check_factors(factors)
    result: tuple[Tensor, Tensor] = DROPOUT.on(x.device, x.dtype).forward(_contiguous(x), factors, seed, least)
    return result


def backward(grad: Tensor, code: Tensor, factors: Factors) -> Tensor:
    """Return the gradient of x, without autograd."""
    _check_factors(factors)
    if code.shape != grad.shape or code.dtype is not torch.uint8 or code.device != grad.device:
        expected = f"uint8 {list(grad.shape)} on {grad.device}, as grad"
        raise BlockSparseError.expected("code", expected, f"{code.dtype} {list(code.shape)} on {code.device}")
    grad_x: Tensor = DROPOUT.on(grad.device, grad.dtype).backward(_contiguous(grad), _contiguous(code), factors)
    return grad_x


def _check_factors(factors: Factors) -> None:
    if len(factors) != 3 or not all(isinstance(factor, int | float) for factor in factors):
        raise BlockSparseError.expected("factors", "three numbers, one for each code", factors)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg().contiguous()


class DropoutNode(torch.autograd.Function):
    """The product with the factors of the codes. With codes as an argument it is linear, so it is its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Factors, seed: int, least: int, code: Tensor | None) -> Tensor:
        if code is None:
            y, code = forward(x, factors, seed, least)
        else:
            y = backward(x, code, factors)
        ctx.save_for_backward(code)
        ctx.options = factors, seed, least
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (code,) = ctx.saved_tensors
        if can_bypass_dispatcher(grad) and not torch._C._functorch.is_legacy_batchedtensor(grad):
            grad_x: Tensor = DropoutNode.apply(grad, *ctx.options, code)  # type: ignore[no-untyped-call]
        else:  # a batch of `is_grads_batched`, or a transform
            grad_x = reference.backward(grad, code, ctx.options[0])
        return grad_x, None, None, None, None
