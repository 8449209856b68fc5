"""Dropout with a leaky ReLU on the CPU: each pass is one call of the compiled core."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import cpu_core, workspace
from ..cpu_core import DTYPES, address

unsupported_reason = cpu_core.unsupported_reason


def forward(x: Tensor, factors: tuple[float, float, float], seed: int, least: int) -> tuple[Tensor, Tensor]:
    """Return the outputs and the codes of `dropout`, both of the shape of x."""
    shape, dtype = x.shape, x.dtype
    y, code = workspace.empty_like(x), torch.empty(shape, dtype=torch.uint8, device=x.device)
    cpu_core.core().dropout_forward(
        isa=cpu_core.isa(), dtype=DTYPES[dtype], count=x.numel(),
        x=address("x", x, shape, dtype), y=address("y", y, shape, dtype),
        code=address("code", code, shape, torch.uint8), factors=factors, seed=seed, least=least,
    )  # fmt: skip
    return y, code


def backward(grad: Tensor, code: Tensor, factors: tuple[float, float, float]) -> Tensor:
    """Return the gradient of x: grad times the factor of each code."""
    shape, dtype = grad.shape, grad.dtype
    grad_x = workspace.empty_like(grad)
    cpu_core.core().dropout_backward(
        isa=cpu_core.isa(), dtype=DTYPES[dtype], count=grad.numel(),
        grad=address("grad", grad, shape, dtype), code=address("code", code, shape, torch.uint8),
        grad_x=address("grad_x", grad_x, shape, dtype), factors=factors,
    )  # fmt: skip
    return grad_x
