"""A search for an order of input features in which N:M sparsity keeps more of a weight."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...checked import integer
from ...errors import BlockSparseError
from ...ops.checks import accumulator
from .mask import check_inputs, check_nm, check_weight, nm_mask

# Values that a step of the search computes at a time, chosen to fit in cache.
CHUNK = 1 << 17


def nm_permutation(weight: Tensor, n: int = 2, m: int = 4, *, escapes: int = 100, seed: int = 0) -> Tensor:
    """Find an order of columns such that `weight[:, order]` keeps more magnitude under `nm_mask`.

    Swaps columns of different groups, the best swaps first, until none helps. Then it repeatedly swaps a few random
    columns, searches from there, and keeps the result if it is better.

    Permute the outputs of the layer before in the same way, and the model computes the same without moving data at run
    time: `before.weight[order]`, `before.bias[order]` and `layer.weight[:, order]`.

    Args:
        weight: `[out_features, in_features]`, or `[out_channels, in_channels, *kernel]`.
        n: weights kept in each group, 2 by default.
        m: weights in a group, n or more and a divisor of the inputs; 4 by default.
        escapes: number of random restarts, 100 by default; 0 for greedy swaps only.
        seed: seed of the random swaps, 0 by default.

    Returns:
        int64 `[in_features]`, on the weight's device. Time grows with rows * columns^2, memory with columns^2.

    Raises:
        BlockSparseError: as for `nm_mask`; a weight that is not finite; escapes or seed below 0.

    >>> import torch, blocksparse as bs
    >>> weight = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    >>> order = bs.sparsity.nm_permutation(weight, 1, 2)
    >>> weight[:, order][bs.sparsity.nm_mask(weight[:, order], 1, 2)].sum()
    tensor(7.)

    Source: Pool, Yu, Channel permutations for N:M sparsity (2021).
    """
    columns = _columns(weight, n, m)
    escapes, seed = integer("escapes", escapes, 0), integer("seed", seed, 0)
    if n == m or columns.shape[0] == m:
        return torch.arange(columns.shape[0], device=weight.device)
    search = _Search(columns, n, m)
    search.climb()
    generator = np.random.default_rng(seed)
    for _ in range(escapes):
        best = search.state()
        search.shake(generator)
        search.climb()
        if search.kept.sum() <= best[1].sum():
            search.restore(best)
    return search.order.flatten()


def nm_efficacy(weight: Tensor, order: Tensor | None = None, n: int = 2, m: int = 4) -> float:
    """Return how much of the magnitude that N:M loses an order of columns recovers, 0 to 1.

    (kept in this order - kept without it) / (largest n / m of each row - kept without it): 0 for the order that
    `weight` has, 1 for one that loses nothing compared with free pruning of each row.

    Args:
        weight: `[out_features, in_features]`, or `[out_channels, in_channels, *kernel]`, where each tap is a row.
        order: int64 `[in_features]`; by default that of `nm_permutation`.
        n: weights kept in each group, 2 by default.
        m: weights in a group, n or more and a divisor of the inputs; 4 by default.

    Raises:
        BlockSparseError: as for `nm_permutation`; an order that is not a permutation.

    >>> import torch, blocksparse as bs
    >>> bs.sparsity.nm_efficacy(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([0, 2, 1, 3]), 1, 2)
    1.0

    Source: Pool, Yu (2021).
    """
    rows = _columns(weight, n, m).T.double()
    count = rows.shape[1]
    order = nm_permutation(weight, n, m) if order is None else order
    columns = torch.as_tensor(order, device="cpu").to(rows.device)
    if columns.shape != (count,) or not torch.equal(columns.sort().values, torch.arange(count, device=rows.device)):
        missing = sorted({*range(count)} - {*columns.flatten().tolist()})
        got = f"shape {list(columns.shape)}" + (f" without {missing[0]}" if missing else "")
        raise BlockSparseError.expected("order", f"each of 0 to {count - 1} once", got)
    default = _kept_magnitude(rows, n, m)
    free = rows.topk(count * n // m).values.sum().item()
    return (_kept_magnitude(rows[:, columns], n, m) - default) / (free - default) if free > default else 0.0


def _columns(weight: Tensor, n: int, m: int) -> Tensor:
    """Return |w| by column, in float32 or float64, `[in, out * taps]`."""
    check_weight(weight)
    check_nm(n, m)
    check_inputs(weight.shape[1], m)
    columns = weight.detach().abs().movedim(1, 0).flatten(1).contiguous().to(accumulator(weight.dtype))
    if not columns.isfinite().all():
        raise BlockSparseError.expected("weight", "finite numbers", "inf or nan")
    return columns


def _kept_magnitude(rows: Tensor, n: int, m: int) -> float:
    """Return the sum of the magnitudes that the N:M mask keeps."""
    return rows[nm_mask(rows, n, m)].sum().item()


class _Search:
    """A local search over orders of columns, with the gain of each swap of two columns.

    Attributes:
        order: columns of each group, `[groups, m]`.
        kept: magnitude that each group keeps, `[groups]`.
        with_other: magnitude that a group would keep with column c in place of its i-th, `[groups, m, columns]`.
        gain: gain of the best swap between two groups, `[groups, groups]`.
        places: positions i * m + j in these groups of the two columns to swap.
    """

    def __init__(self, columns: Tensor, n: int, m: int):
        count = columns.shape[0]
        groups = count // m
        self.columns, self.n, self.m = columns, n, m
        self.order = torch.arange(count, device=columns.device).view(groups, m)
        self.kept = columns.new_empty(groups)
        self.with_other = columns.new_empty(groups, m, count)
        self.gain = columns.new_empty(groups, groups)
        self.places = torch.empty(groups, groups, dtype=torch.int64, device=columns.device)
        self._refresh(torch.arange(groups, device=columns.device))
        # Rounding errors must not look like gains, or the search might not end.
        self.min_gain = 64 * torch.finfo(columns.dtype).eps * self.kept.mean().item()

    def state(self) -> tuple[Tensor, ...]:
        """Return copies of all tensors, for `restore`."""
        return tuple(x.clone() for x in (self.order, self.kept, self.with_other, self.gain, self.places))

    def restore(self, state: tuple[Tensor, ...]) -> None:
        self.order, self.kept, self.with_other, self.gain, self.places = state

    def climb(self) -> None:
        """Swap columns until no swap helps. In a round each group takes part in at most one swap, so gains add up."""
        while True:
            first, second = (self.gain > self.min_gain).triu(1).nonzero(as_tuple=True)
            if first.numel() == 0:
                return
            best = self.gain[first, second].argsort(descending=True, stable=True)
            changed: set[int] = set()
            for a, b in torch.stack([first[best], second[best]], 1).tolist():
                if a not in changed and b not in changed:
                    changed.update((a, b))
                    i, j = divmod(int(self.places[a, b]), self.m)
                    self._swap(a * self.m + i, b * self.m + j)
            self._refresh(torch.tensor(sorted(changed), device=self.order.device))

    def shake(self, generator: np.random.Generator, swaps: int = 3) -> None:
        """Swap a few random pairs of columns."""
        places = generator.choice(self.order.numel(), 2 * min(swaps, self.order.numel() // 2), replace=False)
        for a, b in places.reshape(-1, 2).tolist():
            self._swap(a, b)
        self._refresh(torch.from_numpy(np.unique(places // self.m)).to(self.order.device))

    def _swap(self, a: int, b: int) -> None:
        """Exchange the columns at two positions of the order."""
        order = self.order.view(-1)
        order[[a, b]] = order[[b, a]]

    def _refresh(self, groups: Tensor) -> None:
        """Recompute everything that depends on the columns of these groups."""
        n, m = self.n, self.m
        columns = self.columns[self.order[groups]]  # [k, m, rows]
        self.kept[groups] = columns.topk(n, dim=1).values.sum((1, 2))
        for i in range(m):
            # Another column in place of column i adds what exceeds the smallest of the n largest others.
            others = columns[:, [j for j in range(m) if j != i]].topk(n, dim=1).values
            self.with_other[groups, i] = others.sum((1, 2))[:, None] + self._above(others[:, -1])
        # [k, m, groups, m]: the i-th column of these groups exchanged with the j-th of any group.
        there = self.with_other[groups][:, :, self.order]
        back = self.with_other[:, :, self.order[groups]].permute(2, 3, 0, 1)
        best, places = (there + back).transpose(1, 2).flatten(2).max(-1)
        gain = best - self.kept[groups][:, None] - self.kept
        self.gain[groups], self.places[groups] = gain, places
        self.gain[:, groups], self.places[:, groups] = gain.T, (places % m * m + places // m).T

    def _above(self, bounds: Tensor) -> Tensor:
        """Return the sum over rows of max(0, column - bound) for each bound `[k, rows]` and column, `[k, columns]`."""
        rows = self.columns.shape[1]
        size = max(1, CHUNK // rows)
        above = self.columns.new_empty(len(bounds), len(self.columns))
        buffer = self.columns.new_empty(max(1, size // len(self.columns)), min(size, len(self.columns)), rows)
        for some_bounds, sums in zip(bounds.split(len(buffer)), above.split(len(buffer)), strict=True):
            for columns, target in zip(self.columns.split(size), sums.split(size, dim=1), strict=True):
                over = torch.sub(columns, some_bounds[:, None], out=buffer[: len(some_bounds), : len(columns)])
                torch.sum(over.clamp_min_(0), -1, out=target)
        return above
