"""Conversion between dense weights and the values of a layout."""

from __future__ import annotations

import torch

from .errors import BlockSparseError
from .layout import BlockLayout, check_layout

__all__ = ["block_coordinates", "from_dense", "to_dense"]


def from_dense(weight: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Return the values of the layout's blocks from a dense weight; other elements are dropped. Differentiable.

    Args:
        weight: `[out_features, in_features]`, or `[out_channels, in_channels, *kernel]` of a convolution.
        layout: a layout with that shape.

    Returns:
        `[nnz, block_out, block_in]`, or `[nnz, block_out, block_in, *kernel]`, with the weight's dtype and device.

    Raises:
        BlockSparseError: the weight has another shape than the layout.

    >>> import torch, blocksparse as bs
    >>> layout = bs.BlockLayout([[True, False], [True, True]], block_size=2)
    >>> bs.from_dense(torch.arange(16.0).reshape(4, 4), layout)[1]
    tensor([[ 8.,  9.],
            [12., 13.]])
    """
    check_layout(layout)
    if not isinstance(weight, torch.Tensor):
        raise BlockSparseError.expected("weight", f"a tensor of shape {layout.shape}", type(weight).__name__)
    if weight.layout != torch.strided:
        raise BlockSparseError.expected("weight", "a dense tensor (`weight.to_dense()`)", weight.layout)
    if weight.dim() < 2 or tuple(weight.shape[:2]) != layout.shape:
        raise BlockSparseError.expected("weight", f"shape {layout.shape} for {layout!r}", tuple(weight.shape))
    kernel = weight.shape[2:]
    blocks = weight.reshape(layout.grid[0], layout.block_shape[0], layout.grid[1], layout.block_shape[1], *kernel)
    rows, cols = block_coordinates(layout, weight.device)
    # Indexing preserves a memory format such as channels-last, but values are contiguous.
    return blocks.transpose(1, 2)[rows, cols].contiguous()


def to_dense(values: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Return the dense weight `[out_features, in_features, *kernel]`, 0 outside the layout. Differentiable.

    Args:
        values: `[nnz, block_out, block_in]`, or `[nnz, block_out, block_in, *kernel]` of a convolution.
        layout: the positions of the values' blocks.

    Raises:
        BlockSparseError: the values have another shape than the layout's.

    >>> import torch, blocksparse as bs
    >>> layout = bs.BlockLayout([[True, False], [False, True]], block_size=(1, 2))
    >>> bs.to_dense(torch.tensor([[[1., 2.]], [[3., 4.]]]), layout)
    tensor([[1., 2., 0., 0.],
            [0., 0., 3., 4.]])
    """
    check_layout(layout)
    layout.check_values(values)
    kernel = values.shape[3:]
    (rows, cols), (block_out, block_in) = layout.grid, layout.block_shape
    weight = values.new_zeros(rows, block_out, cols, block_in, *kernel)
    # Written in place through a view in block order, so that memory holds only one dense weight.
    weight.transpose(1, 2).index_put_(block_coordinates(layout, values.device), values)
    return weight.reshape(*layout.shape, *kernel)


def block_coordinates(layout: BlockLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block row and the block column of each stored block, int64 on `device`."""
    # Computed from the index tensors: torch.compile can trace it, and nothing is copied between devices.
    crow, col = layout.indices_on(device)
    rows = torch.arange(layout.grid[0], device=device).repeat_interleave(crow.diff(), output_size=layout.nnz)
    return rows, col.long()
