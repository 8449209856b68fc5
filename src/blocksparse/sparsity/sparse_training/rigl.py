"""RigL: drops the smallest weights and grows where the dense gradient is largest."""

from __future__ import annotations

import torch

from ...checked import boolean, integer, number
from ...surgery.prunable import Skip
from ...surgery.rewire import OnLayoutChange
from ..selection import check_norm
from .dynamic_sparsity import Modules, cosine_decay
from .gradient_growth import GradientGrowth


class RigL(GradientGrowth):
    """RigL: drops the blocks with the smallest norms and grows those with the largest gradients.

    In each `every`-th call of `step` before `end`, the fraction alpha / 2 (1 + cos(pi t / end)) of the blocks is
    dropped. The same number grows where the dense gradient has the largest norm. New values start at 0, and the
    optimizer's state starts as in `rewire`. A block that would be dropped and grown again stays. Weights do not move in
    that iteration: a hook clears the gradients in the optimizer's step, also those of a closure.

    Only norms per block of the dense gradient are stored. They are computed a few rows of blocks at a time from the
    layers' inputs and output gradients, which hooks record in that iteration only. Several passes add up, as do all
    processes of DistributedDataParallel and FSDP2, by one all-reduce per group of rows. The dense gradient needs
    1 / density times the multiply-adds of the sparse one, so at low densities a change takes the time of many steps.

    Args:
        modules: a model or a list of modules, with linear layers and convolutions (also transposed). Skip recurrent
            weights, or use `SET` for them.
        optimizer, skip, on_layout_change: see `SET`.
        end: first call that changes nothing; in the paper after 3/4 of training. (For pruning methods, `end` is the
            last call that may prune.)
        every: iterations from one change to the next, 100 by default.
        alpha: initial fraction, 0 to 1; 0.3 by default.
        norm: norm of a block of weights or gradients: "l2" (default), "mean" (of |w|) or "max".
        seed: seed of the choice among equal norms, 0 by default. If a weight gets no gradient, blocks grow at random
            places.
        keep_lines: whether blocks grow first in rows and columns of blocks that have none, where the gradient there is
            largest, because a neuron without inputs is constant and gets no gradient again. Applies if there are enough
            blocks for one in each. True by default.
        ramp: changes over which the fraction rises linearly; 1 (default), as published, for all of it at once.
            After few steps, no block is near zero yet, so that large first changes lose much.
        constant_fan_in: whether each row of blocks keeps its number of blocks: it grows as many as it loses, where its
            own gradients are largest, as SRigL does without ablation; then `keep_lines` does not apply. False by
            default. `bs.patterns.constant_fan_in` has equal rows.

    Raises:
        BlockSparseError: as for `SET`; recurrent weights; in `step`, a layer had no backward pass since the last call;
            in the optimizer's step, `step` was not called after an iteration that changes layouts.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Linear(64, 64, density=0.25, block_size=8)
        >>> optimizer = torch.optim.Adam(layer.parameters())
        >>> method = bs.sparsity.RigL(layer, optimizer, end=75, every=1)
        >>> layer(torch.randn(16, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> method.step(), layer.layout.nnz
        (True, 16)

    Source: Evci, Gale, Menick, Castro, Elsen, Rigging the lottery: making all tickets winners (2020); Lasby et al.,
    Dynamic sparse training with structured sparsity (2024), for `constant_fan_in`.
    """

    end: int

    def __init__(
        self,
        modules: Modules,
        optimizer: torch.optim.Optimizer,
        end: int,
        *,
        every: int = 100,
        alpha: float = 0.3,
        skip: Skip = (),
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
        self.end = integer("end", end, 1)
        self.alpha = number("alpha", alpha, 0, 1)
        check_norm(norm)
        self.norm = norm
        self._warn_if_never_due()
        self._watch_gradients()

    def fraction(self, t: int) -> float:
        """Return the fraction of the blocks to drop in iteration t, counted from 1."""
        return self._ramp_factor(t) * cosine_decay(self.alpha, 0, t, self.end)

    def _change_layouts(self) -> None:
        """Drop the smallest blocks of each weight, and grow as many where the recorded gradients are largest."""
        watches = self._recorded_gradients()
        for i, _, weight in self._trained_weights():
            self._drop_and_grow(weight, watches[i], self.fraction(self.calls), self._tie_break(i))
