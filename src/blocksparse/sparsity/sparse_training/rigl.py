"""RigL: drop the smallest weights, grow where the dense gradient is largest."""

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
from .dense_gradient import TILE, Watch, gradient_norms, largest
from .dynamic_sparsity import DynamicSparsity, Modules
from .growth import grown


class RigL(DynamicSparsity):
    """RigL: drops the smallest weights and grows those whose gradient is the largest.

    In each `every`-th call of `step`, until `end`, the fraction alpha / 2 (1 + cos(pi t / end)) of the blocks, those of
    the smallest magnitude, goes; as many grow where the gradient of the dense weight has the largest norm, with zeros
    for values and for what the optimizer keeps. A block that would go and grow at once stays as it is. No weight moves
    in that iteration: a hook of the optimizer clears all gradients of its parameters before its step.

    The dense gradient exists as norms per block only, computed a few rows of blocks at a time from the layers' inputs
    and the gradients of their outputs, which hooks keep in that one iteration; those of several passes add up, and
    under DistributedDataParallel and FSDP2 those of all processes: each of these rows goes once around them.

    Args:
        modules: a model, or some modules, of linear layers and convolutions, transposed ones too; recurrent weights are
            to be skipped, or evolved by `SET`.
        optimizer, skip, on_layout_change: as for `SET`.
        end: iterations after which the layouts stay; in the paper 3/4 of the training.
        every: iterations from one change to the next.
        alpha: the fraction at the beginning, 0 to 1.
        norm: of a block, for weights and gradients: "l2", "mean" or "max".
        seed: of which go and grow of equal ones: where no gradient arrives, say, blocks grow at random places.
        keep_lines: whether blocks grow first in rows and columns of blocks that have none, where the gradient is the
            largest there, if the density suffices for one in each. No gradient would fill them again: a neuron without
            inputs is constant.

    Raises:
        BlockSparseError: as `SET`; recurrent weights; in `step`, a layer whose gradient was not computed since the last
            call; in the optimizer's, no `step` since one that changed nothing.

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
        self._watches: list[Watch] = []
        self._held = False  # whether the optimizer was kept from moving weights since the last call
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
        if self.optimizer is not None:
            # Weakly, so that an optimizer outlives a method that is given up.
            unwrapped(self.optimizer).register_step_pre_hook(partial(_before_update, ref(self)))

    def fraction(self, t: int) -> float:
        """The part of the blocks that goes in iteration t, counted from 1."""
        return self.alpha / 2 * (1 + math.cos(math.pi * t / self.end))

    def hold_weights(self) -> None:
        """Clears all gradients in an iteration that changes the layouts; the optimizer calls this before its step.

        Where the optimizer computes gradients within its step, this is to be called again after that.
        """
        # Where `step` is called before the optimizer's, the layers are watched already, but for the next iteration.
        if self.optimizer is None or not any(watch.seen for watch in self._watches):
            return
        unwrapped(self.optimizer).zero_grad(set_to_none=True)
        self._held = True

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self._prepare()

    def _step(self) -> bool:
        changed = super()._step()
        if changed and self.optimizer is not None:
            unwrapped(self.optimizer).zero_grad(set_to_none=True)  # where `step` is called before the optimizer's
        self._prepare()
        return changed

    def _prepare(self) -> None:
        """Watches the layers in the iteration that will be one of the topology, and in no other."""
        for watch in self._watches:
            watch.close()
        self._watches = [Watch(layer) for layer in self.modules.values()] if self._due(self.calls + 1) else []
        self._held = False

    def _change(self) -> None:
        trained = [(name, stored, self._watches[i], self._order(i)) for i, name, stored in self._trained()]
        for name, _, watch, _ in trained:
            if not watch.seen:
                expected = "a backward pass through it before (torch.compile hides it unless "
                expected += "torch._dynamo.config.skip_nnmodule_hook_guards is False)"
                raise BlockSparseError.expected(f"step of {name or 'RigL'}", expected, "none")
        for _, stored, watch, order in trained:
            watch.drop_overflows()
            self._rig(stored, watch, order)

    def _rig(self, stored: WeightHandle, watch: Watch, order: partial[np.ndarray]) -> None:
        layout, mine = stored.layout, watch.layer.layout
        count = int(self.fraction(self.calls) * layout.nnz)
        keys, columns = layout.keys_of_blocks(), layout.grid[1]
        drop = mark_smallest(stored_norms(stored, self.norm), count, order)
        lines = coverable(lines_of(stored), layout.nnz) if self.keep_lines else NO_LINES
        empty = empty_lines(lines, keys[~drop], columns)
        # The gradient that is here is that of this process's part, where tensor parallelism cuts the weight.
        stays = ~drop[stored.part_positions]
        kernel, replicas = tuple(stored.local.shape[3:]), stored.replicas or watch.replicas
        # Under FSDP2 no more at a time than a process has of the values.
        tile = TILE if stored.is_whole else min(TILE, stored.max_local_size)
        norms = gradient_norms(watch.seen, mine, kernel, self.norm, tile, replicas=replicas)
        part = watch.layer.part or TensorParallelPart(layout.grid, 0, np.arange(layout.grid[0]), None)
        best = largest(
            norms,
            mine.keys_of_blocks()[stays],
            mine.grid[1],
            count,
            lambda keys: order(part.global_keys(keys, mine.grid[1])),
            part.local_lines(empty),
        )
        places, size = stored.gather_places(*best)
        if not np.isfinite(size).all():  # an overflow, which GradScaler skips too
            return
        new = grown(places, size, count, columns, empty, order)
        drop &= ~np.isin(keys, new)
        rows, cols = np.divmod(np.setdiff1d(new, keys, assume_unique=True), columns)
        rewire(stored, np.flatnonzero(drop), rows, cols, self.optimizer, on_layout_change=self.on_layout_change)


def _before_update(method: ref[RigL], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    rigl = method()
    if rigl is None or unwrapped(rigl.optimizer) is not optimizer or was_skipped(optimizer):
        return
    if rigl._held:
        raise BlockSparseError.expected("optimizer.step", "RigL's step after each call of it", "another call of it")
    rigl.hold_weights()
