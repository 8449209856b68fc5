"""SMET: random growth with a clock per block, and a fraction that falls by a cosine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from ...checked import integer, number
from ...surgery.optimizer import has_block_clock, is_optimizer, unwrapped
from ...surgery.prunable import Skip
from ...surgery.rewire import OnLayoutChange
from ...surgery.weight_handle import WeightHandle, handle_of
from ..selection import TieBreak, mark_smallest, stored_norms
from .block_clock import MAX_AGE, BlockClock
from .dynamic_sparsity import Modules, cosine_decay, find_modules
from .set import SET


class SMET(SET):
    """Sparse memory-efficient training (SMET): random growth of zeros, each new block with a clock of its own.

    In each `every`-th call of `step` before `end`, it drops a fraction of the blocks of each weight, those with the
    smallest norms, and grows the same number at random places with values 0. The fraction falls by a cosine from
    `alpha` to `final_alpha` at `end`. The optimizer gets a `BlockClock`, unless it has one or `warmup` is None.

    In the paper, the learning rate of sparse weights is divided by the density: see `rates_by_density`.

    Args:
        modules, skip, norm, seed, ramp, keep_lines, constant_fan_in, on_layout_change: see `SET`.
        optimizer: the optimizer that trains them, of a kind that `BlockClock` supports; None for none and no clock.
        end: first call that changes nothing; in the paper, the number of training steps.
        every: iterations from one change to the next, 100 by default.
        alpha: initial fraction to drop, 0 to 1; 0.2 by default.
        final_alpha: fraction at the end, 0 to `alpha`; 0.005 by default.
        warmup: steps over which the learning rate of a new block rises, 100 by default; 0 for bias correction only;
            None for no clock.

    Raises:
        BlockSparseError: as for `SET` and `BlockClock`.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Sequential(bs.nn.Linear(64, 96, density=0.2, block_size=8), bs.nn.Linear(96, 10))
        >>> optimizer = torch.optim.AdamW(bs.sparsity.rates_by_density(model, lr=1e-3))
        >>> method = bs.sparsity.SMET(model, optimizer, end=1000, skip="1")
        >>> method.fraction(0), round(method.fraction(500), 4), method.fraction(1000)
        (0.2, 0.1025, 0.005)

    Source: Xiao et al., Memory-efficient LLM training with dynamic sparsity: from stability to practical scaling
    (2026).
    """

    end: int

    def __init__(
        self,
        modules: Modules,
        optimizer: torch.optim.Optimizer | None,
        end: int,
        *,
        every: int = 100,
        alpha: float = 0.2,
        final_alpha: float = 0.005,
        warmup: int | None = 100,
        skip: Skip = (),
        norm: str = "l2",
        seed: int = 0,
        ramp: int = 1,
        keep_lines: bool = True,
        constant_fan_in: bool = False,
        on_layout_change: OnLayoutChange | None = None,
    ):
        self.alpha = number("alpha", alpha, 0, 1)
        self.final_alpha = number("final_alpha", final_alpha, 0, self.alpha)
        self.warmup = None if warmup is None else integer("warmup", warmup, 0, below=MAX_AGE + 1)
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
        self._add_clock()

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        super().use_optimizer(optimizer)
        self._add_clock()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._add_clock()  # copies of optimizers have no hooks

    def fraction(self, t: int) -> float:
        """Return the fraction of the blocks to drop in call t, counted from 1."""
        return self._ramp_factor(t) * cosine_decay(self.alpha, self.final_alpha, t, self.end)

    def _select_drops(self, weight: WeightHandle, tie_break: TieBreak) -> np.ndarray:
        count = round(self.fraction(self.calls) * weight.layout.nnz)
        return mark_smallest(stored_norms(weight, self.norm), count, tie_break)

    def _add_clock(self) -> None:
        """Give the optimizer a clock, unless it has one."""
        optimizer = self.optimizer
        if self.warmup is not None and is_optimizer(optimizer) and not has_block_clock(unwrapped(optimizer)):
            self.optimizer = BlockClock(optimizer, self.warmup)


def rates_by_density(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return parameter groups in which the learning rate of block-sparse weights is divided by their density.

    Pass them to an optimizer. Other parameters have the rate `lr`. A method that keeps the number of blocks keeps the
    densities too.

    Args:
        model: a model with block-sparse weights.
        lr: the learning rate of dense training.

    Raises:
        BlockSparseError: a model without block-sparse weights; a learning rate below 0.

    >>> import blocksparse as bs
    >>> model = bs.nn.Linear(64, 64, layout=bs.patterns.block_diagonal((64, 64), 16))
    >>> [(len(group["params"]), group["lr"]) for group in bs.sparsity.rates_by_density(model, lr=0.001)]
    [(1, 0.001), (1, 0.004)]

    Source: Xiao et al. (2026), as for `SMET`.
    """
    lr = number("lr", lr, 0)
    densities = {}
    for module in find_modules(model, argument="model").values():
        handle = handle_of(module)
        if handle.layout.nnz:
            densities[handle.parameter] = handle.layout.density
    groups: dict[float, list[Any]] = {1.0: []}
    for parameter in model.parameters():
        groups.setdefault(densities.get(parameter, 1.0), []).append(parameter)
    return [{"params": parameters, "lr": lr / density} for density, parameters in groups.items() if parameters]
