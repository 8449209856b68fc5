"""The base class of methods that grow blocks where the dense gradient is largest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...indices import Replacement
from ...nn.conv import Convolution
from ...nn.linear import Linear
from ...nn.module import Weight
from ...nn.optimizer_watch import after_gradients
from ...nn.tensor_parallel_part import TensorParallelPart
from ...surgery.optimizer import unwrapped
from ...surgery.rewire import replace_blocks
from ...surgery.weight_handle import WeightHandle
from ..lines import NO_LINES, coverable, empty_lines, lines_of
from ..selection import mark_smallest, stored_norms
from ..updates import was_skipped
from .dense_gradient import (
    TILE,
    GradientWatch,
    gradient_norms,
    largest_norms,
    largest_norms_of_rows,
    mark_largest_of_rows,
)
from .dynamic_sparsity import DynamicSparsity
from .growth import best_places


class GradientGrowth(DynamicSparsity):
    """A method that records the layers' inputs and output gradients in the iterations in which it grows blocks.

    A subclass sets `norm` and `keep_lines`, then calls `_watch_gradients`. A hook clears the gradients in the
    optimizer's step in these iterations, so that weights do not move.
    """

    modules: dict[str, Linear | Convolution]  # type: ignore[assignment]
    norm: str
    constant_fan_in = False
    _watches: Sequence[GradientWatch] = ()
    _has_cleared = False  # whether the hook has cleared gradients since the last call
    _optimizer_hook: Any = None

    def _watch_gradients(self) -> None:
        """Start to watch the layers, after a check of their types."""
        for name, module in self.modules.items():
            if not isinstance(module, Linear | Convolution):
                expected = "a linear layer or a convolution for growth by gradient"
                got = "a recurrent layer's weight" if isinstance(module, Weight) else type(module).__name__
                remedy = ': name it in skip, or grow otherwise: by SET, SMET, CHTs or growth="random"'
                raise BlockSparseError.expected(name or "modules", expected, got + remedy)
        self._hook_optimizer()
        self._prepare()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_watches": [], "_optimizer_hook": None}

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
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        if self.optimizer is not None:
            # A weak reference: the optimizer must not keep the method alive.
            hook = partial(_before_step, ref(self))
            self._optimizer_hook = unwrapped(self.optimizer).register_step_pre_hook(hook)

    def _hold_weights(self) -> None:
        """Clear all gradients in an iteration in which blocks grow."""
        # If `step` is called before the optimizer's step, the watches are those of the next iteration.
        if self.optimizer is None or not any(watch.passes for watch in self._watches):
            return
        unwrapped(self.optimizer).zero_grad(set_to_none=True)
        self._has_cleared = True

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self._prepare()

    def _step(self) -> bool:
        """Change the layouts if this call is due, and return whether it was; clear the gradients if blocks grew.

        Then watch the layers if blocks grow in the next call.
        """
        try:
            changed = super()._step()
            if changed and self._grows(self.calls) and self.optimizer is not None:
                unwrapped(self.optimizer).zero_grad(set_to_none=True)  # in case `step` is called before the optimizer's
        finally:
            self._prepare()
        return changed

    def _prepare(self) -> None:
        """Watch the layers if blocks grow in the next iteration, and only then."""
        for watch in self._watches:
            watch.close()
        self._watches = [GradientWatch(layer) for layer in self.modules.values()] if self._grows(self.calls + 1) else []
        self._has_cleared = False

    def _grows(self, call: int) -> bool:
        """Return whether blocks grow in this call."""
        return self._due(call)

    def _recorded_gradients(self) -> Sequence[GradientWatch]:
        """Return what was recorded for each module.

        Raises:
            BlockSparseError: a trained layer had no backward pass since the last call.
        """
        for i, name, _ in self._trained_weights():
            if not self._watches[i].passes:
                layer = f"layer {name!r}" if name else "the layer"
                raise BlockSparseError(
                    f"{type(self).__name__}.step(): no gradient went through {layer} since the last call: call "
                    "loss.backward() before, or name layers in skip that the loss does not use. After loading, run a "
                    "whole iteration first. Under torch.compile, set torch._dynamo.config.skip_nnmodule_hook_guards to "
                    "False."
                )
            self._watches[i].drop_overflows()
        return self._watches

    def _drop_and_grow(
        self, weight: WeightHandle, watch: GradientWatch, fraction: float, tie_break: partial[np.ndarray]
    ) -> None:
        """Drop this fraction of the blocks of one weight, the smallest, and grow those with the largest gradients."""
        layout, part_layout = weight.layout, watch.layer.layout
        count = int(fraction * layout.nnz)
        keys, columns = layout.keys_of_blocks(), layout.grid[1]
        drop = mark_smallest(stored_norms(weight, self.norm), count, tie_break)
        # Under tensor parallelism the recorded gradient is that of this process's part of the weight.
        part = watch.layer.part or TensorParallelPart(layout.grid, 0, np.arange(layout.grid[0]), None)
        stays = ~drop[weight.part_positions]
        kernel, replicas = tuple(weight.local.shape[3:]), weight.replicas or watch.replicas
        # Under FSDP2 a tile must not need more memory than this process's share of the values.
        tile = TILE if weight.is_whole else min(TILE, weight.max_local_size)
        tiles = gradient_norms(watch.passes, part_layout, kernel, self.norm, tile, replicas=replicas)
        taken, part_columns = part_layout.keys_of_blocks()[stays], part_layout.grid[1]

        def tie_break_of_part(keys: np.ndarray) -> np.ndarray:
            return tie_break(part.global_keys(keys, part_columns))

        if self.constant_fan_in:
            counts = np.bincount(layout.row_of_block[drop], minlength=layout.grid[0])
            own = counts[part.lines] if part.axis == 0 else counts
            found = largest_norms_of_rows(tiles, taken, part_columns, own, tie_break_of_part)
        else:
            lines = coverable(lines_of(weight), layout.nnz) if self.keep_lines else NO_LINES
            empty = empty_lines(lines, keys[~drop], columns)
            found = largest_norms(tiles, taken, part_columns, count, tie_break_of_part, part.local_lines(empty))
        places, norms = weight.gather_places(*found)
        if not np.isfinite(norms).all():  # an overflow, after which GradScaler skips the update too
            return
        if self.constant_fan_in:
            grow = places[mark_largest_of_rows(places, norms, columns, counts, tie_break)]
        else:
            grow = best_places(places, norms, count, columns, empty, tie_break)
        change = Replacement(drop, np.sort(grow)).without_returning(keys)
        replace_blocks(weight, change, self.optimizer, on_layout_change=self.on_layout_change)


def _before_step(method: ref[GradientGrowth], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Hook of the optimizer: clear gradients in an iteration in which blocks grow, also those of the step's closure."""
    growth = method()
    if growth is None or unwrapped(growth.optimizer) is not optimizer or was_skipped(optimizer):
        return None
    if growth._has_cleared:
        name = type(growth).__name__
        raise BlockSparseError(
            f"optimizer.step() called again before {name}'s step(): call both once per iteration, and delete a {name} "
            "that you no longer call"
        )
    return after_gradients(args, kwargs, growth._hold_weights)
