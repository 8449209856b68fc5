"""Gradual magnitude pruning: removes more and more of the smallest blocks, by a cubic schedule."""

from __future__ import annotations

import torch
from torch import nn

from ...checked import integer
from ...surgery.prunable import Skip
from .dense_pruner import Masked
from .lines import lines_of
from .magnitude import check_norm, dense_norms, per_number
from .schedule import CubicSchedule
from .strongest import check_density, strongest


class GradualPruning(Masked):
    """Gradual magnitude pruning of blocks. `step` is called after each `optimizer.step()`.

    From call `begin` to call `end` the density falls from 1 to `density` by a cubic schedule (`CubicSchedule`), at
    each `every`-th call: the blocks of the smallest magnitude become 0, and stay so. With `begin=0, end=1` one call
    after the training prunes in one shot.

    Args:
        model, optimizer, block_size, skip: as for all methods that start from dense weights; see `DensePruner`.
        density: of all these weights together, at the end.
        begin, end, every: calls of `step`.
        norm: the magnitude of a block: "l2" (for each number in it), "mean" (of |w|) or "max".
        scope: "global", where all blocks compete and each weight keeps its strongest one at least; or "layer", where
            each weight has that density.
        seed: of which blocks of equal magnitude go.
        keep_lines: whether each row and each column of blocks keeps its strongest block, or another one if the density
            needs it, where the density of the weight suffices for one in each: no neuron loses all of its connections.

    Raises:
        BlockSparseError: as `DensePruner`; a density that leaves a weight without a block; numbers out of range, an
            unknown norm or scope.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32))
        >>> method = bs.sparsity.GradualPruning(model, density=0.25, block_size=8, begin=0, end=10, every=2)
        >>> for _ in range(10):
        ...     pruned = method.step()      # after the optimizer's
        >>> model = method.finish()
        >>> type(model[0]) is bs.nn.Linear, method.density
        (True, 0.25)

    Source: Zhu, Gupta, To prune, or not to prune: exploring the efficacy of pruning for model compression (2017).
    """

    schedule: CubicSchedule

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        density: float = 0.1,
        *,
        begin: int = 0,
        end: int,
        every: int = 100,
        block_size: int | tuple[int, int] = 32,
        norm: str = "l2",
        scope: str = "global",
        skip: Skip = (),
        seed: int = 0,
        keep_lines: bool = True,
    ):
        super().__init__(model, optimizer, block_size=block_size, skip=skip)
        self.schedule = CubicSchedule(density, begin, end, every)
        check_norm(norm)
        check_density(density, self.blocks, scope)
        self.norm, self.scope, self.end = norm, scope, end
        self.seed, self.keep_lines = integer("seed", seed, 0), keep_lines

    def _change(self) -> None:
        scores = {}
        for name in self._trained():
            keep = self.keep[name]
            norms = per_number(
                dense_norms(self.blocks[name], self.dense[name], self.norm), self.blocks[name], self.norm
            )
            # A removed block has a lower score than any zero that is kept, so it never comes back.
            scores[name] = norms.masked_fill(~keep.to(norms.device), -torch.inf)
        if scores:
            self.keep |= strongest(
                scores,
                self.blocks,
                self.schedule(self.calls),
                self.scope,
                seed=self.seed,
                lines={name: lines_of(self.blocks[name]) for name in scores} if self.keep_lines else None,
                end=self.schedule.density,
            )
