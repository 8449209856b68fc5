"""The definition of the linear product in 8 bits, in plain PyTorch on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...convert import block_coordinates
from ...layout import BlockLayout
from ..activations import ACTIVATIONS
from ..checks import always_supported

# Tokens and outputs without a larger number count as 0, because their factor would not fit float32.
NEGLIGIBLE = 1e-36


unsupported_reason = always_supported


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows rounded to integers from -127 to 127, as float32, and their scales; NaN if a row is not finite."""
    x = x.float()
    largest = x.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(len(x), 1)
    scale = largest / 127 + (x * 0).sum(-1, keepdim=True)
    # PyTorch divides a Python number by a tensor in two roundings, which gives other integers now and then.
    factor = torch.where(largest > NEGLIGIBLE, largest.new_tensor(127) / largest, 0)
    return (x * factor).round().clamp(-127, 127).nan_to_num(0), scale


def int8_linear(
    x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, layout: BlockLayout, activation: str | None
) -> Tensor:
    """Return activation(x W^T + bias), `[tokens, in] -> [tokens, out]`."""
    rows, cols = block_coordinates(layout, x.device)
    numbers, scale = rounded(x)
    blocks = numbers.double().reshape(-1, layout.grid[1], layout.block_shape[1]).index_select(1, cols)
    products = torch.einsum("tki,koi->tko", blocks, values.double()).float() * scales
    y = products.new_zeros(len(x), layout.grid[0], layout.block_shape[0]).index_add(1, rows, products)
    y = y.flatten(1) * scale
    if bias is not None:
        y = y + bias.float()
    return ACTIVATIONS[activation](y).to(x.dtype)
