"""Sparse evolutionary training: drop the weights nearest zero, grow as many at random."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from ...checked import integer, number
from ...surgery.prunable import Skip
from ...surgery.rewire import OnLayoutChange, rewire
from ...surgery.weight_handle import WeightHandle
from ..lines import coverable, lines_of
from ..selection import TieBreak, check_norm, hash_positions, mark_smallest, stored_norms
from .dynamic_sparsity import DynamicSparsity, Modules
from .growth import Init, check_init, draw_unused, first_values, refilled


class SET(DynamicSparsity):
    """Sparse evolutionary training (SET). `step`, after each epoch, evolves the topology.

    Of each weight the fraction zeta of the positives and the fraction zeta of the negatives that are nearest zero go
    (rounded to whole numbers), and those that are exactly 0; of blocks of more than one weight the fraction zeta of the
    smallest magnitude. As many grow at random places that are unused then. Their number never changes, nothing dense is
    made, and the optimizer's state follows: momentum is kept for survivors only. A weight whose blocks are all stored
    is left as it is.

    Args:
        modules: a model, or some modules; all block-sparse weights in them evolve, those of recurrent layers too.
        optimizer: the one that trains them.
        zeta: from 0 to 1.
        skip: what is left as it is: modules, or names of modules or parameters. In the papers, the output layer.
        every: calls of `step` per evolution.
        end: from this call on nothing evolves; with the number of epochs, the last one is left out, as in the papers.
        init: of new weights: "he", uniform within sqrt(6 / n_in), as in the papers; "xavier"; "zeros"; or a function
            of (module, shape, torch.Generator) that returns a CPU tensor: all new blocks of the weight, on each of the
            processes that store it together (the names draw a few at a time).
        norm: the magnitude of a block: "l2", "mean" (of |w|) or "max".
        seed: of all that is drawn, also of which go and grow of equal ones.
        keep_lines: whether new blocks grow first in rows and columns of blocks that have none, if the density suffices
            for one in each: a neuron without inputs or outputs learns nothing any more.
        on_layout_change: called as (module, source) after each change; see `rewire`.

    Raises:
        BlockSparseError: as `DynamicSparsity`; numbers out of range, an unknown init or norm.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Sequential(bs.nn.Linear(64, 96, density=0.2, block_size=8), bs.nn.Linear(96, 10))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        >>> method = bs.sparsity.SET(model, optimizer, zeta=0.3, skip="1")
        >>> before = model[0].layout
        >>> method.step(), before.nnz == model[0].layout.nnz, before == model[0].layout
        (True, True, False)

    Source: Mocanu et al., Scalable training of artificial neural networks with adaptive sparse connectivity (2018);
    Curci, Mocanu, Pechenizkiy, Truly sparse neural networks at scale (2021).
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
        init: Init = "he",
        norm: str = "l2",
        seed: int = 0,
        keep_lines: bool = True,
        on_layout_change: OnLayoutChange | None = None,
    ):
        super().__init__(modules, optimizer, skip=skip, every=every, seed=seed, on_layout_change=on_layout_change)
        self.keep_lines = keep_lines
        self.zeta = number("zeta", zeta, 0, 1)
        check_init(init)
        check_norm(norm)
        self.end = None if end is None else integer("end", end, 0)
        self.init, self.norm = init, norm

    def _change(self) -> None:
        for i, _, stored in self._trained():
            if stored.layout.nnz < stored.layout.grid[0] * stored.layout.grid[1]:
                self._evolve(stored, self._generator(i), self._order(i))

    def _evolve(self, stored: WeightHandle, generator: np.random.Generator, order: TieBreak) -> None:
        layout, lines = stored.layout, lines_of(stored)
        drop = nearest_zero(stored, self.zeta, self.norm, order)
        count, kept = int(drop.sum()), layout.keys_of_blocks()[~drop]
        rows, cols = draw_unused(kept, layout.grid, count, generator, lines)
        if self.keep_lines:
            rows, cols = refilled(kept, (rows, cols), layout.grid[1], coverable(lines, layout.nnz), generator)
        new = None
        if self.init != "zeros":
            torch_generator = torch.Generator().manual_seed(int(generator.integers(2**63)))
            new = partial(first_values, stored, len(rows), self.init, torch_generator, lambda: (rows, cols))
        rewire(
            stored, np.flatnonzero(drop), rows, cols, self.optimizer, new=new, on_layout_change=self.on_layout_change
        )


def nearest_zero(stored: WeightHandle, zeta: float, norm: str = "l2", order: TieBreak = hash_positions) -> np.ndarray:
    """Marks the blocks that SET drops, bool `[nnz]`: see `SET`; equal ones by the order of their positions."""
    values, nnz = stored.local, stored.layout.nnz
    if zeta == 0:
        return np.zeros(nnz, dtype=bool)
    if values.shape[1:].numel() != 1:
        return mark_smallest(stored_norms(stored, norm), round(zeta * nnz), order)
    wide = values if values.dtype == torch.float64 else values.float()
    weights = stored.gather(wide.reshape(-1)).cpu().numpy()
    drop = weights == 0
    for side in (weights > 0, weights < 0):
        drop |= mark_smallest(np.where(side, np.abs(weights), np.inf), round(zeta * np.count_nonzero(side)), order)
    return drop
