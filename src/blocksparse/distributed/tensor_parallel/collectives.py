"""Collectives between tensor-parallel ranks that are differentiable: forward on activations, backward on gradients.

An activation is replicated (whole and equal on all ranks), sharded along an axis, or partial (the ranks' tensors sum to
the whole). The gradient of a replicated activation is replicated if all ranks compute the same from it, and partial if
each rank computes something else.

    function            forward         backward        use
    copy_to_ranks       identity        all_reduce      replicated, from which each rank computes its features
    sum_over_ranks      all_reduce      identity        partial to replicated
    scatter             local slice     all_gather      replicated to sharded
    gather              all_gather      local slice     sharded to replicated
    all_gather          all_gather      reduce_scatter  as gather, but each rank computes its own features
    reduce_scatter      reduce_scatter  all_gather      partial to sharded

Megatron-LM's mappings are the same six.
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

Collective = Callable[[Tensor], Tensor]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective) -> Tensor:
        ctx.collectives = forward, backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        forward, backward = ctx.collectives
        return _Differentiable.apply(grad, backward, forward), None, None


def differentiable(x: Tensor, forward: Collective, backward: Collective) -> Tensor:
    """Return forward(x), whose gradient is backward(grad), and so on for higher derivatives."""
    y: Tensor = _Differentiable.apply(x, forward, backward)
    return y


def identity(x: Tensor) -> Tensor:
    """Return a view of x: an autograd function must not return its input itself."""
    return x.view_as(x)


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over all ranks, without autograd."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


@dataclass(frozen=True, eq=False)
class AxisSharding:
    """The indices of an axis that each rank of a group has, and the collectives along this axis.

    Args:
        group: the ranks.
        indices: for each rank, its indices in ascending order; every index of the axis belongs to one rank.
    """

    group: dist.ProcessGroup
    indices: tuple[np.ndarray, ...]
    _order: Tensor | None = field(init=False)  # None if the shards are ranges in the order of the ranks
    _inverse: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        order = np.concatenate(self.indices)
        in_order = np.array_equal(order, np.arange(order.size))
        object.__setattr__(self, "_order", None if in_order else torch.from_numpy(order))
        object.__setattr__(self, "_inverse", None if in_order else torch.from_numpy(np.argsort(order)))

    def __deepcopy__(self, memo: dict[int, Any]) -> AxisSharding:
        return self  # a group cannot be copied

    @classmethod
    def even(cls, group: dist.ProcessGroup, size: int, what: str) -> AxisSharding:
        """Return equal ranges, as PyTorch's `Shard`; a BlockSparseError about `what` if `size` cannot be divided."""
        ranks = dist.get_world_size(group)
        if size % ranks:
            raise BlockSparseError.expected(what, f"a size divisible by the {ranks} processes", size)
        return cls(group, tuple(np.array_split(np.arange(size), ranks)))

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def sizes(self) -> list[int]:
        return [len(shard) for shard in self.indices]

    @property
    def size(self) -> int:
        """The size of the whole axis."""
        return sum(self.sizes)

    @property
    def local_indices(self) -> np.ndarray:
        """The indices of this rank, int64."""
        return self.indices[self.rank]

    # -- collectives, without autograd -------------------------------------------------------------------------------

    def local_slice(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of a whole tensor."""
        if self._order is None:
            return x.narrow(dim, sum(self.sizes[: self.rank]), self.sizes[self.rank]).contiguous()
        return x.index_select(dim, torch.from_numpy(self.local_indices).to(x.device))

    def _all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the whole axis `dim` from the shards of all ranks, without autograd."""
        x, sizes = x.movedim(dim, 0), self.sizes
        if missing := max(sizes) - x.shape[0]:  # gloo needs tensors of one size
            x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
        shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in sizes]
        dist.all_gather(shards, x.contiguous(), group=self.group)
        whole = torch.cat([shard[:size] for shard, size in zip(shards, sizes, strict=True)])
        if self._inverse is not None:
            whole = whole.index_select(0, self._inverse.to(x.device))
        return whole.movedim(0, dim).contiguous()

    def _reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's shard along `dim` of the sum over all ranks, without autograd."""
        x = x.movedim(dim, 0)
        if self._order is not None:
            x = x.index_select(0, self._order.to(x.device))
        shards = [shard.contiguous() for shard in x.split(self.sizes)]
        mine = torch.empty_like(shards[self.rank])
        dist.reduce_scatter(mine, shards, group=self.group)
        return mine.movedim(0, dim).contiguous()

    # -- the same with autograd; the table at the top of this file has their use --------------------------------------

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of a replicated tensor."""
        return differentiable(x, partial(self.local_slice, dim=dim), partial(self._all_gather, dim=dim))

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the whole of a sharded tensor; all ranks must compute the same from it."""
        return differentiable(x, partial(self._all_gather, dim=dim), partial(self.local_slice, dim=dim))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the whole of a sharded tensor, from which each rank computes something else."""
        return differentiable(x, partial(self._all_gather, dim=dim), partial(self._reduce_scatter, dim=dim))

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of the sum of partial tensors."""
        return differentiable(x, partial(self._reduce_scatter, dim=dim), partial(self._all_gather, dim=dim))


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a replicated tensor unchanged; its gradient is summed over the ranks."""
    return differentiable(x, identity, partial(_all_reduce, group=group))


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of partial tensors on all ranks."""
    return differentiable(x, partial(_all_reduce, group=group), identity)
