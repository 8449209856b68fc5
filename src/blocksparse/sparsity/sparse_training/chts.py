"""CHTs: grows blocks where short paths through the pattern lead, and drops blocks by sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checked import integer, number
from ...errors import BlockSparseError
from ...indices import kept_keys
from ...layout import BlockLayout
from ...ops.checks import without_autocast
from ...ops.linear import linear, linear_transposed
from ...surgery.prunable import Skip
from ...surgery.rewire import OnLayoutChange
from ...surgery.weight_handle import WeightHandle
from ..lines import lines_of
from ..selection import TieBreak, stored_norms
from .dynamic_sparsity import Modules, cosine_decay
from .growth import draw_by_score, draw_places
from .set import SET

MAX_PLACES = 1 << 27  # of a grid, whose scores are all computed
ROWS_AT_ONCE = 1 << 7


class CHTs(SET):
    """Cannistraci-Hebb training with a soft rule (CHTs): blocks grow where the pattern itself predicts links.

    In each `every`-th call of `step` before `end`, it drops the fraction alpha / 2 (1 + cos(pi t / end)) of the blocks
    of each weight and grows the same number, with values 0. Both are drawn at random:

    - The blocks that stay are drawn with probabilities proportional to norm^T. T rises linearly from the first to the
      second of `temperatures`: from exploring to keeping the largest blocks.
    - New places are drawn with probabilities proportional to their CH2-L3n scores in the pattern that is left. They are
      high where many paths of three blocks lead, over rows and columns with few other blocks. No gradient is needed.

    A block that would be dropped and grown again stays. The scores of all places are computed, so a grid may have
    2^27 blocks at most. They need 2 (rows + columns of blocks) multiply-adds per block, and a training step needs 3 per
    weight and token. If blocks are small, a change thus takes the time of several steps.

    Args:
        modules, optimizer, skip, norm, seed, ramp, keep_lines, constant_fan_in, on_layout_change: see `SET`.
        end: first call that changes nothing.
        every: iterations from one change to the next, 100 by default.
        alpha: initial fraction to drop, 0 to 1; 0.1 by default, as in the paper's language models (0.3 in its MLPs).
        temperatures: the exponents T at the first call and at `end`; (1, 9) by default, as in its language models.

    Raises:
        BlockSparseError: as for `SET`; a grid of more than 2^27 blocks.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Sequential(bs.nn.Linear(64, 96, density=0.2, block_size=8), bs.nn.Linear(96, 10))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> method = bs.sparsity.CHTs(model, optimizer, end=100, every=1, skip="1")
        >>> method.step(), method.temperature(50)
        (True, 5.0)

    Source: Zhang et al., Brain network science modelling of sparse neural networks enables transformers and LLMs to
    perform as fully connected (NeurIPS 2025).
    """

    end: int

    def __init__(
        self,
        modules: Modules,
        optimizer: torch.optim.Optimizer | None,
        end: int,
        *,
        every: int = 100,
        alpha: float = 0.1,
        temperatures: tuple[float, float] = (1.0, 9.0),
        skip: Skip = (),
        norm: str = "l2",
        seed: int = 0,
        ramp: int = 1,
        keep_lines: bool = True,
        constant_fan_in: bool = False,
        on_layout_change: OnLayoutChange | None = None,
    ):
        self.alpha, self.temperatures = number("alpha", alpha, 0, 1), _checked_pair(temperatures)
        super().__init__(
            modules,
            optimizer,
            self.alpha,
            skip=skip,
            every=every,
            end=integer("end", end, 1),
            init="zeros",
            norm=norm,
            seed=seed,
            ramp=ramp,
            keep_lines=keep_lines,
            constant_fan_in=constant_fan_in,
            on_layout_change=on_layout_change,
        )
        for _, _, weight in self._trained_weights():
            check_places(weight.layout)

    def fraction(self, t: int) -> float:
        """Return the fraction of the blocks to drop in call t, counted from 1."""
        return self._ramp_factor(t) * cosine_decay(self.alpha, 0, t, self.end)

    def temperature(self, t: int) -> float:
        """Return the exponent of the norms in call t."""
        first, last = self.temperatures
        return first + (last - first) * t / self.end

    def _evolve(self, weight: WeightHandle, generator: np.random.Generator, tie_break: TieBreak) -> None:
        """Drop and grow blocks of one weight; those that would do both stay."""
        layout = weight.layout
        count = int(self.fraction(self.calls) * layout.nnz)
        powers = powers_of_norms(stored_norms(weight, self.norm), self.temperature(self.calls))
        drop = np.ones(layout.nnz, dtype=bool)
        drop[draw_by_score(powers, layout.nnz - count, generator)] = False
        scores = topological_scores(weight, drop)
        change = draw_places(weight, drop, generator, self.keep_lines, self.constant_fan_in, scores)
        self._replace(weight, change.without_returning(layout.keys_of_blocks()), generator)


def topological_scores(weight: WeightHandle, drop: np.ndarray) -> np.ndarray:
    """Return CH2-L3n scores of all places without the dropped blocks, float32 `[rows, columns]`.

    Those of places without a score, and then of padding, are below all others. Blocks that stay have 0.
    """
    layout = weight.layout
    check_places(layout)
    keys = kept_keys(layout, drop)
    scores = path_scores(BlockLayout._from_keys(keys, layout.grid, (1, 1))).numpy()
    # These bounds are apart by more than random numbers can bridge.
    np.maximum(scores, 1e-20, out=scores)
    padding = [np.delete(np.arange(size), side) for size, side in zip(layout.grid, lines_of(weight), strict=True)]
    scores[padding[0]] = scores[:, padding[1]] = 1e-35
    scores.reshape(-1)[keys] = 0
    return scores


def check_places(layout: BlockLayout) -> None:
    """Raise a BlockSparseError if a grid has too many places to score all of them."""
    if layout.grid[0] * layout.grid[1] > MAX_PLACES:
        raise BlockSparseError.expected(
            "topological growth", f"a grid of {MAX_PLACES:,} blocks at most (use larger blocks, or SMET)", repr(layout)
        )


def path_scores(layout: BlockLayout, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the CH2-L3n score of each place of a pattern of single blocks, `[rows, columns]` on the CPU.

    With B the pattern and D = B B^T, D_ij counts the columns that rows i and j share, and row j has
    e_ij = max(blocks of row j - D_ij, 1) - 1 other blocks besides the predicted one. A path from row i over row j to
    column k counts (D_ij + 1) / (e_ij + 1) where D_ij > 0. Paths over columns count likewise, and both are added.
    """
    scores = torch.empty(layout.grid, dtype=dtype, device="cpu")
    with without_autocast(scores.device):  # the CPU, wherever the weights are
        for first, paths in _paths_over_rows(layout, dtype):
            scores[first : first + len(paths)] = paths
        for first, paths in _paths_over_rows(layout.T, dtype):
            scores[:, first : first + len(paths)] += paths.T
    return scores


