"""Layouts as operands of compiled graphs, which then serve any pattern: one that changes is not compiled again."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..checked import checked_array
from ..errors import BlockSparseError
from ..layout import BlockLayout, are_indices_of


class OperandLayout(BlockLayout):
    """A layout in a graph that is compiled for any pattern of this grid and block: its index tensors are operands.

    It has what operations of a graph ask for, and no pattern of its own.
    """

    __setattr__ = object.__setattr__  # type: ignore[assignment]
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, crow: Tensor, col: Tensor, grid: tuple[int, int], block: tuple[int, int]):
        self.operands = crow, col
        self.grid, self.block_shape, self.nnz = grid, block, col.shape[0]
        self.shape = grid[0] * block[0], grid[1] * block[1]
        self.values_shape = col.shape[0], *block

    def indices_on(self, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        return self.operands

    def __repr__(self) -> str:
        return f"OperandLayout(shape={self.shape}, block_size={self.block_shape}, nnz={self.nnz})"


class _Known(NamedTuple):
    """The layout of index tensors that are operands, and PyTorch's counters of what was written to these."""

    layout: BlockLayout
    crow: weakref.ref[Tensor]
    written: tuple[int, int]


# By the column indices, as long as these live.
_known: Any = WeakIdKeyDictionary()


def make_operands(layout: BlockLayout, crow: Tensor, col: Tensor) -> None:
    """Has operations of graphs find a layout by these copies of its index tensors, until they are written to."""
    _known[col] = _Known(layout, weakref.ref(crow), (crow._version, col._version))


def layout_of_operands(crow: Tensor, col: Tensor) -> BlockLayout | None:
    """The layout of these index tensors, if they were made operands."""
    known: _Known | None = _known.get(col)
    if known is None:
        return None
    layout = known.layout
    if known.crow() is not crow or known.written != (crow._version, col._version):
        arrays = (
            checked_array(name, "indices", index) for name, index in (("crow_indices", crow), ("col_indices", col))
        )
        if not are_indices_of(layout, *arrays):
            others = "others, written to the buffers of a module: load its values and indices again"
            raise BlockSparseError.expected("crow_indices and col_indices", f"those of {layout!r}", others)
        make_operands(layout, crow, col)
    return layout
