"""Gradual magnitude pruning, of dense weights and of block-sparse ones: removes the smallest blocks step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ...checked import boolean, integer, number
from ...errors import BlockSparseError, warn_user
from ...layout import BlockLayout
from ...surgery.blocks import Blocks
from ...surgery.prunable import Skip
from ...surgery.rewire import OnLayoutChange, replace_blocks, rewire
from ...surgery.weight_handle import WeightHandle, handle_of
from ..lines import lines_of
from ..selection import (
    TieBreak,
    check_density,
    check_norm,
    dense_norms,
    mark_smallest,
    normalize_by_size,
    stored_norms,
)
from ..sparse_training.chts import check_places, topological_scores
from ..sparse_training.dense_gradient import mark_largest_of_rows
from ..sparse_training.dynamic_sparsity import Modules, cosine_decay
from ..sparse_training.gradient_growth import GradientGrowth
from ..sparse_training.growth import draw_places
from .dense_pruner import MaskedPruner
from .schedule import SCHEDULES, CubicSchedule

GROWTHS = ("gradient", "random", "topology")


class _MagnitudeSelection:
    """Selects the blocks with the largest norms at the density of a cubic schedule."""

    blocks: dict[str, Blocks]
    schedule: CubicSchedule
    calls: int
    seed: int
    keep_lines: bool
    norm: str
    scope: str

    def _configure(self, schedule: CubicSchedule, norm: str, scope: str, blocks: Mapping[str, Blocks]) -> None:
        """Check and set the options of the selection."""
        check_norm(norm)
        check_density(schedule.density, blocks, scope)
        self.schedule, self.norm, self.scope = schedule, norm, scope

    def _select(self, norms: Mapping[str, Tensor], weights: Mapping[str, Blocks | WeightHandle]) -> dict[str, Tensor]:
        """Return masks of the blocks to keep now, by weight; blocks that were removed before have norm -inf."""
        scores = {name: normalize_by_size(each, self.blocks[name], self.norm) for name, each in norms.items()}
        lines = {name: lines_of(weights[name]) for name in norms} if self.keep_lines else None
        return self.schedule.select(self.calls, scores, self.blocks, self.scope, self.seed, lines)


class GradualPruning(_MagnitudeSelection, MaskedPruner):
    """Gradual magnitude pruning of dense weights, in blocks. Call `step` after each `optimizer.step()`.

    The density falls from 1 to `density` by a cubic schedule (`CubicSchedule`): the blocks with the smallest norms
    become 0, and stay 0. With `begin=0, end=1`, one call after training prunes in one shot.

    Args:
        model, optimizer, block_size, skip: see `DensePruner`.
        density: fraction of all these weights to keep at the end, 0.1 by default.
        begin: first call of `step` that prunes, 0 by default.
        end: last call that prunes, which reaches `density`. (For `SET` and `RigL`, `end` is the first call that changes
            nothing.)
        every: calls from one pruning to the next, 100 by default.
        norm: norm of a block: "l2" (default), normalized by the block's size; "mean" (of |w|); or "max".
        scope: "global" (default): the blocks of all weights compete, and each weight keeps at least one. "layer": each
            weight gets the density.
        seed: seed of the choice among blocks with equal norms, 0 by default.
        keep_lines: whether each row and each column of blocks keeps a block, so that no neuron loses all of its
            connections. Applies to weights whose density suffices for that. True by default.

    Raises:
        BlockSparseError: as for `DensePruner`; a density that leaves a weight without a block; numbers out of range; an
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
        self._configure(CubicSchedule(density, begin, end, every), norm, scope, self.blocks)
        self.end, self.seed, self.keep_lines = end, integer("seed", seed, 0), boolean("keep_lines", keep_lines)

    def _prune(self) -> None:
        """Drop the blocks with the smallest norms, down to the schedule's density."""
        norms = {}
        for name in self._trained():
            all_norms = dense_norms(self.blocks[name], self.dense[name], self.norm)
            # -inf is below any norm: a removed block never replaces a block of zeros that is kept.
            norms[name] = all_norms.masked_fill(~self.keep[name].to(all_norms.device), -torch.inf)
        self.keep |= self._select(norms, self.blocks)


