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
from .sharded_weight import Shard, redistribute_rows


class DenseShard:
    """The rows of a dense parameter on this process; they are columns of the weight if the parameter is transposed.

    A block whose rows lie on two processes is completed by the process on which it begins.

    Args:
        blocks: the blocks of the parameter.
        dense: the parameter, a DTensor.

    Attributes:
        axis: the axis of the weight that is sharded. Its lines are rows (axis 0) or columns (axis 1).
        block_of_line: for each row and for each column of the weight, the row or column of blocks that it is in.
        stored_bounds: the first line that each process stores, and the end.
        completed_bounds: the first line that each process has after completing its blocks, and the end.
        block_bounds: the first row (column) of blocks that each process completes, and the end.
    """

    def __init__(self, blocks: Blocks, dense: Any):
        self.blocks, self.dense, self.shard = blocks, dense, Shard.of(dense)
        self.axis = 1 if blocks.transposed else 0
        self.block_of_line = blocks.block_of_line(0), blocks.block_of_line(1)
        along, length = self.block_of_line[self.axis], dense.shape[0]
        self.stored_bounds = self.shard.bounds(length) * (along.size // length)
        block_starts = np.append(np.flatnonzero(np.diff(along, prepend=-1)), along.size)
        self.completed_bounds = block_starts[np.searchsorted(block_starts, self.stored_bounds)]
        self.block_bounds = np.append(along, blocks.grid[self.axis])[self.completed_bounds]

    def _owners(self, bounds: np.ndarray) -> np.ndarray:
        """Return the rank that has each line, given the bounds of all ranks."""
        return np.repeat(np.arange(self.shard.count), np.diff(bounds))

    def _local(self, bounds: np.ndarray) -> slice:
        """Return this process's range, given the bounds of all ranks."""
        first, end = bounds[self.shard.rank : self.shard.rank + 2]
        return slice(int(first), int(end))

    def fold(self) -> Tensor:
        """Return the blocks that this process completes, in the shape of `Blocks.fold`."""
        blocks = self.blocks
        lines = blocks.matrix(self.dense.to_local()).movedim(self.axis, 0)
        owners = self._owners(self.stored_bounds), self._owners(self.completed_bounds)
        matrix = redistribute_rows(lines, *owners, self.shard).movedim(0, self.axis)
        grid, (height, width) = list(blocks.grid), blocks.block_shape
        local_blocks = self._local(self.block_bounds)
        grid[self.axis] = local_blocks.stop - local_blocks.start
        places = [blocks.place_of_line(axis) for axis in (0, 1)]
        first_place = local_blocks.start * blocks.block_shape[self.axis]
        places[self.axis] = places[self.axis][self._local(self.completed_bounds)] - first_place
        rows, cols = (torch.from_numpy(each).to(matrix.device) for each in places)
        padded = matrix.new_zeros(grid[0] * height, grid[1] * width, *matrix.shape[2:])
        padded[rows[:, None], cols] = matrix
        return padded.view(grid[0], height, grid[1], width, *matrix.shape[2:])

    def reduce_blocks(self, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `reduce` of all folded blocks, `[out_blocks, in_blocks]`, on every process."""
        local, place = reduce(self.fold()), self._local(self.block_bounds)
        reduced = local.new_zeros(self.blocks.grid)
        reduced.narrow(self.axis, place.start, place.stop - place.start).copy_(local)
        dist.all_reduce(reduced, group=self.shard.group)
        return reduced

    def mask_(self, keep: Tensor) -> None:
        """Zero all blocks except those to keep, `[out_blocks, in_blocks]`."""
        local = self.blocks.matrix(self.dense.to_local())
        lines = list(self.block_of_line)
        lines[self.axis] = lines[self.axis][self._local(self.stored_bounds)]
        rows, cols = (torch.from_numpy(each).to(keep.device) for each in lines)
        mask = keep[rows][:, cols].to(local.device)
        local.masked_fill_(~mask.view(*mask.shape, *[1] * (local.dim() - 2)), 0)

    def values(self, layout: BlockLayout) -> Tensor:
        """Return the values of the weight on a layout, sharded by blocks."""
        shard = self.shard
        along = layout.row_of_block if self.axis == 0 else layout.col_of_block
        owners = np.searchsorted(self.block_bounds, along, side="right") - 1
        mine = np.flatnonzero(owners == shard.rank)
        places = [layout.row_of_block[mine], layout.col_of_block[mine]]
        places[self.axis] = places[self.axis] - self.block_bounds[shard.rank]
        rows, cols = (torch.from_numpy(each.astype(np.int64)).to(self.dense.device) for each in places)
        completed = self.fold().transpose(1, 2)[rows, cols].contiguous()
        local = redistribute_rows(completed, owners, self._owners(shard.bounds(layout.nnz)), shard)
        values: Tensor = sharded_like(self.dense, local, layout.nnz)
        return values
