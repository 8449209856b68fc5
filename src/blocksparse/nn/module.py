"""What all block-sparse modules share: a layout, its values as a plain parameter, and both in the state dict."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import patterns
from ..errors import BlockSparseError
from ..layout import BlockLayout


class BlockSparseModule(nn.Module):
    """A module whose weight is `values` on `layout`.

    The state dict holds `values` and the layout's `crow_indices` and `col_indices` (plain tensors, so that
    safetensors takes it). Loading one with another pattern of the same shape changes the module's layout to it.
    """

    values: nn.Parameter
    crow_indices: Tensor
    col_indices: Tensor

    def __init__(self, layout: BlockLayout, kernel: tuple[int, ...], device: Any, dtype: torch.dtype | None):
        super().__init__()
        self._layout = layout
        self.values = nn.Parameter(torch.empty(*layout.values_shape, *kernel, device=device, dtype=dtype))
        # Copies: tensors that two modules share cannot be saved as safetensors.
        self.register_buffer("crow_indices", layout.crow_indices().clone().to(device))
        self.register_buffer("col_indices", layout.col_indices().clone().to(device))

    @property
    def layout(self) -> BlockLayout:
        """The blocks of the weight that `values` holds."""
        return self._layout

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        names = (prefix + "crow_indices", prefix + "col_indices")
        if all(name in state_dict for name in names):
            try:
                self._adopt(*(state_dict[name] for name in names))
            except BlockSparseError as error:
                errors.append(f"layout of {prefix or 'the module'}: {error}")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _adopt(self, crow: Tensor, col: Tensor) -> None:
        mine = self._layout
        if crow.shape != (mine.grid[0] + 1,) or crow[-1] != len(col) or (crow.diff() < 0).any():
            raise BlockSparseError.expected("crow_indices", f"those of {mine.grid[0]} rows", list(crow.shape))
        rows = np.repeat(np.arange(mine.grid[0]), crow.diff().cpu().numpy())
        layout = BlockLayout.from_indices(rows, col, mine.grid, mine.block_shape)
        if layout == mine:
            return
        self._layout = layout
        self.values.data = self.values.new_empty(layout.nnz, *self.values.shape[1:])
        self.crow_indices = self.crow_indices.new_empty(layout.grid[0] + 1)
        self.col_indices = self.col_indices.new_empty(layout.nnz)


def layout_for(
    shape: tuple[int, int],
    layout: BlockLayout | None,
    density: float | None,
    block_size: int | tuple[int, int],
) -> BlockLayout:
    """The layout of a module of `shape` (out, in), padded to whole blocks: the one given, or a random one.

    Without a density every block is stored. The random pattern is drawn with PyTorch's generator as the seed.
    """
    for name, size in zip(("out_features", "in_features"), shape, strict=True):
        if not isinstance(size, int) or size <= 0:
            raise BlockSparseError.expected(name, "a positive int", repr(size))
    if layout is not None:
        if density is not None:
            raise BlockSparseError.expected("density", "None where a layout is given", density)
        padded = _padded(shape, layout.block_shape)
        if layout.shape != padded:
            raise BlockSparseError.expected("layout", f"shape {padded} for {shape} features", repr(layout))
        return layout
    probe = BlockLayout([[True]], block_size)  # checks the block size
    padded = _padded(shape, probe.block_shape)
    if density is None:
        return patterns.dense(padded, probe.block_shape)
    seed = int(torch.randint(2**31, ()))
    return patterns.random(padded, probe.block_shape, density=density, seed=seed)


def _padded(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return math.ceil(shape[0] / block[0]) * block[0], math.ceil(shape[1] / block[1]) * block[1]