class GradualBlockPruning(_MagnitudeSelection, GradientGrowth):
    """Gradual magnitude pruning of block-sparse layers. Call `step` after each `optimizer.step()`.

    Selects blocks as `GradualPruning` does, in layers that start with all or some blocks stored. Removed blocks are no
    longer stored, so training gets cheaper with the density, and there is no `finish`. Works on tensor-parallel parts
    and FSDP2 shards. Under DistributedDataParallel, wrap the model again after a call that changed it.

    With `regrow`, each call that prunes also moves blocks, as GraNet, BLaST and CHTss do: each weight drops a fraction
    of the blocks that are left, the smallest first, and as many grow, with values 0. This fraction falls from `regrow`
    at `begin` to 0 at `end` by a cosine. A block that would be dropped and grown again stays.

    Args:
        modules, optimizer, skip, on_layout_change: see `SET`.
        density: fraction of all blocks of these weights to keep at the end, 0.1 by default.
        begin, end, every, norm, scope, seed, keep_lines: see `GradualPruning`.
        regrow: initial fraction of the blocks that move, 0 to 1; 0 by default. GraNet has 0.5.
        growth: where blocks grow. "gradient" (default): where the dense gradient is largest, as in `RigL`; then only
            linear layers and convolutions can grow blocks, and weights do not move in that iteration. "random": at
            random. "topology": at random by the scores of `CHTs`.
        schedule: "cubic" (default) or "sigmoid", which falls slowly at first, as in CHTss.
        initial_density: density at `begin`, 1 by default. For layers that start sparser give their density, 0.5 in
            GraNet and CHTss; otherwise nothing is dropped until the schedule has come down to it.
        constant_fan_in: whether all rows of blocks of a weight get equally many blocks, those of the largest norms in
            the row, so that all neurons have equal work; then `scope` and `keep_lines` do not apply. False by default.
            Layers start with all blocks or from `bs.patterns.constant_fan_in`.

    Raises:
        BlockSparseError: as for `DynamicSparsity` and `GradualPruning`; with `regrow`, as for `RigL`; `growth` without
            `regrow`; with `constant_fan_in`, a row that has fewer blocks than it is to keep.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Linear(64, 64, block_size=8)      # all blocks
        >>> method = bs.sparsity.GradualBlockPruning(layer, density=0.25, begin=0, end=4, every=2)
        >>> for _ in range(4):
        ...     pruned = method.step()
        >>> layer.layout.nnz, layer.layout.density
        (16, 0.25)

    Source: Zhu, Gupta (2017), as for `GradualPruning`; Liu et al., Sparse training via boosting pruning plasticity with
    neuroregeneration (2021), for `regrow`; Okanovic et al., BLaST: high performance inference and pretraining using
    block sparse transformers (2025); Zhang et al. (2025), as for `CHTs`.
    """

    def __init__(
        self,
        modules: Modules,
        optimizer: torch.optim.Optimizer | None = None,
        density: float = 0.1,
        *,
        begin: int = 0,
        end: int,
        every: int = 100,
        norm: str = "l2",
        scope: str = "global",
        skip: Skip = (),
        seed: int = 0,
        keep_lines: bool = True,
        regrow: float = 0.0,
        growth: str = "gradient",
        schedule: str = "cubic",
        initial_density: float = 1.0,
        constant_fan_in: bool = False,
        on_layout_change: OnLayoutChange | None = None,
    ):
        super().__init__(modules, optimizer, skip=skip, seed=seed, on_layout_change=on_layout_change)
        self.keep_lines = boolean("keep_lines", keep_lines)
        self.constant_fan_in = boolean("constant_fan_in", constant_fan_in)
        self.blocks = {}
        for name, module in self.modules.items():
            weight = handle_of(module)
            self.blocks[name] = Blocks((*weight.layout.shape, *weight.local.shape[3:]), weight.layout.block_shape)
        trained = {name: self.blocks[name] for _, name, _ in self._trained_weights()}
        if not isinstance(schedule, str) or schedule not in SCHEDULES:
            raise BlockSparseError.expected("schedule", f"one of {', '.join(SCHEDULES)}", repr(schedule))
        if not isinstance(growth, str) or growth not in GROWTHS:
            raise BlockSparseError.expected("growth", f"one of {', '.join(GROWTHS)}", repr(growth))
        if regrow and growth == "topology":
            for _, _, weight in self._trained_weights():
                check_places(weight.layout)
        self._configure(SCHEDULES[schedule](density, begin, end, every, initial_density), norm, scope, trained)
        self.regrow, self.growth = number("regrow", regrow, 0, 1), growth
        if growth != GROWTHS[0] and not regrow:
            raise BlockSparseError.expected("regrow", f"more than 0, so that growth={growth!r} has an effect", regrow)
        if self.constant_fan_in:
            self._check_rows(density)
        if not regrow:
            self._warn_if_sparser(density)
        elif growth == "gradient":
            self._watch_gradients()

    def _warn_if_sparser(self, density: float) -> None:
        """Warn if the weights store far fewer blocks than at this density, which a resumed run may have reached."""
        layouts = [weight.layout for _, _, weight in self._trained_weights()]
        present = sum(layout.nnz for layout in layouts) / sum(math.prod(layout.grid) for layout in layouts)
        if present < 0.9 * density:
            warn_user(
                f"GradualBlockPruning will drop no block: the layers have density {present:.3g}, which is below "
                f"{density:g}. Choose a lower density, or start from denser layers."
            )

    def _check_rows(self, density: float) -> None:
        """Raise a BlockSparseError if a row of blocks has fewer blocks than rows keep at this density."""
        for _, name, weight in self._trained_weights():
            layout = weight.layout
            count, fewest = blocks_per_row(density, layout), int(np.diff(layout.row_start).min())
            if fewest < count:
                of = f"layer {name!r}" if name else "the layer"
                expected = f"at least {count} block{'s' * (count > 1)} per row of {of} (constant_fan_in=True)"
                remedy = f"start with all blocks, or from bs.patterns.constant_fan_in({layout.shape}, ...)"
                raise BlockSparseError.expected("modules", expected, f"a row with {fewest}: {remedy}")

    def fraction(self, t: int) -> float:
        """Return the fraction of the blocks that move in call t, counted from 1."""
        begin, end = self.schedule.begin, self.schedule.end
        return cosine_decay(self.regrow, 0, t - begin, end - begin)

    def _due(self, call: int) -> bool:
        return self.schedule.due(call)

    def _moves(self, call: int) -> bool:
        """Return whether blocks move in this call."""
        return self.regrow > 0 and self._due(call) and self.schedule.begin < call < self.schedule.end

    def _grows(self, call: int) -> bool:
        """Return whether blocks grow by their gradients in this call."""
        return self.growth == "gradient" and self._moves(call)

    def _change_layouts(self) -> None:
        """Prune down to the schedule's density; then let some of the blocks that are left move."""
        watches = self._recorded_gradients() if self._grows(self.calls) else []
        self._prune()
        if not self._moves(self.calls):
            return
        for i, _, weight in self._trained_weights():
            fraction, tie_break = self.fraction(self.calls), self._tie_break(i)
            if watches:
                self._drop_and_grow(weight, watches[i], fraction, tie_break)
            else:
                self._drop_and_draw(weight, fraction, tie_break, self._generator(i))

    def _drop_and_draw(
        self, weight: WeightHandle, fraction: float, tie_break: TieBreak, generator: np.random.Generator
    ) -> None:
        """Drop this fraction of the blocks of one weight, the smallest, and grow as many without gradients."""
        count = int(fraction * weight.layout.nnz)
        drop = mark_smallest(stored_norms(weight, self.norm), count, tie_break)
        scores = topological_scores(weight, drop) if self.growth == "topology" else None
        change = draw_places(weight, drop, generator, self.keep_lines, self.constant_fan_in, scores)
        change = change.without_returning(weight.layout.keys_of_blocks())
        replace_blocks(weight, change, self.optimizer, on_layout_change=self.on_layout_change)

    def _prune(self) -> None:
        """Drop the stored blocks with the smallest norms, down to the schedule's density."""
        if self.constant_fan_in:
            self._prune_rows()
            return
        weights = {name: weight for _, name, weight in self._trained_weights()}
        norms = {}
        for name, weight in weights.items():
            norms_of_blocks = stored_norms(weight, self.norm)
            # -inf is below any norm: no absent block replaces a stored block of zeros.
            grid = np.full(weight.layout.grid, -np.inf, dtype=norms_of_blocks.dtype)
            grid[weight.layout.row_of_block, weight.layout.col_of_block] = norms_of_blocks
            norms[name] = torch.from_numpy(grid)
        for name, keep in self._select(norms, weights).items():
            layout = weights[name].layout
            drop = np.flatnonzero(~keep.numpy()[layout.row_of_block, layout.col_of_block])
            if drop.size:
                rewire(weights[name], drop, [], [], self.optimizer, on_layout_change=self.on_layout_change)

    def _prune_rows(self) -> None:
        """Drop the blocks with the smallest norms of each row of blocks that has more than the schedule's density."""
        for i, _, weight in self._trained_weights():
            layout = weight.layout
            count = blocks_per_row(self.schedule(self.calls), layout)
            keep = mark_largest_of_rows(
                layout.keys_of_blocks(),
                stored_norms(weight, self.norm),
                layout.grid[1],
                np.full(layout.grid[0], count),
                self._tie_break(i),
            )
            if not keep.all():
                rewire(weight, np.flatnonzero(~keep), [], [], self.optimizer, on_layout_change=self.on_layout_change)


def blocks_per_row(density: float, layout: BlockLayout) -> int:
    """Return the number of blocks that each row of blocks stores at a density, as in `bs.patterns.constant_fan_in`."""
    return max(1, round(density * layout.grid[1]))
