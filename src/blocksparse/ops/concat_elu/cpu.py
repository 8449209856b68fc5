"""ELUs of both signs on the CPU: each pass is one call of the compiled core."""

from __future__ import annotations

from torch import Tensor

from .. import cpu_core, workspace
from ..cpu_core import DTYPES, address

unsupported_reason = cpu_core.unsupported_reason


def forward(x: Tensor, scale: float, seed: int, least: int) -> Tensor:
    rows, features = x.shape
    y = workspace.empty((rows, 2 * features), x.dtype, x.device)
    _call(x, None, y, scale, seed, least)
    return y


def backward(grad: Tensor, x: Tensor, scale: float, seed: int, least: int) -> Tensor:
    grad_x = workspace.empty_like(x)
    _call(x, grad, grad_x, scale, seed, least)
    return grad_x


def _call(x: Tensor, grad: Tensor | None, to: Tensor, scale: float, seed: int, least: int) -> None:
    """Write the outputs for x to `to`; with `grad`, write the gradient of x."""
    (rows, features), dtype = x.shape, x.dtype
    one, both = (rows, features), (rows, 2 * features)
    cpu_core.core().concat_elu(
        isa=cpu_core.isa(), dtype=DTYPES[dtype], rows=rows, features=features,
        x=address("x", x, one, dtype), grad=address("grad", grad, both, dtype),
        to=address("to", to, both if grad is None else one, dtype), scale=scale, seed=seed, least=least,
    )  # fmt: skip
