"""The definition of the linear products in plain PyTorch: any device, any dtype, differentiable, slow."""

from __future__ import annotations

import torch

from ...convert import block_coordinates
from ...layout import BlockLayout
from ..activations import ACTIVATIONS
from ..checks import accumulator, always_supported

unsupported_reason = always_supported


def linear(
    x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, layout: BlockLayout, transpose: bool,
    activation: str | None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return activation(x W^T + bias), or x W with `transpose`, `[tokens, out]`; writes `out` if given."""
    rows, cols = block_coordinates(layout, x.device)
    grid, block = layout.grid, layout.block_shape
    if transpose:
        rows, cols, grid, block, values = cols, rows, grid[::-1], block[::-1], values.transpose(1, 2)
    wide = accumulator(x.dtype)
    blocks = x.to(wide).reshape(-1, grid[1], block[1]).index_select(1, cols)
    products = torch.einsum("tki,koi->tko", blocks, values.to(wide))
    y = products.new_zeros(x.shape[0], grid[0], block[0]).index_add(1, rows, products)
    y = y.reshape(-1, grid[0] * block[0])
    if bias is not None:
        y = y + bias.to(wide)
    y = ACTIVATIONS[activation](y).to(x.dtype)
    return y if out is None else out.copy_(y)


def linear_wgrad(
    grad: torch.Tensor, x: torch.Tensor, layout: BlockLayout, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return grad^T x on the layout, `[nnz, block_out, block_in]`; writes `out` if given."""
    rows, cols = block_coordinates(layout, x.device)
    wide = accumulator(x.dtype)
    left = grad.to(wide).reshape(-1, layout.grid[0], layout.block_shape[0]).index_select(1, rows)
    right = x.to(wide).reshape(-1, layout.grid[1], layout.block_shape[1]).index_select(1, cols)
    values = torch.einsum("tko,tki->koi", left, right).to(x.dtype)
    return values if out is None else out.copy_(values)
