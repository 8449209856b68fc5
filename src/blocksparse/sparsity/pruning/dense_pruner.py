"""Base classes of the methods that find a block-sparse pattern while the weights are still dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MAX_NAMED, BlockSparseError, Page, warn_user
from ...layout import BlockLayout
from ...nn.module import BlockSparseModule
from ...surgery.blocks import mask_blocks_
from ...surgery.optimizer import check_optimizer
from ...surgery.prunable import ALONE, Prunable, Skip, Unexpected, survey
from ...surgery.replace import check_padding, replace_with_sparse
from ...surgery.sharding import is_fsdp_sharded, reshard
from ..training_method import TrainingMethod
from .schedule import CubicSchedule, Ramp


class DensePruner(TrainingMethod):
    """A method that selects blocks of dense weights during training, and stores only these at the end.

    Call `step` after each `optimizer.step()`, and `finish` once at the end. `finish` replaces the dense modules by
    block-sparse ones with the same outputs, except for blocks that a `density` cuts, and the optimizer's state follows.

    Args:
        model: a model with linear layers, convolutions or LSTMs of torch.nn.
        optimizer: the optimizer that trains them; None (default) if there is none or it keeps no state.
        block_size: an int, 32 by default, or (rows, columns) of the weights `[out, in]`. A block of one column and all
            rows is an input feature.
        skip: modules, names of modules or names of weights that stay dense; none by default. Frozen weights
            (`requires_grad` False) stay dense too, with a `SparsityWarning`; a weight that is frozen later keeps the
            blocks that it has then.

    Raises:
        BlockSparseError: no trained weight of the model can become block-sparse, or one is on the meta device; the
            optimizer lacks one of them; the model has no such name; under FSDP2, `fully_shard` was applied to a layer
            alone, or an LSTM's biases would need padding.
    """

    end: int | None = None
    """The last call of `step` that may prune, after which `finish` may be called; None for no such call."""
    takes_shards = False
    """Whether the method supports weights that FSDP2 has sharded."""
    remedy = "a higher density"
    """What errors recommend if a weight would keep no block."""
    stronger: str | None = None
    """What a warning recommends if all blocks stay; None for methods with a density as their target."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        block_size: int | tuple[int, int] = 32,
        skip: Skip = (),
    ):
        if isinstance(model, nn.Module):
            reshard(model)
        surveyed = survey(model, block_size, skip)
        for weight, reason in surveyed:
            if reason == ALONE:
                expected = "a layer in a module that fully_shard is applied to, or one in skip"
                raise BlockSparseError.expected(weight.name, expected, "fully_shard applied to the layer alone")
        weights = [weight for weight, reason in surveyed if reason is None]
        weights = without_frozen(weights, type(self).__name__)
        warn_of_unexpected({weight.name: reason for weight, reason in surveyed}, type(self).__name__)
        if not weights:
            expected = "one with dense weights that can become block-sparse, not all of them skipped"
            raise BlockSparseError.expected("model", expected, _describe_weights(model, surveyed), Page.PRUNE)
        self.model, self.optimizer = model, optimizer
        self.weights = {weight.name: weight for weight in weights}
        self.dense: dict[str, Tensor] = {}
        for weight in weights:
            if is_fsdp_sharded(weight.module, weight.parameter) and not self.takes_shards:
                raise BlockSparseError(
                    f"{type(self).__name__} cannot prune {weight.name}, which FSDP2 has sharded: use GradualPruning or "
                    "ThresholdPruning, or name it in skip"
                )
            check_optimizer(optimizer, weight.tensor, weight.name, replaced=True)
            self.dense[weight.name] = weight.tensor
        check_padding(weights)
        self.blocks = {weight.name: weight.blocks for weight in weights}
        self._layouts: dict[str, BlockLayout] | None = None
        self._watch_updates()

    @property
    def finished(self) -> bool:
        return self._layouts is not None

    def step(self) -> bool:
        changed = super().step()
        if self.calls == 1:  # the optimizer has a state now; without this check the error would come in `finish`
            self._check_optimizer()
        return changed

    def _check_optimizer(self) -> None:
        """Raise a BlockSparseError if the optimizer's state cannot follow the weights."""
        for name, dense in self.dense.items():
            check_optimizer(self.optimizer, dense, name, replaced=True)

    def layouts(self) -> dict[str, BlockLayout]:
        """Return the layout that each weight would get now, by name; after `finish`, the layouts that it set."""
        if self._layouts is not None:
            return dict(self._layouts)
        with torch.no_grad():
            return {name: BlockLayout(mask, self.blocks[name].block_shape) for name, mask in self._masks().items()}

    @property
    def density(self) -> float:
        """The fraction of the values of these weights that the layouts store."""
        layouts = self.layouts()
        stored = sum(layouts[name].nnz * blocks.size for name, blocks in self.blocks.items())
        return stored / sum(blocks.grid[0] * blocks.grid[1] * blocks.size for blocks in self.blocks.values())

    def finish(self, layouts: Mapping[str, BlockLayout] | None = None, *, early: bool = False) -> nn.Module:
        """Make the weights block-sparse with the selected blocks; this clears their gradients.

        Args:
            layouts: layouts to use instead of the selected ones. To resume from a checkpoint that was saved after
                `finish`, pass what `layouts()` returned there, before you load states.
            early: whether to finish before the end of the schedule, at the density reached so far; False by default.

        Returns:
            The model. It is a different object only if the model itself is a layer that became block-sparse.

        Raises:
            BlockSparseError: the schedule has steps left and `early` is False; `finish` was called before; a weight
                would keep no block; the optimizer's state cannot follow; layouts that do not fit the weights.

        >>> import torch, blocksparse as bs
        >>> method = bs.sparsity.GradualPruning(torch.nn.Linear(64, 64), density=0.25, block_size=8, end=4, every=1)
        >>> method.step(), method.step()
        (True, True)
        >>> method.finish(early=True).layout.density
        0.34375
        """
        self._check_unfinished("finish")
        if layouts is not None and set(layouts) != set(self.weights):
            raise BlockSparseError.expected("layouts", f"those of {', '.join(self.weights)}", ", ".join(layouts))
        if layouts is None:
            if not early:
                self._check_end()
            layouts = self.layouts()
            if self.stronger and all(layout.density == 1 for layout in layouts.values()):
                warn_user(f"{type(self).__name__} pruned no block: use {self.stronger}, or train longer")
        for name, layout in layouts.items():
            if layout.nnz == 0:
                raise BlockSparseError(f"{name} would keep no block: use {self.remedy}, or name the weight in skip")
        self._check_optimizer()
        reshard(self.model)
        self.settle()
        self.model = replace_with_sparse(self.model, layouts, self.optimizer)
        self._layouts = dict(layouts)
        # Otherwise a reference to the method would keep the dense weights in memory.
        self.dense.clear()
        self.weights.clear()
        return self.model

    def _masks(self) -> Mapping[str, Tensor]:
        """Return the blocks to store, bool `[out_blocks, in_blocks]` by weight."""
        raise NotImplementedError

    def settle(self) -> None:
        """Leave the model dense, with plain weights under their own names and with their last values.

        The model then saves and loads like any other. `finish(early=True)` may follow.
        """

    def _named_parameters(self) -> dict[str, Tensor]:
        return self.dense

    def _check_end(self) -> None:
        """Raise a BlockSparseError if the schedule has steps left."""
        if self.end is not None and self.calls < self.end:
            raise BlockSparseError(
                f"finish() called after {self.calls} of {self.end} steps (end={self.end}): call finish(early=True) to "
                f"store the blocks that are left now, or step() {self.end - self.calls} more times; next time, pass a "
                f"smaller end"
            )

    def _trained(self) -> list[str]:
        """Return the names of the weights that are not frozen now; frozen ones keep their blocks."""
        return [name for name, dense in self.dense.items() if dense.requires_grad]


