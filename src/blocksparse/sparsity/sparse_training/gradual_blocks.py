"""Gradual magnitude pruning of layers that are block-sparse already, wherever their blocks are."""

from __future__ import annotations

import numpy as np
import torch

from ...surgery.blocks import Blocks
from ...surgery.prunable import Skip
from ...surgery.rewire import OnLayoutChange, rewire
from ...surgery.weight_handle import handle_of
from ..pruning.lines import lines_of
from ..pruning.magnitude import check_norm, magnitudes, per_number
from ..pruning.schedule import CubicSchedule
from ..pruning.strongest import check_density, strongest
from .dynamic_sparsity import DynamicSparsity, Modules


class GradualBlockPruning(DynamicSparsity):
    """Gradual magnitude pruning of block-sparse layers. `step` is called after each `optimizer.step()`.

    As `GradualPruning`, with the same choice, for layers that start with all blocks stored, or some: a block that goes
    is stored no more, so that training becomes cheaper with the density, and there is nothing to finish. It works on
    the parts of tensor parallelism and on FSDP2's shards. Under DistributedDataParallel, wrap the model again after a
    call that changed it.

    Args:
        modules, optimizer, skip, on_layout_change: as for `SET`.
        density: of all these weights together, at the end, of all their blocks.
        begin, end, every, norm, scope, seed, keep_lines: as for `GradualPruning`.

    Raises:
        BlockSparseError: as `DynamicSparsity` and `GradualPruning`.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Linear(64, 64, block_size=8)      # all blocks
        >>> method = bs.sparsity.GradualBlockPruning(layer, density=0.25, begin=0, end=4, every=2)
        >>> for _ in range(4):
        ...     pruned = method.step()
        >>> layer.layout.nnz, layer.layout.density
        (16, 0.25)

    Source: as of `GradualPruning`.
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
        on_layout_change: OnLayoutChange | None = None,
    ):
        super().__init__(
            modules, optimizer, skip=skip, seed=seed, keep_lines=keep_lines, on_layout_change=on_layout_change
        )
        self.schedule = CubicSchedule(density, begin, end, every)
        check_norm(norm)
        self.blocks: dict[str, Blocks] = {}
        for name, module in self.modules.items():
            stored = handle_of(module)
            self.blocks[name] = Blocks((*stored.layout.shape, *stored.local.shape[3:]), stored.layout.block_shape)
        check_density(density, {name: self.blocks[name] for _, name, _ in self._trained()}, scope)
        self.norm, self.scope = norm, scope

    def _due(self, call: int) -> bool:
        return self.schedule.due(call)

    def _change(self) -> None:
        stored = {name: weight for _, name, weight in self._trained()}
        if not stored:
            return
        scores = {}
        for name, weight in stored.items():
            norms = per_number(magnitudes(weight, self.norm), self.blocks[name], self.norm)
            # An absent block has a lower score than any zero that is stored.
            places = np.full(weight.layout.grid, -np.inf, dtype=norms.dtype)
            places[weight.layout.row_of_block, weight.layout.col_of_block] = norms
            scores[name] = torch.from_numpy(places)
        keep = strongest(
            scores,
            self.blocks,
            self.schedule(self.calls),
            self.scope,
            seed=self.seed,
            lines={name: lines_of(weight) for name, weight in stored.items()} if self.keep_lines else None,
            end=self.schedule.density,
        )
        for name, weight in stored.items():
            gone = ~keep[name].numpy()[weight.layout.row_of_block, weight.layout.col_of_block]
            if gone.any():
                rewire(weight, np.flatnonzero(gone), [], [], self.optimizer, on_layout_change=self.on_layout_change)
