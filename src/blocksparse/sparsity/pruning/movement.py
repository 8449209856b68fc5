"""Movement pruning: keeps the blocks whose weights move away from zero, whatever their size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...checked import boolean, integer
from ...ops.checks import accumulator
from ...surgery.blocks import Blocks
from ...surgery.prunable import Skip
from ..lines import lines_of
from ..selection import check_density
from .learned_gates import BlockGate, GatedPruner
from .schedule import CubicSchedule


class StraightThrough(torch.autograd.Function):
    """The product w m with the 0/1 mask m of blocks, whose gradient goes to the scores S.

    dL/dS = sum of dL/d(w m) w over the block, also of blocks that are masked; dL/dw = dL/d(w m) m.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scores: Tensor, keep: Tensor, blocks: Blocks) -> Tensor:
        ctx.save_for_backward(weight, scores, keep)
        ctx.blocks = blocks
        return weight * blocks.spread(keep)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weight, scores, keep = ctx.saved_tensors
        of_scores = ctx.blocks.sums(grad.to(scores.dtype) * weight.to(scores.dtype))
        return grad * ctx.blocks.spread(keep), of_scores, None, None


class ScoreGate(BlockGate):
    """A mask of the blocks that are kept, and a score for each block."""

    keep: Tensor

    def __init__(self, blocks: Blocks, dense: Tensor):
        super().__init__(blocks)
        self.scores = nn.Parameter(torch.zeros(blocks.grid, dtype=accumulator(dense.dtype), device=dense.device))
        self.register_buffer("keep", torch.ones(blocks.grid, dtype=torch.bool, device=dense.device))

    def forward(self, weight: Tensor) -> Tensor:
        return StraightThrough.apply(weight, self.scores, self.keep, self.blocks)

    @property
    def multiplier(self) -> Tensor:
        return self.keep


class MovementPruning(GatedPruner):
    """Movement pruning of blocks, to fine-tune a trained model.

    The score of a block rises as its weights move away from zero. The blocks with the highest scores are kept, at the
    density of a cubic schedule (`CubicSchedule`). Other blocks are 0 in the forward pass, but keep their values and
    scores, and may come back until `finish`.

    Args:
        model, optimizer, lr, block_size, skip: see `DensePruner` and `GatedPruner`.
        density, begin, end, scope, seed, keep_lines: see `GradualPruning`; scores take the place of norms.
        every: calls from one selection to the next until `end`, 1 by default; after `end`, every call selects.

    Raises:
        BlockSparseError: as for `GradualPruning`.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Linear(64, 32)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> method = bs.sparsity.MovementPruning(model, optimizer, density=0.25, block_size=8, lr=0.01, end=10)
        >>> for _ in range(10):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(16, 64)).square().mean().backward()
        ...     optimizer.step()
        ...     changed = method.step()
        >>> type(method.finish()) is bs.nn.Linear, method.density
        (True, 0.25)

    Source: Sanh, Wolf, Rush, Movement pruning: adaptive sparsity by fine-tuning (2020); Lagunas, Charlaix, Sanh, Rush,
    Block pruning for faster transformers (2021).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        density: float = 0.1,
        *,
        begin: int = 0,
        end: int,
        every: int = 1,
        scope: str = "global",
        lr: float | None = None,
        block_size: int | tuple[int, int] = 32,
        skip: Skip = (),
        seed: int = 0,
        keep_lines: bool = True,
    ):
        super().__init__(model, optimizer, lr=lr, block_size=block_size, skip=skip)
        self.schedule = CubicSchedule(density, begin, end, every)
        check_density(density, self.blocks, scope)
        self.scope, self.end = scope, end
        self.seed = integer("seed", seed, 0)
        lines = self.blocks if boolean("keep_lines", keep_lines) else {}
        self._lines = {name: lines_of(blocks) for name, blocks in lines.items()} or None
        self._attach({name: ScoreGate(blocks, self.dense[name]) for name, blocks in self.blocks.items()})

    def _step(self) -> bool:
        """Select the blocks with the highest scores if the schedule is due, and return whether it was."""
        # Scores still change after the schedule's end, so the best blocks do too; their number does not.
        due = self.schedule.due(min(self.calls, self.schedule.end))
        if due:
            scores = {name: self.gates[name].scores for name in self._trained()}
            masks = self.schedule.select(self.calls, scores, self.blocks, self.scope, self.seed, self._lines)
            for name, keep in masks.items():
                self.gates[name].keep = keep
        return due