def without_frozen(weights: list[Prunable], method: str) -> list[Prunable]:
    """Return the weights that are trained; a SparsityWarning lists the frozen ones.

    Raises:
        BlockSparseError: all are frozen.
    """
    frozen = [weight.name for weight in weights if not weight.tensor.requires_grad]
    if frozen and len(frozen) == len(weights):
        expected = "weights that are trained (sparsify prunes without training): requires_grad_(True) first"
        raise BlockSparseError.expected("model", expected, f"frozen ones: {', '.join(frozen)}")
    if frozen:
        warn_user(
            f"{method} leaves frozen weights dense: {', '.join(frozen)}. To prune them too, call requires_grad_(True) "
            "first. To silence this warning, name them in skip.",
        )
    return [weight for weight in weights if weight.tensor.requires_grad]


def _describe_weights(model: nn.Module, surveyed: list[tuple[Prunable, str | None]]) -> str:
    """Describe, for an error, a model without weights to prune."""
    reasons = [f"{weight.name}: {reason}" for weight, reason in surveyed][:MAX_NAMED]
    if any(isinstance(module, BlockSparseModule) for module in model.modules()):
        reasons.append("it is block-sparse already: GradualBlockPruning prunes such layers")
    return f"{type(model).__name__} ({'; '.join(reasons) or 'without weights'})"


def warn_of_unexpected(reasons: Mapping[str, str | None], method: str) -> None:
    """Warn of weights that stay dense for a reason that users may not expect."""
    unexpected = [f"{name}: {reason}" for name, reason in reasons.items() if isinstance(reason, Unexpected)]
    if unexpected:
        listed = "; ".join(unexpected[:MAX_NAMED]) + (
            f"; and {len(unexpected) - MAX_NAMED} more" * (len(unexpected) > MAX_NAMED)
        )
        warn_user(
            f"{method} leaves some weights dense (name them in skip to silence this warning): {listed}",
        )


class MaskedPruner(DensePruner):
    """A pruner that sets blocks to 0 after each `step`, whatever the optimizer did to them."""

    takes_shards = True
    schedule: CubicSchedule | Ramp

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any):
        super().__init__(model, optimizer, **options)
        self.keep = {
            name: torch.ones(blocks.grid, dtype=torch.bool, device=self.dense[name].device)
            for name, blocks in self.blocks.items()
        }

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() | {f"keep.{name}": keep.clone() for name, keep in self.keep.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.keep = {name: state[f"keep.{name}"].to(keep, copy=True) for name, keep in self.keep.items()}

    def _step(self) -> bool:
        """Prune if the schedule is due, set dropped blocks to 0, and return whether it was due."""
        reshard(self.model)
        due = self.schedule.due(self.calls)
        if due:
            self._prune()
        for name, keep in self.keep.items():
            mask_blocks_(self.blocks[name], self.dense[name], keep)
        return due

    def _prune(self) -> None:
        """Update `keep`."""
        raise NotImplementedError

    def _masks(self) -> Mapping[str, Tensor]:
        return self.keep
