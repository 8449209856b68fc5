"""Base classes of the methods that find a block-sparse pattern while the weights are still dense."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MAX_NAMED, BlockSparseError, Page, SparsityWarning
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
    """Finds the blocks to keep while a dense model is trained, and then stores only these.

    `step` is called after each `optimizer.step()`, and `finish` once, at the end: it puts block-sparse modules in the
    place of the dense ones, whose outputs are the same but for blocks that a
    `density` cuts, and takes the optimizer's state along.

    Args:
        model: with dense weights of torch.nn's linear layers, convolutions and LSTMs.
        optimizer: the one that trains them; None without one, or if it keeps no state.
        block_size: an int or (rows, columns) of the weights `[out, in]`. Of one column and all rows a block is an
            input feature.
        skip: what stays dense: modules, or their names in the model, or names of weights. Frozen weights
            (`requires_grad` False) stay dense too, with a `SparsityWarning`; one that is frozen later keeps the blocks
            that it has then.

    Raises:
        BlockSparseError: a model without weights that can become block-sparse and are trained, or with one on the meta
            device; an
            optimizer without one of them; a name that the model does not have; under FSDP2, a layer that fully_shard
            was applied to alone, an LSTM whose biases blocks would pad.
    """

    end: int | None = None
    """The call of `step` from which on `finish` may be called; None for any."""
    takes_shards = False
    """Whether it works on weights that FSDP2 has sharded."""
    remedy = "a higher density"
    """What is to be changed where a weight was left without a block."""

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
        known = survey(model, block_size, skip)
        for weight, reason in known:
            if reason == ALONE:
                expected = "a layer in a module that fully_shard is applied to, or one in skip"
                raise BlockSparseError.expected(weight.name, expected, "fully_shard applied to the layer alone")
        found = [weight for weight, reason in known if reason is None]
        found = without_frozen(found, type(self).__name__)
        warn_of_unexpected({weight.name: reason for weight, reason in known}, type(self).__name__)
        if not found:
            expected = "one with dense weights that can become block-sparse, not all of them skipped"
            raise BlockSparseError.expected("model", expected, _why_nothing(model, known), Page.PRUNE)
        self.model, self.optimizer = model, optimizer
        self.weights = {weight.name: weight for weight in found}
        self.dense: dict[str, Tensor] = {}
        for weight in found:
            if is_fsdp_sharded(weight.module, weight.parameter) and not self.takes_shards:
                expected = "a weight that this process has whole; GradualPruning and ThresholdPruning take sharded ones"
                raise BlockSparseError.expected(weight.name, expected, "one that FSDP2 has sharded")
            check_optimizer(optimizer, weight.tensor, weight.name, replaced=True)
            self.dense[weight.name] = weight.tensor
        check_padding(found)
        self.blocks = {weight.name: weight.blocks for weight in found}
        self._layouts: dict[str, BlockLayout] | None = None
        self._watch_updates()

    @property
    def finished(self) -> bool:
        return self._layouts is not None

    def step(self) -> bool:
        changed = super().step()
        if self.calls == 1:  # the optimizer has a state now: better refused here than by `finish`
            self._check_optimizer()
        return changed

    def _check_optimizer(self) -> None:
        for name, dense in self.dense.items():
            check_optimizer(self.optimizer, dense, name, replaced=True)

    def layouts(self) -> dict[str, BlockLayout]:
        """The layout that each weight would get now, by its name; after `finish` the one that it has got."""
        if self._layouts is not None:
            return dict(self._layouts)
        with torch.no_grad():
            return {name: BlockLayout(keep, self.blocks[name].block_shape) for name, keep in self._kept().items()}

    @property
    def density(self) -> float:
        """The part of the numbers in all these weights that the layouts store."""
        layouts = self.layouts()
        stored = sum(layouts[name].nnz * blocks.size for name, blocks in self.blocks.items())
        return stored / sum(blocks.grid[0] * blocks.grid[1] * blocks.size for blocks in self.blocks.values())

    def finish(self, layouts: Mapping[str, BlockLayout] | None = None, *, early: bool = False) -> nn.Module:
        """Makes the weights block-sparse, with exactly the blocks that are kept; gradients of them are cleared.

        Args:
            layouts: instead of its own, those that `layouts()` gave after the `finish` of a run that is to go on from a
                checkpoint behind it. May be called at once then, before states are loaded.
            early: whether to finish before the end of the schedule too, at the density that it has reached.

        Returns:
            The model; another object only where the model itself is a layer that became block-sparse.

        Raises:
            BlockSparseError: before the last step of a schedule without `early`, a second time, a weight without any
                block that is kept, an optimizer whose state cannot follow, layouts that do not fit the weights.

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
        for name, layout in layouts.items():
            if layout.nnz == 0:
                expected = f"a block that is kept (by {self.remedy}; or leave the weight out by skip)"
                raise BlockSparseError.expected(name, expected, repr(layout))
        self._check_optimizer()
        reshard(self.model)
        self.settle()
        self.model = replace_with_sparse(self.model, layouts, self.optimizer)
        self._layouts = dict(layouts)
        # So that keeping the method does not keep the dense weights in memory.
        self.dense.clear()
        self.weights.clear()
        return self.model

    def _kept(self) -> Mapping[str, Tensor]:
        raise NotImplementedError

    def settle(self) -> None:
        """Leaves the model dense, with plain weights that have their last values, under their own names.

        So it saves and loads like any model; `finish(early=True)` may follow.
        """

    def _named_parameters(self) -> dict[str, Tensor]:
        return self.dense

    def _check_end(self) -> None:
        if self.end is not None and self.calls < self.end:
            raise BlockSparseError(
                f"finish() called after {self.calls} of {self.end} steps (end={self.end}): call finish(early=True) to "
                f"store the blocks that are left now, or step() {self.end - self.calls} more times; next time, pass a "
                f"smaller end"
            )

    def _trained(self) -> list[str]:
        """The names of the weights that are not frozen now; the others keep the blocks that they have."""
        return [name for name, dense in self.dense.items() if dense.requires_grad]


