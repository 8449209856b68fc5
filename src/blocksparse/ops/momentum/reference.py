"""The definition of a step with momentum, in PyTorch's operations on lists: any device, any dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


@torch.no_grad()
def step(
    weights: list[Tensor],
    velocities: list[Tensor],
    grads: list[Tensor],
    *,
    momentum: float,
    rate: float,
    keep: float,
) -> None:
    torch._foreach_mul_(velocities, momentum)
    torch._foreach_sub_(velocities, grads, alpha=rate)
    torch._foreach_mul_(weights, keep)
    torch._foreach_add_(weights, velocities)
