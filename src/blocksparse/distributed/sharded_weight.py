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
from ..surgery.sharding import is_dtensor
from ..surgery.weight_handle import LocalWeight, NewValues, WeightHandle, remap_blocks
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
        part, mine = self.module.part, self.module.layout
        if part is None:
            return mine
        rows, cols = part.global_indices(mine)
        keys = gather_pieces(torch.from_numpy(rows * part.grid[1] + cols).to(self.local.device), part.group)
        rows, cols = np.divmod(keys.sort().values.cpu().numpy(), part.grid[1])
        return BlockLayout.from_indices(rows, cols, part.grid, mine.block_shape)

    @cached_property
    def local_positions(self) -> np.ndarray:
        return self._local_positions_in(self.layout)

    def _local_positions_in(self, layout: BlockLayout) -> np.ndarray:
        positions = places_of_part(self.module, layout)
        return positions[self._shard.slice(positions.size)] if self._shard else positions

    @property
    def part_positions(self) -> np.ndarray:
        return places_of_part(self.module, self.layout)

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def max_local_size(self) -> int:
        nnz = self.module.layout.nnz
        return (-(-nnz // self._shard.count) if self._shard else nnz) * math.prod(self.parameter.shape[1:])

    @property
    def used(self) -> tuple[Tensor, Tensor] | None:
        part, used = self.module.part, self.module.used
        if part is None:
            return used
        size = self.module.layout.block_shape[part.axis]
        of_part = torch.ones(part.lines.size * size, dtype=torch.bool) if used is None else used[part.axis]
        marks = torch.zeros(part.grid[part.axis], size, dtype=torch.int32, device=self.local.device)
        marks[torch.from_numpy(part.lines)] = of_part.view(-1, size).to(marks)
        dist.all_reduce(marks, group=part.group)
        other = 1 - part.axis
        same = torch.ones(self.module.layout.shape[other], dtype=torch.bool) if used is None else used[other]
        both = [marks.flatten().bool().cpu(), same]
        out, in_ = both if part.axis == 0 else both[::-1]
        return None if out.all() and in_.all() else (out, in_)

    def gather(self, per_block: Tensor) -> Tensor:
        every = per_block.new_zeros(self.layout.nnz)
        every[torch.from_numpy(self.local_positions).to(every.device)] = per_block
        for group in self._groups:
            dist.all_reduce(every, group=group)
        return every

    def gather_places(self, keys: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        part = self.module.part
        if part is None:
            return keys, scores
        lines = list(np.divmod(keys, self.module.layout.grid[1]))
        lines[part.axis] = part.lines[lines[part.axis]]
        places, values = (
            gather_pieces(torch.from_numpy(each).to(self.local.device), part.group).cpu().numpy()
            for each in (lines[0] * part.grid[1] + lines[1], scores)
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
        survivors = None if (source >= 0).all() else source[source >= 0]
        if callable(new):
            local = np.zeros(layout.nnz, dtype=bool)
            local[self._local_positions_in(layout)] = True
            new = new(np.flatnonzero(local[(source < 0).numpy()]))
        mine, after = part_of(self.module, layout)
        if self.module.part is not None:
            source = source[after]
            stays = source >= 0
            source[stays] = torch.from_numpy(np.searchsorted(self.part_positions, source[stays].numpy()))
        move: Callable[[Tensor], Tensor] = partial(remap_blocks, source=source)
        grown = source < 0
        if self._shard is not None:
            move = self._shard.moves(source.numpy(), self.parameter.shape[0])
            grown = grown[self._shard.slice(mine.nnz)]
        values = self._move_values(move, grown, new)
        self._carry_state(optimizer, move, grown, values, survivors, mine.nnz)
        if self._shard is None:
            self.module.change_layout(mine, values)
        else:
            replace_shard(self._record, values, mine.nnz)
            self.module.layout_changed(mine)
        self.__dict__.pop("local_positions", None)
        self.layout = layout

    def remap(self, per_block: Tensor, source: Tensor) -> Tensor:
        new = source[torch.from_numpy(self.local_positions).to(source.device)] < 0
        if self._shard is None:
            return remap_blocks(per_block, source, self.local[new])
        moved = self._shard.moves(source.cpu().numpy(), per_block.shape[0])(per_block.to_local())  # type: ignore[attr-defined]
        moved[new] = self.local[new]
        return self._shard_state(per_block, moved, source.numel())

    def _all_reduce(self, measures: Measures) -> Measures:
        every = torch.tensor(measures, dtype=torch.float64, device=self.local.device)
        for group in self._groups:
            dist.all_reduce(every, group=group)
        return Measures(*every.tolist())

    def _shard_state(self, like: Tensor, local: Tensor, nnz: int) -> Tensor:
        state: Tensor = sharded_like(like, local, nnz) if is_dtensor(like) else local
        return state


def places_of_part(module: BlockSparseModule, whole: BlockLayout) -> np.ndarray:
    """Return the positions of the blocks of a module's part in a layout of the whole weight, int64, rising."""
    part = module.part
    if part is None:
        return np.arange(whole.nnz)
    has_line = np.zeros(part.grid[part.axis], dtype=bool)
    has_line[part.lines] = True
    return np.flatnonzero(has_line[whole.row_of_block if part.axis == 0 else whole.col_of_block])


def part_of(module: BlockSparseModule, whole: BlockLayout) -> tuple[BlockLayout, np.ndarray]:
    """Return the layout of a module's part, given that of the whole weight, and the positions of its blocks there."""
    part, places = module.part, places_of_part(module, whole)
    if part is None:
        return whole, places
    lines = [whole.row_of_block[places], whole.col_of_block[places]]
    lines[part.axis] = np.searchsorted(part.lines, lines[part.axis])
    return BlockLayout.from_indices(lines[0], lines[1], module._layout.grid, whole.block_shape), places


@dataclass(frozen=True)
class Shard:
    """The contiguous piece of blocks that FSDP2 gives a process; all pieces have the same size except the last ones."""

    group: Any
    rank: int
    count: int

    @classmethod
    def of(cls, values: Any) -> Shard:
        mesh, placements = values.device_mesh, values.placements
        axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
        if len(axes) != 1 or not placements[axes[0]].is_shard(0):
            raise BlockSparseError.expected("values", "blocks sharded along one axis of the mesh, Shard(0)", placements)
        return cls(mesh.get_group(axes[0]), mesh.get_local_rank(axes[0]), mesh.size(axes[0]))

    def bounds(self, nnz: int) -> np.ndarray:
        """Return the first position of each process's piece, and the end."""
        return np.minimum(np.arange(self.count + 1) * -(-nnz // self.count), nnz)

    def slice(self, nnz: int) -> slice:
        """Return the positions of this process's piece."""
        first, last = self.bounds(nnz)[self.rank : self.rank + 2]
        return slice(int(first), int(last))

    def moves(self, source: np.ndarray, before: int) -> Callable[[Tensor], Tensor]:
        """Return a function that maps this process's piece of `before` rows to its piece in another layout.

        New blocks get 0. Only rows that change their process are sent.
        """
        old, new = self.bounds(before), self.bounds(source.size)
        after = np.flatnonzero(source >= 0)
        was = source[after]  # rising as well
        from_, to = (np.searchsorted(ends, at, side="right") - 1 for ends, at in ((old, was), (new, after)))
        here, there = was[from_ == self.rank] - old[self.rank], after[to == self.rank] - new[self.rank]

        def move(local: Tensor) -> Tensor:
            moved = local.new_zeros(int(new[self.rank + 1] - new[self.rank]), *local.shape[1:])
            moved[torch.from_numpy(there).to(local.device)] = move_rows(
                local[torch.from_numpy(here).to(local.device)], from_, to, self
            )
            return moved

        return move


def move_rows(rows: Tensor, from_: np.ndarray, to: np.ndarray, shard: Shard) -> Tensor:
    """Send rows that change their process, and return the rows that this process then has.

    Args:
        rows: the rows on this process.
        from_, to: for each row of all processes, the process that has it and the one that gets it.
        shard: this process's place in the group.
    """
    if (from_ == to).all():
        return rows
    has, gets = from_ == shard.rank, to == shard.rank
    leaves, arrives, stays = has & ~gets, gets & ~has, has & gets
    moved = rows.new_empty(int(gets.sum()), *rows.shape[1:])
    index = partial(torch.as_tensor, device=rows.device)
    moved[index(stays[gets])] = rows[index(stays[has])]
    order = np.flatnonzero(leaves[has])[to[leaves].argsort(kind="stable")]
    sent, received = (np.bincount(each, minlength=shard.count).tolist() for each in (to[leaves], from_[arrives]))
    slots = np.flatnonzero(arrives[gets])[from_[arrives].argsort(kind="stable")]
    moved[index(slots)] = exchange_rows(rows[index(order)], sent, received, shard.group)
    return moved


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Send the first `sent[0]` rows to the first process of a group, and so on; return the arriving rows in order."""
    arriving = rows.new_empty(sum(received), *rows.shape[1:])
    # gloo does not support all dtypes, so rows are sent as bytes.
    size = rows[:0].element_size() * rows.shape[1:].numel()
    ours, theirs = (each.reshape(-1).view(torch.uint8) for each in (rows.contiguous(), arriving))
    dist.all_to_all_single(theirs, ours, [n * size for n in received], [n * size for n in sent], group=group)
    return arriving


def gather_pieces(piece: Tensor, group: Any) -> Tensor:
    """Concatenate vectors of different lengths from all processes of a group."""
    count = dist.get_world_size(group)
    lengths = [torch.empty(1, dtype=torch.int64, device=piece.device) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([piece.numel()], device=piece.device), group=group)
    sizes = [int(length) for length in lengths]
    padded = piece.new_zeros(max(sizes))
    padded[: piece.numel()] = piece
    pieces = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(pieces, padded, group=group)
    return torch.cat([each[:size] for each, size in zip(pieces, sizes, strict=True)])
