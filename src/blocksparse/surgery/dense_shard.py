"""Dense weights of which a process has some rows, as FSDP2 shards them: blocks that lie on two processes, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..convert import from_dense
from ..layout import BlockLayout
from .blocks import Blocks
from .fsdp import is_dtensor, sharded_like
from .stored import Shard, move_rows


def per_block(blocks: Blocks, dense: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """`reduce` of the folded weight, `[out_blocks, in_blocks]`, on all processes; the weight is plain or sharded."""
    if not is_dtensor(dense):
        return reduce(blocks.fold(dense))
    return _DenseShard(blocks, dense).per_block(reduce)


def mask_(blocks: Blocks, dense: Tensor, keep: Tensor) -> None:
    """Sets all blocks of a dense weight, plain or sharded, to 0 in place, but for those to keep, `[out, in]`."""
    if is_dtensor(dense):
        _DenseShard(blocks, dense).mask_(keep)
    else:
        dense.masked_fill_(~blocks.spread(keep.to(dense.device)), 0)


def values_of(blocks: Blocks, layout: BlockLayout, dense: Tensor) -> Tensor:
    """The values that a dense weight has on a layout, sharded by blocks where it is sharded."""
    if not is_dtensor(dense):
        return from_dense(blocks.padded(dense), layout)
    return _DenseShard(blocks, dense).values(layout)


class _DenseShard:
    """The rows of a parameter that this process has; of a transposed one these are columns of the weight."""

    def __init__(self, blocks: Blocks, dense: Any):
        self.blocks, self.dense = blocks, dense
        self.shard = Shard.of(dense)
        self.axis = 1 if blocks.transposed else 0
        self.of_line = blocks.block_of_line(0), blocks.block_of_line(1)
        """The row (column) of blocks of each row (column) of the weight."""
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
        """The blocks that begin here, as `Blocks.fold` has them."""
        blocks, shard = self.blocks, self.shard
        lines = blocks.matrix(self.dense.to_local()).movedim(self.axis, 0)
        lines = move_rows(lines, self._owner(self.bounds), self._owner(self.whole), shard)
        matrix = lines.movedim(0, self.axis)
        grid, (height, width) = list(blocks.grid), blocks.block_shape
        here = slice(int(self.whole[shard.rank]), int(self.whole[shard.rank + 1]))
        first, end = self.first[shard.rank : shard.rank + 2]
        grid[self.axis] = int(end - first)
        places = [blocks.place_of_line(axis) for axis in (0, 1)]
        places[self.axis] = places[self.axis][here] - first * blocks.block_shape[self.axis]
        rows, cols = (torch.from_numpy(each).to(matrix.device) for each in places)
        padded = matrix.new_zeros(grid[0] * height, grid[1] * width, *matrix.shape[2:])
        padded[rows[:, None], cols] = matrix
        return padded.view(grid[0], height, grid[1], width, *matrix.shape[2:])

    def per_block(self, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        found = reduce(self.fold())
        first, end = self.first[self.shard.rank : self.shard.rank + 2]
        every = found.new_zeros(self.blocks.grid)
        every.narrow(self.axis, int(first), int(end - first)).copy_(found)
        dist.all_reduce(every, group=self.shard.group)
        return every

    def mask_(self, keep: Tensor) -> None:
        local = self.blocks.matrix(self.dense.to_local())
        here = list(self.of_line)
        here[self.axis] = here[self.axis][slice(*self.bounds[self.shard.rank : self.shard.rank + 2])]
        rows, cols = (torch.from_numpy(each).to(keep.device) for each in here)
        kept = keep[rows][:, cols].to(local.device)
        local.masked_fill_(~kept.view(*kept.shape, *[1] * (local.dim() - 2)), 0)

    def values(self, layout: BlockLayout) -> Tensor:
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
