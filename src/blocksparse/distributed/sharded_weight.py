"""Block-sparse weights that several processes store together, by tensor parallelism or by FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..nn.module import BlockSparseModule
from ..surgery.optimizer import Measures
from ..surgery.rows import true_positions
from ..surgery.sharding import is_dtensor
from ..surgery.weight_handle import BlockMove, LocalWeight, NewValues, WeightHandle, remap_blocks
from .fsdp import record_of, replace_shard, sharded_like


def handle_of(module: BlockSparseModule) -> WeightHandle:
    """Return the handle of a module's weight, sharded or not."""
    record = record_of(module, "values")
    return LocalWeight(module) if record is None and module.part is None else ShardedWeight(module, record)


class ShardedWeight(WeightHandle):
    """A weight with some of its blocks on this process.

    - Tensor parallelism gives a process some rows, or columns, of blocks: `module.part`.
    - FSDP2 gives it a contiguous piece of the sorted blocks of the module's layout.
    - Both together give it a piece of its part.

    Block counts, layouts, and the values of blocks that change their process are sent between processes.

    Args:
        module: a block-sparse module.
        record: FSDP2's record of its values, or None.
    """

    def __init__(self, module: BlockSparseModule, record: Any):
        self.module, self._record = module, record
        self._shard = None if record is None else Shard.of(record.sharded_param)
        self.parameter = module.values if record is None else record.sharded_param

    @property
    def local(self) -> Tensor:
        values: Any = self.parameter.detach()
        local: Tensor = values.to_local() if self._shard else values
        return local

    @cached_property
    def layout(self) -> BlockLayout:  # type: ignore[override]
        """The layout of the whole weight, gathered from all processes that store a part of it."""
        part, mine = self.module.part, self.module.layout
        if part is None:
            return mine
        rows, cols = part.global_indices(mine)
        keys = all_gather_ragged(torch.from_numpy(rows * part.grid[1] + cols).to(self.local.device), part.group)
        rows, cols = np.divmod(keys.sort().values.cpu().numpy(), part.grid[1])
        return BlockLayout.from_indices(rows, cols, part.grid, mine.block_shape)

    @cached_property
    def local_positions(self) -> np.ndarray:
        return self._local_positions_in(self.layout)

    def _local_positions_in(self, layout: BlockLayout) -> np.ndarray:
        """Return the positions of this process's blocks in a layout of the whole weight, int64."""
        positions = positions_of_part(self.module, layout)
        return positions[self._shard.local_slice(positions.size)] if self._shard else positions

    @property
    def part_positions(self) -> np.ndarray:
        return positions_of_part(self.module, self.layout)

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def max_local_size(self) -> int:
        nnz = self.module.layout.nnz
        return (-(-nnz // self._shard.count) if self._shard else nnz) * math.prod(self.parameter.shape[1:])

    @property
    def used(self) -> tuple[Tensor, Tensor] | None:
        """Bool masks of the whole layout, gathered from all processes; see `WeightHandle.used`."""
        part, used = self.module.part, self.module.used
        if part is None:
            return used
        size = self.module.layout.block_shape[part.axis]
        of_part = (
            torch.ones(part.lines.size * size, dtype=torch.bool, device="cpu") if used is None else used[part.axis]
        )
        marks = torch.zeros(part.grid[part.axis], size, dtype=torch.int32, device=self.local.device)
        marks[torch.from_numpy(part.lines)] = of_part.view(-1, size).to(marks)
        dist.all_reduce(marks, group=part.group)
        other = 1 - part.axis
        same = (
            torch.ones(self.module.layout.shape[other], dtype=torch.bool, device="cpu") if used is None else used[other]
        )
        both = [marks.flatten().bool().cpu(), same]
        out, in_ = both if part.axis == 0 else both[::-1]
        return None if out.all() and in_.all() else (out, in_)

    def gather(self, per_block: Tensor) -> Tensor:
        """Return numbers of all blocks `[nnz]`, summed from each process's own blocks."""
        gathered = per_block.new_zeros(self.layout.nnz)
        gathered[torch.from_numpy(self.local_positions).to(gathered.device)] = per_block
        for group in self._groups:
            dist.all_reduce(gathered, group=group)
        return gathered

    def gather_places(self, keys: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return places in the whole grid and their scores, gathered from all processes."""
        part = self.module.part
        if part is None:
            return keys, scores
        places, values = (
            all_gather_ragged(torch.from_numpy(each).to(self.local.device), part.group).cpu().numpy()
            for each in (part.global_keys(keys, self.module.layout.grid[1]), scores)
        )
        order = places.argsort(kind="stable")
        return places[order], values[order]

    def is_split_like(self, other: WeightHandle) -> bool:
        shard = other._shard if isinstance(other, ShardedWeight) else None
        return (self._shard and self._shard.count) == (shard and shard.count)

    @property
    def _groups(self) -> list[Any]:
        """The groups of processes that store the weight together, one for each axis of the mesh."""
        groups = [] if self._shard is None else [self._shard.group]
        return groups if self.module.part is None else [*groups, self.module.part.group]

    @property
    def replicas(self) -> list[Any]:
        if not self._shard:
            return []
        mesh = self._record.sharded_param.device_mesh
        return [mesh.get_group(axis) for axis in range(mesh.ndim)]

    def set_layout(
        self,
        layout: BlockLayout,
        source: Tensor,
        new: NewValues | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Set another layout of the whole weight; see `WeightHandle.set_layout`.

        A block moves to another process where its position does; no process has more than its old and its new shard.
        """
        source = source.cpu()
        old_positions = source[source >= 0]
        survivors = None if len(old_positions) == len(source) else (lambda: old_positions)
        if callable(new):
            local = np.zeros(layout.nnz, dtype=bool)
            local[self._local_positions_in(layout)] = True
            new = new(np.flatnonzero(local[(source < 0).numpy()]))
        mine, after = layout_of_part(self.module, layout)
        if self.module.part is not None:
            source = source[after]
            stays = source >= 0
            source[stays] = torch.from_numpy(np.searchsorted(self.part_positions, source[stays].numpy()))
        remap: Callable[[Tensor], Tensor] = BlockMove(source)
        grown = source < 0
        if self._shard is not None:
            remap = self._shard.remapping(source.numpy(), self.parameter.shape[0])
            grown = grown[self._shard.local_slice(mine.nnz)]
        places = true_positions(grown)
        values = self._move_values(remap, places, new)
        self._carry_state(optimizer, remap, places, values, survivors, mine.nnz)
        if self._shard is None:
            self.module.change_layout(mine, values)
        else:
            replace_shard(self._record, values, mine.nnz)
            self.module.layout_changed(mine)
        self.__dict__.pop("local_positions", None)
        self.layout = layout

    def remap(self, per_block: Tensor, source: Tensor) -> Tensor:
        """Return per-block data after a change of the layout, sharded as before; see `WeightHandle.remap`."""
        new = source[torch.from_numpy(self.local_positions).to(source.device)] < 0
        if self._shard is None:
            return remap_blocks(per_block, source, self.local[new])
        moved = self._shard.remapping(source.cpu().numpy(), per_block.shape[0])(per_block.to_local())  # type: ignore[attr-defined]
        moved[new] = self.local[new]
        return self._shard_state(per_block, moved, source.numel())

    def _all_reduce(self, measures: Measures) -> Measures:
        """Sum measures over all processes that store parts of the weight."""
        every = torch.tensor(measures, dtype=torch.float64, device=self.local.device)
        for group in self._groups:
            dist.all_reduce(every, group=group)
        return Measures(*every.tolist())

    def _shard_state(self, like: Tensor, local: Tensor, nnz: int) -> Tensor:
        """Return a local state as a DTensor of `nnz` blocks, if the old state `like` is one."""
        state: Tensor = sharded_like(like, local, nnz) if is_dtensor(like) else local
        return state


def positions_of_part(module: BlockSparseModule, whole: BlockLayout) -> np.ndarray:
    """Return the positions of the blocks of a module's part in a layout of the whole weight, int64, ascending."""
    part = module.part
    if part is None:
        return np.arange(whole.nnz)
    has_line = np.zeros(part.grid[part.axis], dtype=bool)
    has_line[part.lines] = True
    return np.flatnonzero(has_line[whole.row_of_block if part.axis == 0 else whole.col_of_block])


def layout_of_part(module: BlockSparseModule, whole: BlockLayout) -> tuple[BlockLayout, np.ndarray]:
    """Return the layout of a module's part, given that of the whole weight, and the positions of its blocks there."""
    part, positions = module.part, positions_of_part(module, whole)
    if part is None:
        return whole, positions
    lines = [whole.row_of_block[positions], whole.col_of_block[positions]]
    lines[part.axis] = np.searchsorted(part.lines, lines[part.axis])
    return BlockLayout.from_indices(lines[0], lines[1], module._layout.grid, whole.block_shape), positions


@dataclass(frozen=True)
class Shard:
    """This process's place among those over which FSDP2 shards the rows of a tensor.

    Each process has a contiguous range; all ranges have the same size except the last ones.

    Args:
        group: the processes.
        rank: this process's rank in the group.
        count: the number of processes.
    """

    group: Any
    rank: int
    count: int

    @classmethod
    def of(cls, values: Any) -> Shard:
        """Return the place of this process for a DTensor, which must be sharded by rows along one axis of its mesh."""
        mesh, placements = values.device_mesh, values.placements
        axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
        if len(axes) != 1 or not placements[axes[0]].is_shard(0):
            raise BlockSparseError.expected("values", "blocks sharded along one axis of the mesh, Shard(0)", placements)
        return cls(mesh.get_group(axes[0]), mesh.get_local_rank(axes[0]), mesh.size(axes[0]))

    def bounds(self, rows: int) -> np.ndarray:
        """Return the first row of each process's range, and the end, `[count + 1]`."""
        return np.minimum(np.arange(self.count + 1) * -(-rows // self.count), rows)

    def local_slice(self, rows: int) -> slice:
        """Return the range of this process."""
        first, end = self.bounds(rows)[self.rank : self.rank + 2]
        return slice(int(first), int(end))

    def remapping(self, source: np.ndarray, rows_before: int) -> Callable[[Tensor], Tensor]:
        """Return a function that maps this process's rows of a tensor to its rows after a change of the layout.

        New rows get 0. Only rows whose process changes are sent.

        Args:
            source: for each row after the change, the row before it, ascending; -1 for new rows.
            rows_before: the number of rows before the change.
        """
        old, new = self.bounds(rows_before), self.bounds(source.size)
        after = np.flatnonzero(source >= 0)
        before = source[after]
        owner_before = np.searchsorted(old, before, side="right") - 1
        owner_after = np.searchsorted(new, after, side="right") - 1
        taken = before[owner_before == self.rank] - old[self.rank]
        filled = after[owner_after == self.rank] - new[self.rank]

        def remap(local: Tensor) -> Tensor:
            remapped = local.new_zeros(int(new[self.rank + 1] - new[self.rank]), *local.shape[1:])
            rows = local[torch.from_numpy(taken).to(local.device)]
            filled_rows = torch.from_numpy(filled).to(local.device)
            remapped[filled_rows] = redistribute_rows(rows, owner_before, owner_after, self)
            return remapped

        return remap


def redistribute_rows(rows: Tensor, owner_before: np.ndarray, owner_after: np.ndarray, shard: Shard) -> Tensor:
    """Send each row whose owner changes to its new owner; return the rows that this process then has, in order.

    Args:
        rows: the rows of this process, in the order of all rows.
        owner_before, owner_after: for each row of all processes, the rank that has it before and after.
        shard: this process's place in the group.
    """
    if (owner_before == owner_after).all():
        return rows
    has, gets = owner_before == shard.rank, owner_after == shard.rank
    leaves, arrives, stays = has & ~gets, gets & ~has, has & gets
    result = rows.new_empty(int(gets.sum()), *rows.shape[1:])
    index = partial(torch.as_tensor, device=rows.device)
    result[index(stays[gets])] = rows[index(stays[has])]
    order = np.flatnonzero(leaves[has])[owner_after[leaves].argsort(kind="stable")]
    sent, received = (
        np.bincount(ranks, minlength=shard.count).tolist() for ranks in (owner_after[leaves], owner_before[arrives])
    )
    slots = np.flatnonzero(arrives[gets])[owner_before[arrives].argsort(kind="stable")]
    result[index(slots)] = all_to_all_rows(rows[index(order)], sent, received, shard.group)
    return result


def all_to_all_rows(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Send the first `sent[0]` rows to rank 0 of a group, the next `sent[1]` to rank 1, and so on.

    Return the rows that arrive, ordered by rank: `received[k]` from rank k.
    """
    arriving = rows.new_empty(sum(received), *rows.shape[1:])
    # gloo does not support all dtypes, so rows are sent as bytes.
    size = rows[:0].element_size() * rows.shape[1:].numel()
    ours, theirs = (each.reshape(-1).view(torch.uint8) for each in (rows.contiguous(), arriving))
    dist.all_to_all_single(theirs, ours, [n * size for n in received], [n * size for n in sent], group=group)
    return arriving


def all_gather_ragged(vector: Tensor, group: Any) -> Tensor:
    """Concatenate vectors of different lengths from all processes of a group."""
    count = dist.get_world_size(group)
    lengths = [torch.empty(1, dtype=torch.int64, device=vector.device) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([vector.numel()], device=vector.device), group=group)
    sizes = [int(length) for length in lengths]
    padded = vector.new_zeros(max(sizes))
    padded[: vector.numel()] = vector
    gathered = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])
