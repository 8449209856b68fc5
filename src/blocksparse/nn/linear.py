"""The block-sparse linear layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..layout import BlockLayout
from .module import BlockSparseModule, layout_for


class Linear(BlockSparseModule):
    """`torch.nn.Linear` with a block-sparse weight: y = activation(x W^T + b).

    Args:
        in_features, out_features: any positive sizes; what is no multiple of the block is padded inside.
        layout: which blocks of the (padded) weight `[out_features, in_features]` exist.
        density: instead of a layout, the part of the blocks that a random pattern stores; None for all.
        block_size: an int or (rows, columns), where no layout is given.
        bias: whether there is a bias `[out_features]`.
        activation: None, "relu", "gelu" or "silu".
        device, dtype: of the parameters.

    Weights and biases are drawn as torch.nn.Linear draws them, uniform within 1 / sqrt(fan_in), with the fan-in
    that each output really has in the layout.

    Shapes: `[..., in_features] -> [..., out_features]`.

    Raises:
        BlockSparseError: a layout of another shape, a density outside of 0..1, sizes that are not positive.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Linear(100, 300, density=0.25, block_size=32)
        >>> layer
        Linear(in_features=100, out_features=300, block_size=(32, 32), nnz=10, density=0.25, bias=True)
        >>> layer(torch.randn(5, 7, 100)).shape
        torch.Size([5, 7, 300])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        layout: BlockLayout | None = None,
        density: float | None = None,
        block_size: int | tuple[int, int] = 32,
        bias: bool = True,
        activation: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layout_for((out_features, in_features), layout, density, block_size), (), device, dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.activation = activation
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weights and biases anew."""
        layout, (height, width) = self.layout, self.layout.block_shape
        col = layout.col_indices().long()
        row = torch.from_numpy(layout.row_of_block)
        true_width = (self.in_features - col * width).clamp(max=width)  # of the last column: without its padding
        fan_in = torch.zeros(layout.grid[0], dtype=torch.float64).index_add(0, row, true_width.double())
        bound = torch.where(fan_in > 0, fan_in.rsqrt(), 0.0).to(self.values)
        with torch.no_grad():
            self.values.uniform_(-1, 1).mul_(bound[row.to(bound.device)].reshape(-1, 1, 1))
            outside = (torch.arange(height) >= (self.out_features - row * height).unsqueeze(1)).unsqueeze(2) | (
                torch.arange(width) >= true_width.unsqueeze(1)
            ).unsqueeze(1)
            self.values.masked_fill_(outside.to(self.values.device), 0)
            if self.bias is not None:
                self.bias.uniform_(-1, 1).mul_(bound.repeat_interleave(height)[: self.out_features])

    def forward(self, x: Tensor) -> Tensor:
        out_features, in_features = self.layout.shape
        bias: Tensor | None = self.bias
        if in_features != self.in_features and x.shape[-1] == self.in_features:
            x = F.pad(x, (0, in_features - self.in_features))
        if bias is not None and out_features != self.out_features:
            bias = F.pad(bias, (0, out_features - self.out_features))
        y = ops.linear(x, self.values, self.layout, bias, self.activation)
        return y if out_features == self.out_features else y[..., : self.out_features]

    def extra_repr(self) -> str:
        layout = self.layout
        activation = f", activation={self.activation!r}" if self.activation else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, block_size={layout.block_shape}, "
            f"nnz={layout.nnz}, density={layout.density:.4g}, bias={self.bias is not None}{activation}"
        )
