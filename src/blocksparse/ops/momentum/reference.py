"""The definition of a step with momentum by PyTorch's operations on lists, for any device and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import BlockSparseError
from ..checks import always_supported

unsupported_reason = always_supported


@torch.no_grad()
def step(
    weights: list[Tensor], velocities: list[Tensor], grads: list[Tensor], *, momentum: float, rate: float, keep: float
) -> None:
    """Step all weights in place: v <- momentum v - rate g;  w <- keep w + v."""
    for name, tensors in (("velocities", velocities), ("grads", grads)):
        check_count(name, tensors, weights)
        for i, (w, tensor) in enumerate(zip(weights, tensors, strict=True)):
            if tensor.shape != w.shape:
                raise BlockSparseError.expected(f"{name}[{i}]", f"{list(w.shape)}, as its weight", list(tensor.shape))
    torch._foreach_mul_(velocities, momentum)
    torch._foreach_sub_(velocities, grads, alpha=rate)
    torch._foreach_mul_(weights, keep)
    torch._foreach_add_(weights, velocities)


def check_count(name: str, tensors: list[Tensor], weights: list[Tensor]) -> None:
    """Check that there is a tensor for each weight."""
    if len(tensors) != len(weights):
        raise BlockSparseError.expected(name, f"one for each of {len(weights)} weights", len(tensors))
