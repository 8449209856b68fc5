"""Pruning by a threshold for |w| that rises during training."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from ...checked import boolean, integer, number
from ...errors import BlockSparseError
from ...surgery.prunable import Skip, prunable
from ..lines import best_of_lines, lines_of
from ..selection import dense_norms, rank_scores
from .dense_pruner import MaskedPruner
from .schedule import Ramp


def percentiles(model: nn.Module, percent: float = 90, skip: Skip = ()) -> dict[str, float]:
    """Return a percentile of |w| of each dense weight, by name: the `q` of `ThresholdPruning`.

    Args:
        model: a trained dense model of the architecture that you will prune.
        percent: 0 to 100, 90 by default.
        skip: modules or names to leave out; none by default.

    Raises:
        BlockSparseError: a percent out of range, or a name that the model does not have.

    >>> import torch, blocksparse as bs
    >>> layer = torch.nn.Linear(100, 1)
    >>> layer.weight.data = torch.arange(-50.0, 50.0)[None]
    >>> bs.sparsity.percentiles(layer)
    {'weight': 45.0}
    """
    number("percent", percent, 0, 100)
    weights = {weight.name: weight.matrix().detach().float().abs().cpu() for weight in prunable(model, 1, skip)}
    return {name: float(np.percentile(weight.numpy(), percent)) for name, weight in weights.items()}


class ThresholdPruning(MaskedPruner):
    """Block-sparse RNN pruning: blocks whose largest |w| is below a rising threshold become 0, and stay 0.

    The threshold is that of `Ramp`, times n^(1/4) for blocks of n weights. The density that results depends on the
    weights; a larger `q` makes it smaller. Made for recurrent layers, but works for all. With the penalty of
    `GroupLasso` in the loss, this is the paper's GLP.

    Args:
        model, optimizer, block_size, skip: see `DensePruner`.
        q: final threshold for a single weight, as one number or as a number per weight by name. The paper uses the
            90th percentile of |w| of a trained dense model: `percentiles(dense_model)`.
        begin: first call of `step` that may prune. The paper begins in the second epoch.
        ramp: call from which on the threshold rises faster; in the paper after 20 % of training.
        end: last call that may prune; in the paper after 40 % of training. (For `SET` and `RigL`, `end` is the first
            call that changes nothing.)
        every: calls from one pruning to the next, 100 by default.
        seed: seed of the choice among equal blocks that `keep_lines` makes, 0 by default.
        keep_lines: whether each row and each column of blocks keeps its largest block, so that no neuron loses all of
            its connections; True by default. Does not apply to rows and columns of a single block.

    Raises:
        BlockSparseError: as for `DensePruner`; a q that is negative, or missing for a weight; steps in the wrong order;
            in `finish`, a weight without blocks.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.LSTM(16, 64)
        >>> q = bs.sparsity.percentiles(model)      # better: of a trained model
        >>> method = bs.sparsity.ThresholdPruning(model, None, q, begin=1, ramp=4, end=8, every=1, block_size=16)
        >>> method.step()
        True

    Source: Narang, Undersander, Diamos, Block-sparse recurrent neural networks (2017).
    """

    remedy, stronger = "a lower q", "a higher q"
    schedule: Ramp

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        q: float | Mapping[str, float],
        *,
        begin: int,
        ramp: int,
        end: int,
        every: int = 100,
        block_size: int | tuple[int, int] = 32,
        skip: Skip = (),
        seed: int = 0,
        keep_lines: bool = True,
    ):
        super().__init__(model, optimizer, block_size=block_size, skip=skip)
        self.schedule = Ramp(begin, ramp, end, every)
        self.end = end
        self.seed, self.keep_lines = integer("seed", seed, 0), boolean("keep_lines", keep_lines)
        by_name = q if isinstance(q, Mapping) else dict.fromkeys(self.weights, q)
        missing = [name for name in self.weights if name not in by_name]
        if missing:
            raise BlockSparseError.expected("q", f"a number for {missing[0]}", sorted(by_name))
        self.theta = {
            name: self.schedule.theta(number(f"q of {name}", by_name[name], 0)) * blocks.size**0.25
            for name, blocks in self.blocks.items()
        }

    def threshold(self, name: str, t: int) -> float:
        """Return the threshold for a block of this weight at step t."""
        return self.schedule.threshold(t, self.theta[name])

    def _prune(self) -> None:
        """Drop the blocks whose largest |w| is below the threshold, except the best of each row and column to keep."""
        for name in self._trained():
            largest = dense_norms(self.blocks[name], self.dense[name], "max")
            keep = self.keep[name].to(largest.device)
            stays = largest >= self.threshold(name, self.calls)
            if self.keep_lines:
                rows, cols = lines_of(self.blocks[name])
                several = rows[: rows.size * (cols.size > 1)], cols[: cols.size * (rows.size > 1)]
                stays |= best_of_lines(rank_scores(largest, self.seed).masked_fill(~keep, -1), several)
            self.keep[name] = keep & stays
