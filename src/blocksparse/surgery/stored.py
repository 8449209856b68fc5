"""A block-sparse weight wherever its blocks are: in this process, or in several that store it together."""

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
from .fsdp import is_dtensor, local_of, record_of, replace_shard, sharded_like
from .optimizer import Measures, follows_blocks, measure_state, start_of, states_of, watch_new_blocks

New = Tensor | Callable[[np.ndarray], Tensor]


class Stored:
    """The stored blocks of a module's weight, of which this process may have some only.

    - In one process all are here, and so under DistributedDataParallel, where each process has them all.
    - Under tensor parallelism a process has some rows, or columns, of blocks: `module.part`.
    - Under FSDP2 it has a contiguous piece of the sorted blocks of the module's layout; with tensor parallelism, a
      piece of its part.

    What methods do with a weight they do by this, in the numbering of the whole weight, so that they choose in several
    processes what they would choose in one. The processes that store a weight together all have to make the same
    calls. Between them go numbers per block, layouts, and the values of blocks that change their place.

    Args:
        module: block-sparse.
    """

    def __init__(self, module: BlockSparseModule):
        check_module(module)
        self.module = module
        self._record = record_of(module, "values")
        self._shard = None if self._record is None else Shard.of(self._record.sharded_param)
        self.parameter: Tensor = module.values if self._record is None else self._record.sharded_param
        """The one that the optimizer has."""

    @property
    def local(self) -> Tensor:
        """The values of the blocks that are here, `[here, block_out, block_in, *kernel]`, without their history."""
        values: Any = self.parameter.detach()
        local: Tensor = values.to_local() if self._shard else values
        return local

    @cached_property
    def layout(self) -> BlockLayout:
        """The layout of the whole weight."""
        part, mine = self.module.part, self.module.layout
        if part is None:
            return mine
        rows, cols = part.global_indices(mine)
        keys = gather_pieces(torch.from_numpy(rows * part.grid[1] + cols).to(self.local.device), part.group)
        rows, cols = np.divmod(keys.sort().values.cpu().numpy(), part.grid[1])
        return BlockLayout.from_indices(rows, cols, part.grid, mine.block_shape)

    @cached_property
    def here(self) -> np.ndarray:
        """The positions in the whole layout of the blocks that are here, int64, rising."""
        return self.here_of(self.layout)

    def here_of(self, layout: BlockLayout) -> np.ndarray:
        """The same for another layout of the whole weight."""
        positions = places_of_part(self.module, layout)
        return positions[self._shard.slice(positions.size)] if self._shard else positions

    @property
    def of_part(self) -> np.ndarray:
        """The positions in the whole layout of the blocks of the module's own layout, int64, rising."""
        return places_of_part(self.module, self.layout)

    @property
    def is_whole(self) -> bool:
        """Whether all blocks are here."""
        return self._shard is None and self.module.part is None

    @property
    def share(self) -> int:
        """The most numbers that a process has of this process's part of the weight."""
        nnz = self.module.layout.nnz
        return (-(-nnz // self._shard.count) if self._shard else nnz) * math.prod(self.parameter.shape[1:])

    @property
    def used(self) -> tuple[Tensor, Tensor] | None:
        """As the module's: which outputs and inputs of the whole layout are not padding; None where all are real."""
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
        """Numbers of the blocks that are here, `[here]`, as those of all blocks, `[nnz of the whole]`, everywhere."""
        if self.is_whole:
            return per_block
        every = per_block.new_zeros(self.layout.nnz)
        every[torch.from_numpy(self.here).to(every.device)] = per_block
        for group in self._groups:
            dist.all_reduce(every, group=group)
        return every

    def gather_places(self, keys: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places (row * columns + column) of this part with scores, as those of all in the whole grid, rising."""
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

    def has_shares_of(self, other: Stored) -> bool:
        """Whether this process has the same blocks of another weight of the same layout."""
        return (self._shard and self._shard.count) == (other._shard and other._shard.count)

    @property
    def _groups(self) -> list[Any]:
        """Of the processes that store the weight together: along each axis of the mesh."""
        groups = [] if self._shard is None else [self._shard.group]
        return groups if self.module.part is None else [*groups, self.module.part.group]

    @property
    def replicas(self) -> list[Any]:
        """The groups of processes that train the same blocks on other data, as far as the module knows them."""
        if not self._shard:
            return []
        mesh = self._record.sharded_param.device_mesh
        return [mesh.get_group(axis) for axis in range(mesh.ndim)]

    def set_layout(
        self,
        layout: BlockLayout,
        source: Tensor,
        new: New | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Sets another layout of the whole weight, with the values and the optimizer's state of blocks that stay.

        A block goes to another process where its position does; no process has more than its old and its new share.

        Args:
            source: int64 `[nnz]`: where each block was in the layout before, rising; -1 for new ones.
            new: values of the new blocks that will be here, in their order, or a function of their positions among all
                new ones. Zeros by default.
            optimizer: one that trains the weight. The state of others that have stepped on it follows too.
        """
        source = source.cpu()
        staying = source[source >= 0]
        if callable(new):
            here = np.zeros(layout.nnz, dtype=bool)
            here[self.here_of(layout)] = True
            new = new(np.flatnonzero(here[(source < 0).numpy()]))
        mine, after = part_of(self.module, layout)
        if self.module.part is not None:
            source = source[after]
            kept = source >= 0
            source[kept] = torch.from_numpy(np.searchsorted(self.of_part, source[kept].numpy()))
        move: Callable[[Tensor], Tensor] = partial(remap_blocks, source=source)
        grown = source < 0
        if self._shard is not None:
            move = self._shard.moves(source.numpy(), self.parameter.shape[0])
            grown = grown[self._shard.slice(mine.nnz)]
        values = move(self.local)
        if new is not None:
            values[grown.to(values.device)] = new.to(values)
        survivors = staying if staying.numel() < layout.nnz else None
        self._carry_state(optimizer, move, grown, values, survivors, mine.nnz)
        if self._shard is None:
            self.module.change_layout(mine, values)
        else:
            replace_shard(self._record, values, mine.nnz)
            self.module.layout_changed(mine)
        self.__dict__.pop("here", None)
        self.layout = layout

    def followed(self, kept: Tensor, source: Tensor) -> Tensor:
        """What is kept for each block (`[nnz before, ...]`, a mean say) after a change; new ones have values."""
        new = source[torch.from_numpy(self.here).to(source.device)] < 0
        if self._shard is None:
            return remap_blocks(kept, source, self.local[new])
        moved = self._shard.moves(source.cpu().numpy(), kept.shape[0])(kept.to_local())  # type: ignore[attr-defined]
        moved[new] = self.local[new]
        return sharded_like(kept, moved, source.numel())

    def _carry_state(
        self,
        optimizer: Any,
        move: Callable[[Tensor], Tensor],
        grown: Tensor,
        values: Tensor,
        survivors: Tensor | None,
        nnz: int,
    ) -> None:
        """Moves what optimizers keep for each block, and begins that of new blocks; see `start_of`.

        Args:
            move: of the blocks that are here before those after the change, 0 for new ones.
            grown: which of these are new, bool `[here]`.
            values: of these.
            survivors: the positions in the whole layout of the blocks that stay; None where no process has new ones.
            nnz: the stored blocks of the part after the change.
        """
        grown = grown.to(values.device)
        for kept, group in states_of(self.parameter, optimizer):
            for name, each in kept.items():
                if not follows_blocks(name, each, self.parameter.shape):
                    continue
                local = local_of(each)
                start = 0 if survivors is None else start_of(name, group, partial(self._measure, local, survivors))
                moved = move(local)
                moved[grown] = values[grown].to(moved) if start is None else start
                kept[name] = sharded_like(each, moved, nnz) if is_dtensor(each) else moved
            watch_new_blocks(self.parameter, kept)

    def _measure(self, local: Tensor, survivors: Tensor) -> Measures:
        """Measures a state of the blocks that stay, or of all where none does, in all processes, without padding."""
        stays = torch.zeros(self.layout.nnz, dtype=torch.bool)
        stays[survivors if survivors.numel() else slice(None)] = True
        here = torch.from_numpy(self.here)
        stays = stays[here]
        there = stays.to(local.device)
        kept, weights = local[there], self.local[there] if local.shape == self.local.shape else None
        if weights is not None and (used := self.used) is not None:
            real = self._real(used, here[stays]).to(kept.device).expand_as(kept)
            kept, weights = kept[real], weights[real]
        found = measure_state(kept, weights)
        if self._groups:
            every = torch.tensor(found, dtype=torch.float64, device=local.device)
            for group in self._groups:
                dist.all_reduce(every, group=group)
            found = Measures(*every.tolist())
        return found

    def _real(self, used: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
        """Marks the numbers of blocks that are no padding, `[blocks, block_out, block_in, ...]`."""
        height, width = self.layout.block_shape
        lines = self.layout.row_of_block, self.layout.col_of_block
        rows, cols = (torch.from_numpy(each[positions.numpy()].astype(np.int64)) for each in lines)
        out, in_ = used[0].view(-1, height)[rows], used[1].view(-1, width)[cols]
        real = out[:, :, None] & in_[:, None, :]
        return real.view(*real.shape, *[1] * (self.local.dim() - 3))


def places_of_part(module: BlockSparseModule, whole: BlockLayout) -> np.ndarray:
    """The positions in a layout of the whole weight of the blocks of a module's part, int64, rising."""
    part = module.part
    if part is None:
        return np.arange(whole.nnz)
    mine = np.zeros(part.grid[part.axis], dtype=bool)
    mine[part.lines] = True
    return np.flatnonzero(mine[whole.row_of_block if part.axis == 0 else whole.col_of_block])


def part_of(module: BlockSparseModule, whole: BlockLayout) -> tuple[BlockLayout, np.ndarray]:
    """The layout of a module's part, from one of the whole weight, and the positions in that of its blocks."""
    part, places = module.part, places_of_part(module, whole)
    if part is None:
        return whole, places
    lines = [whole.row_of_block[places], whole.col_of_block[places]]
    lines[part.axis] = np.searchsorted(part.lines, lines[part.axis])
    return BlockLayout.from_indices(lines[0], lines[1], module._layout.grid, whole.block_shape), places


@dataclass(frozen=True)
class Shard:
    """A contiguous piece of the blocks, as FSDP2 cuts them: all of one size but for the last ones."""

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
        """Where the piece of each process begins, and the end."""
        return np.minimum(np.arange(self.count + 1) * -(-nnz // self.count), nnz)

    def slice(self, nnz: int) -> slice:
        """The piece of this process."""
        first, last = self.bounds(nnz)[self.rank : self.rank + 2]
        return slice(int(first), int(last))

    def moves(self, source: np.ndarray, before: int) -> Callable[[Tensor], Tensor]:
        """Makes of the piece of a tensor of `before` rows that for another layout, with 0 for new blocks."""
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
    """Rows that several processes have, as those that this one is to have; only those that change theirs are sent.

    `from_` and `to` say for each row of all processes which one has it, and which is to have it.
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
    """Sends the first `sent[0]` rows to the first process of a group, and so on; returns what comes, in their order."""
    arriving = rows.new_empty(sum(received), *rows.shape[1:])
    # As bytes, as gloo does not know all dtypes.
    size = rows[:0].element_size() * rows.shape[1:].numel()
    ours, theirs = (each.reshape(-1).view(torch.uint8) for each in (rows.contiguous(), arriving))
    dist.all_to_all_single(theirs, ours, [n * size for n in received], [n * size for n in sent], group=group)
    return arriving


def gather_pieces(piece: Tensor, group: Any) -> Tensor:
    """The vectors of all processes of a group, of different lengths, one behind the other."""
    count = dist.get_world_size(group)
    lengths = [torch.empty(1, dtype=torch.int64, device=piece.device) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([piece.numel()], device=piece.device), group=group)
    sizes = [int(length) for length in lengths]
    padded = piece.new_zeros(max(sizes))
    padded[: piece.numel()] = piece
    pieces = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(pieces, padded, group=group)
    return torch.cat([each[:size] for each, size in zip(pieces, sizes, strict=True)])


def remap_blocks(tensor: Tensor, source: Tensor, new: Tensor | None = None) -> Tensor:
    """Reorders per-block data for another pattern.

    Args:
        tensor: `[nnz, ...]`.
        source: int64 `[new nnz]`, as `rewire` returns it.
        new: for the blocks that were not there, in their order; zeros by default.

    >>> import torch, blocksparse as bs
    >>> bs.sparsity.remap_blocks(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([0, -1, 2]))
    tensor([5., 0., 7.])
    """
    source = source.to(tensor.device)
    kept = source >= 0
    there = tensor.new_zeros(source.numel(), *tensor.shape[1:])
    there[kept] = tensor[source[kept]]
    if new is not None:
        there[~kept] = new.to(there)
    return there


def carry_state(optimizer: Any, parameter: Tensor, source: Tensor) -> None:
    """Remaps the state of a parameter that loses some of its first axis, before the parameter itself changes."""
    for kept, _ in states_of(parameter, optimizer):
        for name, each in kept.items():
            if follows_blocks(name, each, parameter.shape):
                kept[name] = remap_blocks(each, source)


def check_module(module: Any) -> None:
    """Raises a BlockSparseError unless the module is block-sparse."""
    if not isinstance(module, BlockSparseModule):
        raise BlockSparseError.expected("module", "one with a block-sparse weight", type(module).__name__)
