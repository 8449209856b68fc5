"""Sparse evolutionary training: drops the weights nearest zero and grows the same number at random places."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from ...checked import boolean, integer, number
from ...indices import Replacement
from ...ops.checks import accumulator
from ...surgery.prunable import Skip
from ...surgery.rewire import OnLayoutChange, replace_blocks
from ...surgery.weight_handle import WeightHandle
from ..selection import TieBreak, check_norm, mark_smallest, stored_norms
from .dynamic_sparsity import DynamicSparsity, Modules
from .growth import Init, check_init, draw_places, initial_values


class SET(DynamicSparsity):
    """Sparse evolutionary training (SET): drops the weights nearest zero and grows new ones at random places.

    Call `step` after each epoch. Of each weight, it drops the fraction zeta of the positive values nearest zero, the
    same fraction of the negative ones (each rounded to a whole number), and zeros; of blocks larger than 1 x 1, the
    fraction zeta with the smallest norms. The same number of blocks grows at random free places. Nothing dense is
    allocated, and the optimizer's state follows: momentum is kept for blocks that stay. A weight that stores all of its
    blocks does not change.

    Args:
        modules: a model or a list of modules; all block-sparse weights in them evolve, also those of recurrent layers.
        optimizer: the optimizer that trains them; None by default.
        zeta: fraction to drop, 0 to 1; 0.3 by default.
        skip: modules, or names of modules or parameters, that do not change; none by default. The papers skip the
            output layer.
        every: calls of `step` from one change to the next, 1 by default.
        end: first call that changes nothing; None (default) for no end. With the number of epochs, no change follows
            the last epoch, as in the papers. (For pruning methods, `end` is the last call that may prune.)
        init: initial values of new blocks. The named ones draw a few blocks at a time.
            "zeros" (default): new blocks begin at 0. On Higgs this gave a lower error than "he".
            "he", as in the papers: uniform within sqrt(6 / n_in). Or "xavier".
            A function of (module, shape, torch.Generator) that returns all new blocks of the weight as a CPU tensor,
            on each process that stores the weight.
        norm: norm of a block: "l2" (default), "mean" (of |w|) or "max".
        seed: seed of the random places and values, and of the choice among equal norms; 0 by default.
        ramp: changes over which the fraction rises linearly; 1 (default), as published, for all of it at once.
            After few steps, no block is near zero yet, so that large first changes lose much.
        constant_fan_in: whether each row of blocks keeps its number of blocks, so that all neurons have equal work;
            then `keep_lines` does not apply. False by default. `bs.patterns.constant_fan_in` has equal rows.
        keep_lines: whether new blocks grow first in rows and columns of blocks that have none, because a neuron without
            inputs or outputs no longer learns. Applies if there are enough blocks for one in each. True by default.
        on_layout_change: function of (module, source) to call after each change; see `rewire`.

    Raises:
        BlockSparseError: as for `DynamicSparsity`; numbers out of range; an unknown init or norm.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Sequential(bs.nn.Linear(64, 96, density=0.2, block_size=8), bs.nn.Linear(96, 10))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        >>> method = bs.sparsity.SET(model, optimizer, zeta=0.3, skip="1")
        >>> before = model[0].layout
        >>> method.step(), before.nnz == model[0].layout.nnz, before == model[0].layout
        (True, True, False)

    Source: Mocanu et al., Scalable training of artificial neural networks with adaptive sparse connectivity (2018);
    Curci, Mocanu, Pechenizkiy, Truly sparse neural networks at scale (2021); Lasby et al., Dynamic sparse training with
    structured sparsity (2024), for `constant_fan_in`.
    """

    def __init__(
        self,
        modules: Modules,
        optimizer: torch.optim.Optimizer | None = None,
        zeta: float = 0.3,
        *,
        skip: Skip = (),
        every: int = 1,
        end: int | None = None,
        init: Init = "zeros",
        norm: str = "l2",
        seed: int = 0,
        ramp: int = 1,
        keep_lines: bool = True,
        constant_fan_in: bool = False,
        on_layout_change: OnLayoutChange | None = None,
    ):
        super().__init__(modules, optimizer, skip=skip, every=every, seed=seed, on_layout_change=on_layout_change)
        self.ramp = integer("ramp", ramp, 1)
        self.keep_lines = boolean("keep_lines", keep_lines)
        self.constant_fan_in = boolean("constant_fan_in", constant_fan_in)
        self.zeta = number("zeta", zeta, 0, 1)
        check_init(init)
        check_norm(norm)
        self.end = None if end is None else integer("end", end, 0)
        self.init, self.norm = init, norm
        self._warn_if_never_due()

    def fraction(self, t: int) -> float:
        """Return the fraction of the blocks to drop in call t, counted from 1."""
        return self._ramp_factor(t) * self.zeta

    def _change_layouts(self) -> None:
        for i, _, weight in self._trained_weights():
            if weight.layout.nnz < weight.layout.grid[0] * weight.layout.grid[1]:
                self._evolve(weight, self._generator(i), self._tie_break(i))

    def _evolve(self, weight: WeightHandle, generator: np.random.Generator, tie_break: TieBreak) -> None:
        """Drop the blocks nearest zero of one weight, and grow the same number at random places."""
        drop = self._select_drops(weight, tie_break)
        self._replace(weight, draw_places(weight, drop, generator, self.keep_lines, self.constant_fan_in), generator)

    def _select_drops(self, weight: WeightHandle, tie_break: TieBreak) -> np.ndarray:
        """Return a mask `[nnz]` of the blocks of one weight to drop."""
        return nearest_zero(weight, self.fraction(self.calls), self.norm, tie_break)

    def _replace(self, weight: WeightHandle, change: Replacement, generator: np.random.Generator) -> None:
        """Replace blocks of one weight, and draw the values of the new ones."""
        values_at = None
        if self.init != "zeros":
            source = torch.Generator().manual_seed(int(generator.integers(2**63)))
            places = partial(np.divmod, change.added, weight.layout.grid[1])
            values_at = partial(initial_values, weight, change.added.size, self.init, source, places)
        replace_blocks(weight, change, self.optimizer, new=values_at, on_layout_change=self.on_layout_change)


def nearest_zero(weight: WeightHandle, zeta: float, norm: str, tie_break: TieBreak) -> np.ndarray:
    """Return a mask `[nnz]` of the blocks that SET drops; see `SET`. `tie_break` orders equal blocks."""
    values, nnz = weight.local, weight.layout.nnz
    if zeta == 0:
        return np.zeros(nnz, dtype=bool)
    if values.shape[1:].numel() != 1:
        return mark_smallest(stored_norms(weight, norm), round(zeta * nnz), tie_break)
    weights = weight.gather(values.to(accumulator(values.dtype)).reshape(-1)).cpu().numpy()

    def smallest_above_zero(side: np.ndarray) -> np.ndarray:
        """Return a mask of the smallest weights above zero.

        In rising order they follow all others, which are marked too at first: this saves copies of one side.
        """
        above = side > 0
        others, count = (int(np.count_nonzero(each)) for each in (side <= 0, above))
        if not (count := round(zeta * count)):
            return np.zeros(side.size, dtype=bool)
        marks = mark_smallest(side, others + count, tie_break)
        marks &= above
        return marks

    drop = weights == 0
    drop |= smallest_above_zero(weights)
    drop |= smallest_above_zero(-weights)
    return drop
