"""Weight normalisation over the fan-in that the layout stores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..convert import block_coordinates
from ..errors import BlockSparseError
from ..layout import BlockLayout
from .module import BlockSparseModule


def l2_normalize(values: Tensor, layout: BlockLayout, gain: Tensor | None = None, epsilon: float = 1e-12) -> Tensor:
    """The values divided by the l2 norm of all that their output is a sum of: its stored inputs and all taps.

    Args:
        values: `[nnz, block_out, block_in]`, with a convolution's `*kernel` behind or not.
        layout: which blocks these are.
        gain: `[out_features]`, by which each output's weights are multiplied, or None.
        epsilon: the least sum of squares that is divided by.

    Returns:
        values of the same shape; differentiable in values and gain.

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.random((64, 128), block_size=32, density=0.5, seed=0)
        >>> values = bs.nn.l2_normalize(torch.randn(*layout.values_shape, 3, 3), layout)
        >>> torch.allclose(bs.to_dense(values, layout).flatten(1).norm(dim=1), torch.ones(64))
        True

    Source: Salimans, Kingma, Weight normalization (2016); `l2_normalize` of openai/blocksparse (2017).
    """
    scale = norms(values, layout).clamp(min=epsilon**0.5).reciprocal()
    if gain is not None:
        scale = scale * gain
    rows, _ = block_coordinates(layout, values.device)
    blocks = scale.reshape(layout.grid[0], layout.block_shape[0])[rows]
    return values * blocks.reshape(*blocks.shape, *[1] * (values.dim() - 2))


def norms(values: Tensor, layout: BlockLayout) -> Tensor:
    """The l2 norm of each output's stored weights, `[out_features]`; differentiable also where it is 0."""
    layout.check_values(values)
    squares = values.square()
    if values.dim() > 3:
        squares = squares.flatten(3).sum(-1)
    # Sums over the blocks of a row are a product with ones: as deterministic, and as often differentiable.
    total = ops.linear(values.new_ones(1, layout.shape[1]), squares, layout).squeeze(0)
    return torch.where(total > 0, total, 1).sqrt() * (total > 0)


class WeightNorm(nn.Module):
    """A block-sparse module whose outputs' weights are trained as direction and length: gain * values / |values|.

    Args:
        module: a block-sparse module. Its `values` stay its parameter, of which only the direction counts.

    `gain` is `[out_features]` (padded to whole blocks, as the layout is), and begins as the norms of the values, so
    that nothing changes at first. The norm of an output is taken over its stored inputs and all taps.

    Shapes: those of the module, whose call this is.

    Raises:
        BlockSparseError: a module that is not block-sparse.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.WeightNorm(bs.nn.Conv2d(64, 64, 3, density=0.5))
        >>> layer(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 64, 6, 6])
        >>> [name for name, _ in layer.named_parameters()]
        ['gain', 'module.values', 'module.bias']

    Source: Salimans, Kingma, Weight normalization (2016).
    """

    def __init__(self, module: BlockSparseModule):
        super().__init__()
        if not isinstance(module, BlockSparseModule):
            raise BlockSparseError.expected("module", "a block-sparse module", type(module).__name__)
        self.module = module
        self.gain = nn.Parameter(norms(module.values.detach(), module.layout))

    @property
    def values(self) -> Tensor:
        """The weights in use."""
        return l2_normalize(self.module.values, self.module.layout, self.gain)

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        return torch.func.functional_call(self.module, {"values": self.values}, inputs, options)

    def fold(self) -> BlockSparseModule:
        """The module itself, with the weights in use as its values."""
        with torch.no_grad():
            self.module.values.copy_(self.values)
        return self.module
