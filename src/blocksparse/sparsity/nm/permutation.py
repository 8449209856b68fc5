"""Finds an order of the input features in which N:M sparsity keeps more of a weight."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...checked import integer
from ...errors import BlockSparseError
from .mask import check_inputs, check_nm, check_weight, nm_mask

# Numbers that a step of the search makes at a time: they are to stay in the cache.
CHUNK = 1 << 17


def nm_permutation(weight: Tensor, n: int = 2, m: int = 4, *, escapes: int = 100, seed: int = 0) -> Tensor:
    """Finds an order of columns by greedy swaps, such that `weight[:, order]` keeps more magnitude under `nm_mask`.

    Columns of different groups are swapped, the best swaps first, until none helps. Then a few random columns are
    swapped and the search goes on from there; what comes of it is taken where it is better.

    The layer computes the same when the outputs of the layer before come in that order, so that nothing moves at run
    time: `before.weight[order]`, `before.bias[order]` and `layer.weight[:, order]`.

    Args:
        weight: `[out_features, in_features]`, or `[out_channels, in_channels, *kernel]`.
        n, m: 0 < n <= m; m divides the inputs.
        escapes: how often the search leaves the best order that it has; 0 for the greedy swaps alone.
        seed: of the random swaps.

    Returns:
        int64 `[in_features]`, on the weight's device. The time grows with rows * columns^2, the memory with columns^2.

    Raises:
        BlockSparseError: as `nm_mask`; a weight that is not finite, escapes or seed below 0.

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
    """Returns how much of N:M's loss against the best n / m of each row an order of the columns recovers.

    (kept in this order - kept as it is) / (the largest n / m of each row - kept as it is), in magnitudes: 0 for the
    order that there is, 1 for one that loses nothing against pruning each row freely.

    Args:
        weight: `[out_features, in_features]`, or `[out_channels, in_channels, *kernel]`, each tap a row of its own.
        order: int64 `[in_features]`; by default that of `nm_permutation`.
        n, m: 0 < n <= m; m divides the inputs.

    Raises:
        BlockSparseError: as `nm_permutation`; an order that is no permutation.

    >>> import torch, blocksparse as bs
    >>> bs.sparsity.nm_efficacy(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([0, 2, 1, 3]), 1, 2)
    1.0

    Source: Pool, Yu (2021).
    """
    rows = _columns(weight, n, m).T.double()
    count = rows.shape[1]
    order = nm_permutation(weight, n, m) if order is None else order
    numbers = torch.as_tensor(order).to(rows.device)
    if numbers.shape != (count,) or not torch.equal(numbers.sort().values, torch.arange(count, device=rows.device)):
        raise BlockSparseError.expected("order", f"a permutation of {count} columns", list(numbers.shape))
    default = _kept(rows, n, m)
    free = rows.topk(count * n // m).values.sum().item()
    return (_kept(rows[:, numbers], n, m) - default) / (free - default) if free > default else 0.0


def _columns(weight: Tensor, n: int, m: int) -> Tensor:
    """|w| of each column, in float32 or float64, `[in, out * taps]`."""
    check_weight(weight)
    check_nm(n, m)
    check_inputs(weight.shape[1], m)
    columns = weight.detach().abs().movedim(1, 0).flatten(1).contiguous()
    columns = columns if columns.dtype == torch.float64 else columns.float()
    if not columns.isfinite().all():
        raise BlockSparseError.expected("weight", "finite numbers", "others")
    return columns


def _kept(rows: Tensor, n: int, m: int) -> float:
    return rows[nm_mask(rows, n, m)].sum().item()


class _Search:
    """An order of columns, in groups, and what each swap of two columns would add to the magnitude that is kept."""

    def __init__(self, columns: Tensor, n: int, m: int):
        count = columns.shape[0]
        groups = count // m
        self.columns, self.n, self.m = columns, n, m
        self.order = torch.arange(count, device=columns.device).view(groups, m)
        # What each group keeps, and would keep with column c in the place of its i-th: [groups, m, columns].
        self.kept = columns.new_empty(groups)
        self.with_other = columns.new_empty(groups, m, count)
        # The best swap between two groups: its gain, and the places i * m + j of the two columns.
        self.gain = columns.new_empty(groups, groups)
        self.places = torch.empty(groups, groups, dtype=torch.int64, device=columns.device)
        self._refresh(torch.arange(groups, device=columns.device))
        # Rounding errors must not look like gains, or the search might not end.
        self.least = 64 * torch.finfo(columns.dtype).eps * self.kept.mean().item()

    def state(self) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in (self.order, self.kept, self.with_other, self.gain, self.places))

    def restore(self, state: tuple[Tensor, ...]) -> None:
        self.order, self.kept, self.with_other, self.gain, self.places = state

    def climb(self) -> None:
        """Swaps until none helps. In each round a group takes part in one swap at most, so that all gains are real."""
        while True:
            first, second = (self.gain > self.least).triu(1).nonzero(as_tuple=True)
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
        places = generator.choice(self.order.numel(), 2 * min(swaps, self.order.numel() // 2), replace=False)
        for a, b in places.reshape(-1, 2).tolist():
            self._swap(a, b)
        self._refresh(torch.from_numpy(np.unique(places // self.m)).to(self.order.device))

    def _swap(self, a: int, b: int) -> None:
        order = self.order.view(-1)
        order[[a, b]] = order[[b, a]]

    def _refresh(self, groups: Tensor) -> None:
        """All that depends on what is in these groups."""
        n, m = self.n, self.m
        columns = self.columns[self.order[groups]]  # [k, m, rows]
        self.kept[groups] = columns.topk(n, dim=1).values.sum((1, 2))
        for i in range(m):
            # Without column i the n largest are known; another column adds what it has above the least of them.
            others = columns[:, [j for j in range(m) if j != i]].topk(n, dim=1).values
            self.with_other[groups, i] = others.sum((1, 2))[:, None] + self._above(others[:, -1])
        # [k, m, groups, m]: the i-th column of one of these groups against the j-th of any.
        there = self.with_other[groups][:, :, self.order]
        back = self.with_other[:, :, self.order[groups]].permute(2, 3, 0, 1)
        best, places = (there + back).transpose(1, 2).flatten(2).max(-1)
        gain = best - self.kept[groups][:, None] - self.kept
        self.gain[groups], self.places[groups] = gain, places
        self.gain[:, groups], self.places[:, groups] = gain.T, (places % m * m + places // m).T

    def _above(self, bounds: Tensor) -> Tensor:
        """The sum over the rows of max(0, column - bound), for each bound `[k, rows]` and column: `[k, columns]`."""
        rows = self.columns.shape[1]
        size = max(1, CHUNK // rows)
        above = self.columns.new_empty(len(bounds), len(self.columns))
        room = self.columns.new_empty(max(1, size // len(self.columns)), min(size, len(self.columns)), rows)
        for few, sums in zip(bounds.split(len(room)), above.split(len(room)), strict=True):
            for columns, part in zip(self.columns.split(size), sums.split(size, dim=1), strict=True):
                over = torch.sub(columns, few[:, None], out=room[: len(few), : len(columns)])
                torch.sum(over.clamp_min_(0), -1, out=part)
        return above
