"""Moves of activations between processes, forward, and of their gradients, backward.

An activation is whole and equal on all processes (replicated), cut along an axis (sharded), or a summand of the whole
on each (partial). Its gradient is replicated where the activation is and all compute the same from it, and partial
where each process computes something else from it.

    forward                         backward
    identity                        all_reduce          replicated, of which each process computes its features
    all_reduce                      identity            partial sums become replicated
    take                            all_gather          replicated, of which each process goes on with its part
    all_gather                      take                parts become replicated
    all_gather                      reduce_scatter      parts, of which each process computes its features of the whole
    reduce_scatter                  all_gather          partial sums become parts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import BlockSparseError

Way = Callable[[Tensor], Tensor]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Move.apply(grad, ctx.back, ctx.there), None, None


def move(x: Tensor, there: Way, back: Way) -> Tensor:
    """there(x), with the gradient back(grad), any number of times."""
    y: Tensor = _Move.apply(x, there, back)
    return y


def identity(x: Tensor) -> Tensor:
    return x.view_as(x)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the processes."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


@dataclass(frozen=True, eq=False)
class Spread:
    """How an axis is cut over the processes of a group, each of which has some of its indices.

    Args:
        group: the processes.
        index: for each process its indices of the axis, rising; all indices are there once.
    """

    group: dist.ProcessGroup
    index: tuple[np.ndarray, ...]
    _order: Tensor | None = field(init=False)  # None if the parts are ranges in order
    _back: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        order = np.concatenate(self.index)
        whole = np.array_equal(order, np.arange(order.size))
        object.__setattr__(self, "_order", None if whole else torch.from_numpy(order))
        object.__setattr__(self, "_back", None if whole else torch.from_numpy(np.argsort(order)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Spread:
        return self  # a group cannot be copied

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def sizes(self) -> list[int]:
        return [len(part) for part in self.index]

    @property
    def here(self) -> np.ndarray:
        """int64, the indices that this process has."""
        return self.index[self.rank]

    def take(self, x: Tensor, dim: int) -> Tensor:
        """The part of this process."""
        if self._order is None:
            return x.narrow(dim, sum(self.sizes[: self.rank]), self.sizes[self.rank]).contiguous()
        return x.index_select(dim, torch.from_numpy(self.here).to(x.device))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The whole, of the parts of all."""
        x, sizes = x.movedim(dim, 0), self.sizes
        if most := max(sizes) - x.shape[0]:  # gloo takes tensors of one size only
            x = torch.cat([x, x.new_zeros(most, *x.shape[1:])])
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in sizes]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        if self._back is not None:
            whole = whole.index_select(0, self._back.to(x.device))
        return whole.movedim(0, dim).contiguous()

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """The part of this process of the sum over all."""
        x = x.movedim(dim, 0)
        if self._order is not None:
            x = x.index_select(0, self._order.to(x.device))
        parts = [part.contiguous() for part in x.split(self.sizes)]
        mine = torch.empty_like(parts[self.rank])
        dist.reduce_scatter(mine, parts, group=self.group)
        return mine.movedim(0, dim).contiguous()

    # -- moves, for features of this axis --------------------------------------------------------------------------

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Replicated to parts."""
        return move(x, partial(self.take, dim=dim), partial(self.all_gather, dim=dim))

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Parts to replicated."""
        return move(x, partial(self.all_gather, dim=dim), partial(self.take, dim=dim))

    def gather_to_compute(self, x: Tensor, dim: int) -> Tensor:
        """Parts to the whole, of which each process computes something else."""
        return move(x, partial(self.all_gather, dim=dim), partial(self.reduce_scatter, dim=dim))

    def sum_to_parts(self, x: Tensor, dim: int) -> Tensor:
        """Partial sums to parts."""
        return move(x, partial(self.reduce_scatter, dim=dim), partial(self.all_gather, dim=dim))


def copy_to_compute(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Replicated, of which each process computes something else."""
    return move(x, identity, partial(all_reduce, group=group))


def sum_to_whole(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial sums to replicated."""
    return move(x, partial(all_reduce, group=group), identity)


def evenly(group: dist.ProcessGroup, size: int, what: str) -> Spread:
    """An axis in equal parts, as PyTorch's `Shard` has it where the size is divisible; else a BlockSparseError."""
    ranks = dist.get_world_size(group)
    if size % ranks:
        raise BlockSparseError.expected(what, f"a size divisible by the {ranks} processes", size)
    return Spread(group, tuple(np.array_split(np.arange(size), ranks)))
