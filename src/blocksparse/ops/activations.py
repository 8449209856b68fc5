"""Activations that products fuse, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda y: y,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


def grad_before(grad: Tensor, activation: str | None, output: Tensor | None, before: Callable[[], Tensor]) -> Tensor:
    """Return the gradient at the input of an activation; "relu" needs its output, others the input, `before()`."""
    if activation is None:
        return grad
    if activation == "relu":
        return torch.ops.aten.threshold_backward(grad, output, 0)  # type: ignore[no-any-return]
    if activation == "silu" and torch.is_grad_enabled():  # PyTorch's own backward op has no gradient
        y = before()
        gate = y.sigmoid()
        return grad * gate * (1 + y * (1 - gate))
    backward = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}[activation]
    return backward(grad, before())  # type: ignore[no-any-return]
