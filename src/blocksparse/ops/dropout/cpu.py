"""Dropout with a leaky ReLU on the CPU: tensors to addresses, one call into the compiled core."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import cpu_core, workspace
from ..cpu_core import DTYPES

refusal = cpu_core.refusal


def forward(x: Tensor, factors: tuple[float, float, float], seed: int, least: int) -> tuple[Tensor, Tensor]:
    y, code = workspace.empty_like(x), torch.empty_like(x, dtype=torch.uint8)
    cpu_core.core().dropout_forward(
        isa=cpu_core.isa(),
        dtype=DTYPES[x.dtype],
        count=x.numel(),
        x=x.data_ptr(),
        y=y.data_ptr(),
        code=code.data_ptr(),
        factors=factors,
        seed=seed,
        least=least,
    )
    return y, code


def backward(grad: Tensor, code: Tensor, factors: tuple[float, float, float]) -> Tensor:
    grad_x = workspace.empty_like(grad)
    cpu_core.core().dropout_backward(
        isa=cpu_core.isa(),
        dtype=DTYPES[grad.dtype],
        count=grad.numel(),
        grad=grad.data_ptr(),
        code=code.data_ptr(),
        grad_x=grad_x.data_ptr(),
        factors=factors,
    )
    return grad_x
