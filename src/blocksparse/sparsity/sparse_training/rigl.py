"""RigL: drops the smallest weights and grows where the dense gradient is largest."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from ...checked import integer, number
from ...errors import BlockSparseError
from ...nn.conv import Convolution
from ...nn.linear import Linear
from ...nn.tensor_parallel_part import TensorParallelPart
from ...surgery.optimizer import unwrapped
from ...surgery.prunable import Skip
from ...surgery.rewire import OnLayoutChange, rewire
from ...surgery.weight_handle import WeightHandle
from ..lines import NO_LINES, coverable, empty_lines, lines_of
from ..selection import check_norm, mark_smallest, stored_norms
from ..updates import was_skipped
from .dense_gradient import TILE, GradientWatch, gradient_norms, largest_norms
from .dynamic_sparsity import DynamicSparsity, Modules
from .growth import best_places


class RigL(DynamicSparsity):
    """RigL: drops the blocks with the smallest norms and grows those with the largest gradients.

    In each `every`-th call of `step` before `end`, the fraction alpha / 2 (1 + cos(pi t / end)) of the blocks is
    dropped. The same number grows where the dense gradient has the largest norm. New values start at 0, and the
    optimizer's state starts as in `rewire`. A block that would be dropped and grown again stays. Weights do not move in
    that iteration: a hook clears the gradients before the optimizer's step.

    Only norms per block of the dense gradient are stored. They are computed a few rows of blocks at a time from the
    layers' inputs and output gradients, which hooks record in that iteration only. Several passes add up, as do all
    processes of DistributedDataParallel and FSDP2, by one all-reduce per group of rows.

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

    Source: Evci, Gale, Menick, Castro, Elsen, Rigging the lottery: making all tickets winners (2020).
    """

    modules: dict[str, Linear | Convolution]  # type: ignore[assignment]
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
        keep_lines: bool = True,
        on_layout_change: OnLayoutChange | None = None,
    ):
        super().__init__(modules, optimizer, skip=skip, every=every, seed=seed, on_layout_change=on_layout_change)
        self.keep_lines = keep_lines
        for name, module in self.modules.items():
            if not isinstance(module, Linear | Convolution):
                expected = "a linear layer or a convolution (or it in skip)"
                raise BlockSparseError.expected(name or "modules", expected, type(module))
        self.end = integer("end", end, 1)
        self.alpha = number("alpha", alpha, 0, 1)
        check_norm(norm)
        self.norm = norm
        self._watches: list[GradientWatch] = []
        self._held = False  # whether the hook has cleared gradients since the last call
        self._hook_optimizer()
        self._prepare()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_watches": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hook_optimizer()
        self._prepare()

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        before = self.optimizer
        super().use_optimizer(optimizer)
        if self.optimizer is not before:
            self._hook_optimizer()

    def _hook_optimizer(self) -> None:
        """Call `_before_update` before each step of the optimizer."""
        if self.optimizer is not None:
            # A weak reference: the optimizer must not keep the method alive.
            unwrapped(self.optimizer).register_step_pre_hook(partial(_before_update, ref(self)))

    def fraction(self, t: int) -> float:
        """Return the fraction of the blocks to drop in iteration t, counted from 1."""
        return self.alpha / 2 * (1 + math.cos(math.pi * t / self.end))

    def hold_weights(self) -> None:
        """Clear all gradients in an iteration that changes layouts; the optimizer calls this before its step.

        If the optimizer computes gradients within its step, call it again after that.
        """
        # If `step` is called before the optimizer's step, the watches are those of the next iteration.
        if self.optimizer is None or not any(watch.passes for watch in self._watches):
            return
        unwrapped(self.optimizer).zero_grad(set_to_none=True)
        self._held = True

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self._prepare()

    def _step(self) -> bool:
        """Change the layouts if this call is due, then clear the gradients; return whether layouts changed.

        Then watch the layers if the next call is due.
        """
        changed = super()._step()
        if changed and self.optimizer is not None:
            unwrapped(self.optimizer).zero_grad(set_to_none=True)  # in case `step` is called before the optimizer's
        self._prepare()
        return changed

    def _prepare(self) -> None:
        """Watch the layers if the next iteration changes layouts, and only then."""
        for watch in self._watches:
            watch.close()
        self._watches = [GradientWatch(layer) for layer in self.modules.values()] if self._due(self.calls + 1) else []
        self._held = False

    def _change_layouts(self) -> None:
        """Drop the smallest blocks of each weight, and grow as many where the recorded gradients are largest."""
        weights = list(self._trained_weights())
        for i, name, _ in weights:
            if not self._watches[i].passes:
                expected = "a backward pass through it before (torch.compile hides it unless "
                expected += "torch._dynamo.config.skip_nnmodule_hook_guards is False)"
                raise BlockSparseError.expected(f"step of {name or 'RigL'}", expected, "none")
        for i, _, weight in weights:
            self._watches[i].drop_overflows()
            self._drop_and_grow(weight, self._watches[i], self._tie_break(i))

    def _drop_and_grow(self, weight: WeightHandle, watch: GradientWatch, tie_break: partial[np.ndarray]) -> None:
        """Drop the smallest blocks of one weight, and grow those with the largest gradients."""
        layout, part_layout = weight.layout, watch.layer.layout
        count = int(self.fraction(self.calls) * layout.nnz)
        keys, columns = layout.keys_of_blocks(), layout.grid[1]
        drop = mark_smallest(stored_norms(weight, self.norm), count, tie_break)
        lines = coverable(lines_of(weight), layout.nnz) if self.keep_lines else NO_LINES
        empty = empty_lines(lines, keys[~drop], columns)
        # Under tensor parallelism the recorded gradient is that of this process's part of the weight.
        part = watch.layer.part or TensorParallelPart(layout.grid, 0, np.arange(layout.grid[0]), None)
        stays = ~drop[weight.part_positions]
        kernel, replicas = tuple(weight.local.shape[3:]), weight.replicas or watch.replicas
        # Under FSDP2 a tile must not need more memory than this process's share of the values.
        tile = TILE if weight.is_whole else min(TILE, weight.max_local_size)
        places, norms = largest_norms(
            gradient_norms(watch.passes, part_layout, kernel, self.norm, tile, replicas=replicas),
            part_layout.keys_of_blocks()[stays],
            part_layout.grid[1],
            count,
            lambda keys: tie_break(part.global_keys(keys, part_layout.grid[1])),
            part.local_lines(empty),
        )
        places, norms = weight.gather_places(places, norms)
        if not np.isfinite(norms).all():  # an overflow, after which GradScaler skips the update too
            return
        grow = best_places(places, norms, count, columns, empty, tie_break)
        drop &= ~np.isin(keys, grow)
        rows, cols = np.divmod(np.setdiff1d(grow, keys, assume_unique=True), columns)
        rewire(weight, np.flatnonzero(drop), rows, cols, self.optimizer, on_layout_change=self.on_layout_change)


def _before_update(method: ref[RigL], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Hook of the optimizer: clear gradients in an iteration that changes layouts."""
    rigl = method()
    if rigl is None or unwrapped(rigl.optimizer) is not optimizer or was_skipped(optimizer):
        return
    if rigl._held:
        raise BlockSparseError("optimizer.step() called again before RigL's step(): call both once per iteration")
    rigl.hold_weights()
