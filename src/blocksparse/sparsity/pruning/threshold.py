"""The pruning of block-sparse RNN: a threshold for |w| that rises step by step, once slowly and then faster."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from ...checked import integer, number
from ...errors import BlockSparseError
from ...surgery.prunable import Skip, prunable
from ..lines import best_of_lines, lines_of
from ..selection import dense_norms, rank_scores
from .dense_pruner import Masked
from .schedule import Ramp


def percentiles(model: nn.Module, percent: float = 90, skip: Skip = ()) -> dict[str, float]:
    """This percentile of |w| of each dense weight of a model, by the weight's name: the q of `ThresholdPruning`.

    Args:
        model: a trained one, of the architecture that is to be pruned.
        percent: 0 to 100.
        skip: modules or names that are left out.

    Raises:
        BlockSparseError: a percent out of range, a name that the model does not have.

    >>> import torch, blocksparse as bs
    >>> layer = torch.nn.Linear(100, 1)
    >>> layer.weight.data = torch.arange(-50.0, 50.0)[None]
    >>> bs.sparsity.percentiles(layer)
    {'weight': 45.0}
    """
    number("percent", percent, 0, 100)
    weights = {weight.name: weight.matrix().detach().float().abs().cpu() for weight in prunable(model, 1, skip)}
    return {name: float(np.percentile(weight.numpy(), percent)) for name, weight in weights.items()}


class ThresholdPruning(Masked):
    """Block-sparse RNN: blocks whose largest |w| is below a rising threshold become 0, and stay so.

    The threshold is that of `Ramp`, times n^(1/4) for blocks of n weights. The number of blocks that are left depends
    on the weights; `q` is its measure. With the penalty of `GroupLasso` in the loss this is the paper's GLP.

    Args:
        model, optimizer, block_size, skip: as for all methods that start from dense weights; see `DensePruner`. Any
            layers, though made for recurrent ones.
        q: where the threshold for a single weight is to end; the paper takes the 90th percentile of |w| of a trained
            dense model: `percentiles(dense_model)`. One number, or one for each weight by its name.
        begin, ramp, end, every: calls of `step`: where the pruning begins, where the threshold begins to rise faster,
            where it ends, and how often blocks are pruned in between. The paper starts in the second epoch, and
            takes 20 % and 40 % of the training for `ramp` and `end`.
        seed: of which of equal blocks `keep_lines` keeps.
        keep_lines: whether each row and each column of blocks keeps its largest block, so that no neuron loses all of
            its connections; not where a row (column) is a single block.

    Raises:
        BlockSparseError: as `DensePruner`; a q that is negative or missing for a weight, steps that do not follow each
            other; in `finish`, a weight of which nothing was left.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.LSTM(16, 64)
        >>> q = bs.sparsity.percentiles(model)      # of a trained one, better
        >>> method = bs.sparsity.ThresholdPruning(model, None, q, begin=1, ramp=4, end=8, every=1, block_size=16)
        >>> method.step()
        True

    Source: Narang, Undersander, Diamos, Block-sparse recurrent neural networks (2017).
    """

    remedy = "a lower q"
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
        self.seed, self.keep_lines = integer("seed", seed, 0), keep_lines
        given = q if isinstance(q, Mapping) else dict.fromkeys(self.weights, q)
        missing = [name for name in self.weights if name not in given]
        if missing:
            raise BlockSparseError.expected("q", f"a number for {missing[0]}", sorted(given))
        self.theta = {
            name: self.schedule.theta(number(f"q of {name}", given[name], 0)) * blocks.size**0.25
            for name, blocks in self.blocks.items()
        }

    def threshold(self, name: str, t: int) -> float:
        """The threshold for a block of this weight at step t."""
        return self.schedule.threshold(t, self.theta[name])

    def _change(self) -> None:
        for name in self._trained():
            largest = dense_norms(self.blocks[name], self.dense[name], "max")
            keep = self.keep[name].to(largest.device)
            stays = largest >= self.threshold(name, self.calls)
            if self.keep_lines:
                rows, cols = lines_of(self.blocks[name])
                several = rows[: rows.size * (cols.size > 1)], cols[: cols.size * (rows.size > 1)]
                stays |= best_of_lines(rank_scores(largest, self.seed).masked_fill(~keep, -1), several)
            self.keep[name] = keep & stays