def _paths_over_rows(layout: BlockLayout, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, sums over paths row - row - column, `[rows, columns]`), some rows at a time."""
    mask, degrees = layout.mask(), torch.from_numpy(np.diff(layout.row_start)).to(dtype)
    values = torch.ones(layout.values_shape, dtype=dtype, device="cpu")
    for first in range(0, len(mask), ROWS_AT_ONCE):
        shared = linear(mask[first : first + ROWS_AT_ONCE].to(dtype), values, layout)
        others = (degrees - shared).clamp_(min=1)
        yield first, linear_transposed(shared.add_(shared.sign()).div_(others), values, layout)


def powers_of_norms(norms: np.ndarray, exponent: float) -> np.ndarray:
    """Return the powers of norms up to a factor, float64; those of 0 are below all others.

    Infinity and NaN count as the largest norm.
    """
    norms = norms.astype(np.float64)  # in float32, the least number below is 0
    finite = np.isfinite(norms)
    largest = norms[finite].max(initial=1e-300)
    powers: np.ndarray = np.maximum((np.where(finite, norms, largest) / largest) ** exponent, 1e-300)
    return powers


def _checked_pair(temperatures: Any) -> tuple[float, float]:
    """Return the two temperatures after a check."""
    if not isinstance(temperatures, Sequence) or len(temperatures) != 2:
        raise BlockSparseError.expected("temperatures", "a pair of numbers (first, last)", repr(temperatures))
    first, last = (number("temperatures", each, 0) for each in temperatures)
    return first, last
