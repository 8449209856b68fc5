"""Layouts in graphs of PyTorch: as index tensors, which ops of a compiled or exported graph take."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..checked import checked_array, checked_ints
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..state_indices import has_indices, layout_of_indices


class GraphLayout(NamedTuple):
    """A layout as ops of a graph take it.

    `indices` are crow and col, and for a graph that is lowered to Triton also the schedule of the kernels.
    """

    indices: Sequence[Tensor]
    in_blocks: int


AnyLayout = BlockLayout | GraphLayout


class DynamicLayout(BlockLayout):
    """A layout whose index tensors are inputs of a compiled graph, which so serves every layout of this grid and block.

    It has the attributes that ops of a graph need, but no pattern of its own.
    """

    __setattr__ = object.__setattr__  # type: ignore[assignment]
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, crow: Tensor, col: Tensor, grid: tuple[int, int], block: tuple[int, int]):
        self.indices = crow, col
        self.grid, self.block_shape, self.nnz = grid, block, col.shape[0]
        self.shape = grid[0] * block[0], grid[1] * block[1]
        self.values_shape = col.shape[0], *block

    def indices_on(self, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        return self.indices

    def keys_of_blocks(self) -> np.ndarray:
        raise BlockSparseError(
            "The blocks of a layout that is chosen within a compiled graph are not known: combine or crop it outside "
            "of the compiled function"
        )

    def __getitem__(self, key: Any) -> BlockLayout:
        return BlockLayout._from_keys(self.keys_of_blocks(), self.grid, self.block_shape)

    def __repr__(self) -> str:
        return f"DynamicLayout(shape={self.shape}, block_size={self.block_shape}, nnz={self.nnz})"


def is_exporting() -> bool:
    """Return whether `torch.export` traces a model.

    In PyTorch 2.10 and 2.11, `torch.compiler.is_exporting()` is true in graphs of `torch.compile` too.
    """
    return torch.compiler._is_exporting_flag


# -- from a layout to index tensors ------------------------------------------------------------------------------


def index_tensors(layout: BlockLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return crow and col of a layout on a device, also while Dynamo traces the first call that needs them there."""
    if torch.compiler.is_dynamo_compiling() and type(layout) is BlockLayout:  # a DynamicLayout has them already
        _make_index_tensors(layout, device)
    return layout.indices_on(device)


def _make_index_tensors(layout: BlockLayout, device: torch.device) -> bool:
    """Make the index tensors when torch.compile traces, so that the graph has no step for them."""
    layout.indices_on(device)
    return True


# Dynamo calls this function instead of tracing it: before PyTorch 2.13 it cannot trace how index tensors are made.
# See `ops/linear/triton.py`.
torch.utils._pytree.register_constant(BlockLayout)
_make_index_tensors._dynamo_marked_constant = True  # type: ignore[attr-defined]


# -- from index tensors to a layout ------------------------------------------------------------------------------


class _Registered(NamedTuple):
    """The layout of registered index tensors, and PyTorch's version counters of these tensors."""

    layout: BlockLayout
    crow: weakref.ref[Tensor]
    versions: tuple[int, int]


# Keyed by the column indices; an entry lives as long as they do.
_registered: Any = WeakIdKeyDictionary()


def register_indices(layout: BlockLayout, crow: Tensor, col: Tensor) -> None:
    """Let ops of graphs find a layout by these copies of its index tensors, until somebody writes to them."""
    _registered[col] = _Registered(layout, weakref.ref(crow), (crow._version, col._version))


def registered_layout(crow: Tensor, col: Tensor) -> BlockLayout | None:
    """Return the layout for which these index tensors were registered, or None."""
    entry: _Registered | None = _registered.get(col)
    if entry is None:
        return None
    layout = entry.layout
    if entry.crow() is not crow or entry.versions != (crow._version, col._version):
        arrays = (
            checked_array(name, "indices", index) for name, index in (("crow_indices", crow), ("col_indices", col))
        )
        if not has_indices(layout, *arrays):
            got = "other numbers: a module's index buffers were overwritten. Load its values and indices again"
            raise BlockSparseError.expected("crow_indices and col_indices", f"those of {layout!r}", got)
        register_indices(layout, crow, col)
    return layout


def grid_from(indices: Sequence[Tensor], in_blocks: int) -> tuple[int, int]:
    """Return (out_blocks, in_blocks) from the sizes of index tensors, which may be traced."""
    vectors = len(indices) >= 2 and indices[0].dim() == indices[1].dim() == 1
    if not vectors or indices[0].shape[0] < 2 or in_blocks < 1:
        got = f"{[list(index.shape) for index in indices]}, {in_blocks}"
        raise BlockSparseError.expected(
            "indices, in_blocks", "crow [out_blocks + 1], col [nnz] of at least one block row, a positive int", got
        )
    return indices[0].shape[0] - 1, in_blocks


def layout_from(indices: Sequence[Tensor], grid: tuple[int, int], block: tuple[int, int]) -> BlockLayout:
    """Return the layout of these index tensors; build it if it is unknown, as in a graph loaded from a file."""
    crow, col = indices[:2]
    tag = getattr(col, "_blocksparse_layout", None)
    layout: BlockLayout | None = tag() if tag is not None else None
    if layout is not None and layout.block_shape == block and layout.grid == grid:
        # A copy keeps the tag but may have been written to: only the layout's own tensors are trusted.
        own_crow, own_col = layout.indices_on(col.device)
        if own_crow is crow and own_col is col:
            return layout
    layout = registered_layout(crow, col)
    if layout is not None and layout.block_shape == block and layout.grid == grid:
        return layout
    starts, cols = checked_ints("crow_indices", crow), checked_ints("col_indices", col)
    return _layout_from_bytes((starts.tobytes(), starts.dtype), (cols.tobytes(), cols.dtype), grid, block)


@lru_cache(maxsize=64)
def _layout_from_bytes(
    crow: tuple[bytes, Any], col: tuple[bytes, Any], grid: tuple[int, int], block: tuple[int, int]
) -> BlockLayout:
    return layout_of_indices(np.frombuffer(*crow), np.frombuffer(*col), grid, block)


# -- several layouts ---------------------------------------------------------------------------------------------


def pack_layouts(layouts: Sequence[BlockLayout | None], device: torch.device) -> tuple[list[Tensor], list[int]]:
    """Return the index tensors of several layouts, and for each its block columns and block shape; zeros for None."""
    indices: list[Tensor] = []
    sizes: list[int] = []
    for layout in layouts:
        if layout is None:
            sizes += [0, 0, 0]
        else:
            indices += index_tensors(layout, device)
            sizes += [layout.grid[1], *layout.block_shape]
    return indices, sizes


def unpack_layouts(indices: Sequence[Tensor], sizes: Sequence[int]) -> list[BlockLayout | None]:
    """Return the layouts that `pack_layouts` packed."""
    left, layouts = iter(indices), []
    for in_blocks, *block in zip(sizes[::3], sizes[1::3], sizes[2::3], strict=True):
        pair = (next(left), next(left)) if in_blocks else None
        layouts.append(layout_from(pair, grid_from(pair, in_blocks), (block[0], block[1])) if pair else None)
    return layouts
