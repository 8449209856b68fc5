"""Blocks of dense weights whose rows FSDP2 shards; a block may lie on two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import BlockLayout
from ..surgery.blocks import Blocks
from .fsdp import sharded_like
from .sharded_weight import Shard, move_rows


class DenseShard:
    """The rows of a dense parameter on this process; they are columns of the weight if the parameter is transposed.

    Args:
        blocks: the blocks of the parameter.
        dense: the parameter, a DTensor.
    """

    def __init__(self, blocks: Blocks, dense: Any):
        self.blocks, self.dense = blocks, dense
        self.shard = Shard.of(dense)
        self.axis = 1 if blocks.transposed else 0
        self.of_line = blocks.block_of_line(0), blocks.block_of_line(1)
        """The row (column) of blocks that each row (column) of the weight is in."""
        along, length = self.of_line[self.axis], dense.shape[0]
        bounds = self.shard.bounds(length) * (along.size // length)
        starts = np.flatnonzero(np.diff(along, prepend=-1))
        # Each process completes the blocks that begin with it.
        self.bounds, ends = bounds, np.append(starts, along.size)
        self.whole = ends[np.searchsorted(ends, bounds)]
        blocks_at = np.append(along, blocks.grid[self.axis])
        self.first = blocks_at[self.whole]
        """The first row (column) of blocks that each process completes, and the end."""

    def _owner(self, bounds: np.ndarray) -> np.ndarray:
        return np.repeat(np.arange(self.shard.count), np.diff(bounds))

    def fold(self) -> Tensor:
        """Return the blocks that begin on this process, in the shape of `Blocks.fold`."""
        blocks, shard = self.blocks, self.shard
        lines = blocks.matrix(self.dense.to_local()).movedim(self.axis, 0)
        lines = move_rows(lines, self._owner(self.bounds), self._owner(self.whole), shard)
        matrix = lines.movedim(0, self.axis)
        grid, (height, width) = list(blocks.grid), blocks.block_shape
        lines_here = slice(int(self.whole[shard.rank]), int(self.whole[shard.rank + 1]))
        first, end = self.first[shard.rank : shard.rank + 2]
        grid[self.axis] = int(end - first)
        places = [blocks.place_of_line(axis) for axis in (0, 1)]
        places[self.axis] = places[self.axis][lines_here] - first * blocks.block_shape[self.axis]
        rows, cols = (torch.from_numpy(each).to(matrix.device) for each in places)
        padded = matrix.new_zeros(grid[0] * height, grid[1] * width, *matrix.shape[2:])
        padded[rows[:, None], cols] = matrix
        return padded.view(grid[0], height, grid[1], width, *matrix.shape[2:])

    def reduce_blocks(self, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `reduce` of all folded blocks, `[out_blocks, in_blocks]`, on every process."""
        found = reduce(self.fold())
        first, end = self.first[self.shard.rank : self.shard.rank + 2]
        every = found.new_zeros(self.blocks.grid)
        every.narrow(self.axis, int(first), int(end - first)).copy_(found)
        dist.all_reduce(every, group=self.shard.group)
        return every

    def mask_(self, keep: Tensor) -> None:
        """Zero all blocks except those to keep, `[out_blocks, in_blocks]`."""
        local = self.blocks.matrix(self.dense.to_local())
        lines = list(self.of_line)
        lines[self.axis] = lines[self.axis][slice(*self.bounds[self.shard.rank : self.shard.rank + 2])]
        rows, cols = (torch.from_numpy(each).to(keep.device) for each in lines)
        mask = keep[rows][:, cols].to(local.device)
        local.masked_fill_(~mask.view(*mask.shape, *[1] * (local.dim() - 2)), 0)

    def values(self, layout: BlockLayout) -> Tensor:
        """Return the values of the weight on a layout, sharded by blocks."""
        shard = self.shard
        along = layout.row_of_block if self.axis == 0 else layout.col_of_block
        owner = np.searchsorted(self.first, along, side="right") - 1
        mine = np.flatnonzero(owner == shard.rank)
        places = [layout.row_of_block[mine], layout.col_of_block[mine]]
        places[self.axis] = places[self.axis] - self.first[shard.rank]
        rows, cols = (torch.from_numpy(each.astype(np.int64)).to(self.dense.device) for each in places)
        found = self.fold().transpose(1, 2)[rows, cols].contiguous()
        found = move_rows(found, owner, self._owner(shard.bounds(layout.nnz)), shard)
        values: Tensor = sharded_like(self.dense, found, layout.nnz)
        return values
