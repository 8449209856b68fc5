"""Movement pruning: blocks are kept whose weights move away from zero, whatever their size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...checked import integer
from ...surgery.blocks import Blocks
from ...surgery.prunable import Skip
from ..lines import lines_of
from ..selection import check_density, top_blocks
from .learned_gates import Gate, Gated
from .schedule import CubicSchedule


class StraightThrough(torch.autograd.Function):
    """w m, with m = 1 for the blocks that are kept; the scores get the gradient as if they stood in the place of m.

    dL/dS = sum over the block of dL/d(w m) w, for blocks that are not kept too; dL/dw = dL/d(w m) m.
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
        moved = ctx.blocks.sums(grad.to(scores.dtype) * weight.to(scores.dtype))
        return grad * ctx.blocks.spread(keep), moved, None, None


class Scored(Gate):
    """A weight without the blocks that are not kept, and a score for each block."""

    keep: Tensor

    def __init__(self, blocks: Blocks, like: Tensor):
        super().__init__(blocks)
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.scores = nn.Parameter(torch.zeros(blocks.grid, dtype=dtype, device=like.device))
        self.register_buffer("keep", torch.ones(blocks.grid, dtype=torch.bool, device=like.device))

    def forward(self, weight: Tensor) -> Tensor:
        return StraightThrough.apply(weight, self.scores, self.keep, self.blocks)

    @property
    def multiplier(self) -> Tensor:
        return self.keep


class MovementPruning(Gated):
    """Movement pruning of blocks, for the fine-tuning of a model that is trained already.

    Each block has a score, which rises as its weights move away from zero; those with the highest scores are kept, as
    many as the cubic schedule says (`CubicSchedule`). Others are 0 in the forward pass, but keep their numbers and
    their scores, and may come back until `finish`.

    Args:
        model, optimizer, lr, block_size, skip: as for all methods with parameters of their own; see `Gated`.
        density, begin, end, every, scope, seed, keep_lines: as for `GradualPruning`, by scores.

    Raises:
        BlockSparseError: as `GradualPruning`.

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
        self._lines = {name: lines_of(blocks) for name, blocks in self.blocks.items()} if keep_lines else None
        self._attach({name: Scored(blocks, self.dense[name]) for name, blocks in self.blocks.items()})

    def _step(self) -> bool:
        # After the last step of the schedule scores still move: the best blocks change, their number does not.
        due = self.schedule.due(min(self.calls, self.schedule.end))
        if due:
            scores = {name: self.gates[name].scores for name in self._trained()}
            if not scores:
                return due
            kept = top_blocks(
                scores,
                self.blocks,
                self.schedule(self.calls),
                self.scope,
                seed=self.seed,
                lines=self._lines,
                final_density=self.schedule.density,
            )
            for name, keep in kept.items():
                self.gates[name].keep = keep
        return due
