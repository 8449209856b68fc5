"""The activations that products fuse, and the gradients at what comes before them."""

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
    """Returns the gradient before the activation: of "relu" from its output, of others from what `before` computes."""
    if activation is None:
        return grad
    if activation == "relu":
        return torch.ops.aten.threshold_backward(grad, output, 0)  # type: ignore[no-any-return]
    if activation == "silu" and torch.is_grad_enabled():  # PyTorch's own has no gradient
        y = before()
        gate = y.sigmoid()
        return grad * gate * (1 + y * (1 - gate))
    backward = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}[activation]
    return backward(grad, before())  # type: ignore[no-any-return]