def without_frozen(weights: list[Prunable], method: str) -> list[Prunable]:
    """The weights that are trained; a SparsityWarning lists the others.

    Raises:
        BlockSparseError: none is.
    """
    frozen = [weight.name for weight in weights if not weight.tensor.requires_grad]
    if frozen and len(frozen) == len(weights):
        expected = "weights that are trained (sparsify prunes without training): requires_grad_(True) first"
        raise BlockSparseError.expected("model", expected, f"frozen ones: {', '.join(frozen)}")
    if frozen:
        warnings.warn(
            f"{method} leaves {', '.join(frozen)} dense, which are frozen: set requires_grad_(True) before to prune "
            "them too, or name them in skip",
            SparsityWarning,
            stacklevel=4,
        )
    return [weight for weight in weights if weight.tensor.requires_grad]


def _why_nothing(model: nn.Module, known: list[tuple[Prunable, str | None]]) -> str:
    """What a model has instead of weights that can become block-sparse."""
    reasons = [f"{weight.name}: {reason}" for weight, reason in known][:MAX_NAMED]
    if any(isinstance(module, BlockSparseModule) for module in model.modules()):
        reasons.append("it is block-sparse already: GradualBlockPruning prunes such layers")
    return f"{type(model).__name__} ({'; '.join(reasons) or 'without weights'})"


def warn_of_unexpected(reasons: Mapping[str, str | None], method: str) -> None:
    """Warns of weights that stay dense for a reason that their owner may not know of."""
    unexpected = [f"{name}: {reason}" for name, reason in reasons.items() if isinstance(reason, Unexpected)]
    if unexpected:
        listed = "; ".join(unexpected[:MAX_NAMED]) + (
            f"; and {len(unexpected) - MAX_NAMED} more" * (len(unexpected) > MAX_NAMED)
        )
        warnings.warn(
            f"{method} leaves some weights dense (name them in skip if that is right): {listed}",
            SparsityWarning,
            stacklevel=4,
        )


class Masked(DensePruner):
    """Sets blocks to 0: after each `step` they are 0, whatever the optimizer did."""

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
        reshard(self.model)
        due = self.schedule.due(self.calls)
        if due:
            self._change()
        for name, keep in self.keep.items():
            mask_blocks_(self.blocks[name], self.dense[name], keep)
        return due

    def _change(self) -> None:
        raise NotImplementedError

    def _kept(self) -> Mapping[str, Tensor]:
        return self.keep
