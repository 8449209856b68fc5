"""The stored blocks of a weight as methods see them, whether one process stores them or several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checked import BLOCK_AGE, BLOCK_IS_NEW
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..nn.module import BlockSparseModule
from .optimizer import (
    Measures,
    follows_blocks,
    measure_state,
    second_moments,
    start_of,
    states_of,
    watch_new_blocks,
)
from .rows import fill_rows, put_rows, take_rows, true_positions
from .sharding import local_of, may_be_sharded, sharding

NewValues = Tensor | Callable[[np.ndarray], Tensor]


class WeightHandle(ABC):
    """A block-sparse weight that this process stores alone (`LocalWeight`) or with others (`ShardedWeight`).

    All positions are those in the layout of the whole weight, so methods choose the same blocks on one process as on
    several. Processes that store a weight together must make the same calls.

    Attributes:
        module: the block-sparse module.
        parameter: the parameter that the optimizer has.
        layout: the layout of the whole weight.
    """

    module: BlockSparseModule
    parameter: Tensor
    layout: BlockLayout

    @property
    @abstractmethod
    def local(self) -> Tensor:
        """The values of the blocks on this process, `[local nnz, block_out, block_in, *kernel]`, detached."""

    @property
    @abstractmethod
    def local_positions(self) -> np.ndarray:
        """The positions of the blocks on this process, int64, rising."""

    @property
    @abstractmethod
    def part_positions(self) -> np.ndarray:
        """The positions of the blocks in the module's own layout, which tensor parallelism may cut; int64, rising."""

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether all blocks are on this process."""

    @property
    @abstractmethod
    def max_local_size(self) -> int:
        """The most values that a process stores of this process's part of the weight."""

    @property
    @abstractmethod
    def used(self) -> tuple[Tensor, Tensor] | None:
        """Bool masks of the outputs and inputs of the whole layout that are not padding; None if there is none."""

    @property
    @abstractmethod
    def replicas(self) -> list[Any]:
        """The process groups that train the same blocks on other data, as far as the module knows them."""

    @abstractmethod
    def gather(self, per_block: Tensor) -> Tensor:
        """Return numbers per local block, `[local nnz]`, as those of all blocks, `[nnz]`, on every process."""

    @abstractmethod
    def gather_places(self, keys: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return places (row * columns + column) of the module's grid and scores, of all processes, rising."""

    @abstractmethod
    def is_split_like(self, other: WeightHandle) -> bool:
        """Return whether this process stores the same blocks of another weight of the same layout."""

    @abstractmethod
    def set_layout(
        self,
        layout: BlockLayout,
        source: Tensor,
        new: NewValues | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Set another layout of the whole weight; values and optimizer state of blocks that stay follow.

        Args:
            layout: the new layout.
            source: int64 `[nnz]`: the position of each block in the old layout, rising; -1 for new blocks.
            new: values of the new blocks of this process, in their order, or a function of their positions among all
                new blocks; zeros by default.
            optimizer: an optimizer that trains the weight. The state of others that have stepped on it follows too.
        """

    @abstractmethod
    def remap(self, per_block: Tensor, source: Tensor) -> Tensor:
        """Return a tensor like the values (`[old nnz, ...]`, a running mean say) after a change; new blocks copy them.

        Call it after `set_layout`, with the same source.
        """

    def _all_reduce(self, measures: Measures) -> Measures:
        """Sum measures over the processes that store the weight together."""
        return measures

    def _shard_state(self, like: Tensor, local: Tensor, nnz: int) -> Tensor:
        """Return a local state as a tensor that is sharded like another one."""
        return local

    def _move_values(self, move: Callable[[Tensor], Tensor], grown: Tensor, new: Any) -> Tensor:
        """Return the values after a change, with those of new blocks."""
        values = move(self.local)
        if new is not None:
            put_rows(values, grown.to(values.device), new)
        return values

    def _carry_state(
        self,
        optimizer: Any,
        move: Callable[[Tensor], Tensor],
        grown: Tensor,
        values: Tensor,
        survivors: Callable[[], Tensor] | None,
        nnz: int,
    ) -> None:
        """Move the optimizer state of each block, and initialize that of new blocks; see `start_of`.

        Args:
            optimizer: an optimizer that trains the weight, or None.
            move: maps a tensor over the old local blocks to one over the new local blocks, with 0 for new ones.
            grown: int64, the positions of new blocks among the new local blocks.
            values: the values of the new local blocks.
            survivors: returns the old positions of the blocks that stay; None if no process has new blocks.
            nnz: the number of blocks in the module's new layout.
        """
        places = grown.to(values.device)
        for state, group, has_clock in states_of(self.parameter, optimizer):
            if has_clock and survivors is not None and BLOCK_AGE not in state:
                ages = torch.full((len(self.local), 2), 255.0, device=values.device)  # all blocks are as old as can be
                state[BLOCK_AGE] = self._shard_state(self.parameter, ages, self.parameter.shape[0])
            waits = survivors is not None and not has_clock and second_moments(state, self.parameter)
            if waits and BLOCK_IS_NEW not in state:
                none = torch.zeros(len(self.local), 1, device=values.device)
                state[BLOCK_IS_NEW] = self._shard_state(self.parameter, none, self.parameter.shape[0])
            for name, tensor in state.items():
                if not follows_blocks(name, tensor, self.parameter.shape):
                    continue
                local = local_of(tensor)
                moved = move(local)
                start: float | None = 0.0
                if survivors is not None:
                    measure = partial(self._measure, local, survivors, moved, len(grown))
                    start = start_of(name, group, measure, has_clock=has_clock)
                if start is None:
                    put_rows(moved, places, take_rows(values, places))
                elif start:
                    fill_rows(moved, places, start)
                state[name] = self._shard_state(tensor, moved, nnz)
            if BLOCK_IS_NEW in state:
                watch_new_blocks(self.parameter, state)

    def _measure(self, local: Tensor, survivors: Callable[[], Tensor], moved: Tensor, grown: int) -> Measures:
        """Measure a state over the blocks that stay, or over all if none does, on all processes, without padding.

        Args:
            local: the state of the old local blocks.
            survivors: see `_carry_state`.
            moved: the state of the new local blocks, with 0 for the new ones.
            grown: the number of new ones.
        """
        if self.is_whole and 0 < grown < len(moved) and self.used is None:
            measures = measure_state(moved, None)
            if not measures.negative or local.shape != self.local.shape:
                return measures._replace(size=measures.size - grown * moved.shape[1:].numel())
        return self._measure_survivors(local, survivors())

    def _measure_survivors(self, local: Tensor, survivors: Tensor) -> Measures:
        """Measure a state over the blocks that stay; see `_measure`."""
        if self.is_whole:
            stays = survivors if survivors.numel() else torch.arange(self.layout.nnz, device="cpu")
            positions = stays
        else:
            mask = torch.zeros(self.layout.nnz, dtype=torch.bool, device="cpu")
            mask[survivors if survivors.numel() else slice(None)] = True
            positions = torch.from_numpy(self.local_positions)
            stays = mask[positions].nonzero().squeeze(1)
            positions = positions[stays]
        stays = stays.to(local.device)
        state = take_rows(local, stays)
        if local.shape != self.local.shape:
            return self._all_reduce(measure_state(state, None))
        real = None
        if (used := self.used) is not None:
            real = self._real(used, positions).to(state.device).expand_as(state)
            state = state[real]
        if self.is_whole and not (measures := measure_state(state, None)).negative:
            return measures  # without a look at the weights
        weights = take_rows(self.local, stays)
        return self._all_reduce(measure_state(state, weights if real is None else weights[real]))

    def _real(self, used: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
        """Return a mask of the numbers of blocks that are not padding, `[blocks, block_out, block_in, ...]`."""
        height, width = self.layout.block_shape
        lines = self.layout.row_of_block, self.layout.col_of_block
        rows, cols = (torch.from_numpy(each[positions.numpy()].astype(np.int64)) for each in lines)
        out, in_ = used[0].view(-1, height)[rows], used[1].view(-1, width)[cols]
        real = out[:, :, None] & in_[:, None, :]
        return real.view(*real.shape, *[1] * (self.local.dim() - 3))


class LocalWeight(WeightHandle):
    """A weight with all of its blocks on this process."""

    is_whole = True
    replicas: list[Any] = []  # noqa: RUF012

    def __init__(self, module: BlockSparseModule):
        self.module, self.parameter, self.layout = module, module.values, module.layout

    @property
    def local(self) -> Tensor:
        return self.parameter.detach()

    @property
    def local_positions(self) -> np.ndarray:
        return np.arange(self.layout.nnz)

    part_positions = local_positions

    @property
    def max_local_size(self) -> int:
        return self.parameter.numel()

    @property
    def used(self) -> tuple[Tensor, Tensor] | None:
        return self.module.used

    def gather(self, per_block: Tensor) -> Tensor:
        return per_block

    def gather_places(self, keys: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return keys, scores

    def is_split_like(self, other: WeightHandle) -> bool:
        return isinstance(other, LocalWeight)

    def set_layout(
        self,
        layout: BlockLayout,
        source: Tensor,
        new: NewValues | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Change the layout, with the values and the state of the optimizer; see `WeightHandle.set_layout`."""
        source = source.cpu()
        move = BlockMove(source)
        if callable(new):
            new = new(np.arange(move.grown.numel()))
        values = self._move_values(move, move.grown, new)
        survivors = (lambda: source[source >= 0]) if move.grown.numel() else None
        self._carry_state(optimizer, move, move.grown, values, survivors, layout.nnz)
        self.module.change_layout(layout, values)
        self.layout = layout

    def remap(self, per_block: Tensor, source: Tensor) -> Tensor:
        return remap_blocks(per_block, source, self.local[source < 0])


def handle_of(module: BlockSparseModule | WeightHandle) -> WeightHandle:
    """Return the handle of a module's weight; a handle is returned as it is."""
    if isinstance(module, WeightHandle):
        return module
    check_module(module)
    if module.part is None and not may_be_sharded(module):
        return LocalWeight(module)
    handle: WeightHandle = sharding().handle_of(module)
    return handle


def remap_blocks(tensor: Tensor, source: Tensor, new: Tensor | None = None) -> Tensor:
    """Return per-block data in the order of another layout.

    Args:
        tensor: `[nnz, ...]`.
        source: int64 `[new nnz]`, as `rewire` returns it.
        new: the data of new blocks, in their order; zeros by default.

    Raises:
        BlockSparseError: arguments that are no tensors of these shapes, or a source outside of the old blocks.

    >>> import torch, blocksparse as bs
    >>> bs.sparsity.remap_blocks(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([0, -1, 2]))
    tensor([5., 0., 7.])
    """
    if not isinstance(tensor, Tensor) or not tensor.dim():
        raise BlockSparseError.expected("tensor", "a tensor [nnz, ...]", repr(tensor))
    if not isinstance(source, Tensor) or source.dtype != torch.int64 or source.dim() != 1:
        raise BlockSparseError.expected("source", "an int64 vector, as `rewire` returns it", repr(source))
    if source.numel() and not (int(source.min()) >= -1 and int(source.max()) < len(tensor)):
        expected = f"positions below {len(tensor)} of blocks, or -1 for new ones"
        raise BlockSparseError.expected("source", expected, f"{int(source.min())} to {int(source.max())}")
    move = BlockMove(source.to(tensor.device))
    if new is not None:
        check_new_values("new", new, move.grown.numel(), tensor)
    return move(tensor, new)


def check_new_values(name: str, new: Any, count: int, values: Tensor) -> None:
    """Raise a BlockSparseError unless `new` can be the values of so many new blocks."""
    shape = [count, *values.shape[1:]]
    if not isinstance(new, Tensor) or list(new.shape) != shape:
        got = list(new.shape) if isinstance(new, Tensor) else type(new).__name__
        raise BlockSparseError.expected(name, f"a tensor {shape}", got)
    if new.is_meta or (new.is_complex() and not values.is_complex()):
        raise BlockSparseError.expected(name, "real numbers with data", f"{new.dtype} on {new.device}")


class BlockMove:
    """The move of per-block data to another layout, prepared once for several tensors; see `remap_blocks`."""

    def __init__(self, source: Tensor):
        self.grown = true_positions(source < 0)
        if source.device.type == "cpu":  # NumPy's large arrays are several times as fast as PyTorch's
            rows = source.numpy()
            rows = rows.astype(np.int32 if rows.max(initial=0) < 2**31 else np.int64)  # of half the memory
            self._rows = torch.from_numpy(np.maximum(rows, 0, out=rows))
        else:
            self._rows = source.clamp(min=0)

    def __call__(self, tensor: Tensor, new: Tensor | None = None) -> Tensor:
        """Return the tensor `[nnz, ...]` in the order of the new layout."""
        grown = self.grown.to(tensor.device)
        if not len(tensor):
            moved = tensor.new_zeros(self._rows.numel(), *tensor.shape[1:])
        else:  # several times as fast as an assignment to the blocks that stay
            moved = take_rows(tensor, self._rows.to(tensor.device))
        if new is not None:
            put_rows(moved, grown, new)
        elif grown.numel():
            fill_rows(moved, grown, 0)
        return moved


def carry_state(optimizer: Any, parameter: Tensor, source: Tensor) -> None:
    """Remap the optimizer state of a parameter that loses rows, before the parameter itself changes."""
    for state, *_ in states_of(parameter, optimizer):
        for name, tensor in state.items():
            if follows_blocks(name, tensor, parameter.shape):
                state[name] = remap_blocks(tensor, source)


def check_module(module: Any) -> None:
    """Raise a BlockSparseError unless the module is block-sparse."""
    if not isinstance(module, BlockSparseModule):
        raise BlockSparseError.expected("module", "one with a block-sparse weight", type(module).__name__)
