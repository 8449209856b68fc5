"""Train a model whose blocks move: a sparse training method of `sparsity` around any task."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from blocksparse import sparsity
from blocksparse.checked import integer, number
from blocksparse.checkpoint import part
from blocksparse.errors import BlockSparseError
from blocksparse.sparsity.sparse_training.dynamic_sparsity import DynamicSparsity

from ..training.callback import Task, WrappedTask
from ..training.running_means import sync_means

FIXED, SMET, GRADUAL = "fixed", "smet", "gradual"
METHODS = (FIXED, "set", "rigl", SMET, "chts", GRADUAL)
CHANGES = 10  # at least, in short runs


@dataclass(frozen=True)
class Growth:
    """Method and schedule of a sparse training.

    Args:
        method: one of `METHODS`. "fixed" moves no blocks. "gradual" is `GradualBlockPruning` with regrowth, and starts
            with `initial_density`.
        fraction: of the blocks that move in a change, at first for all but "set".
        density: "gradual": the density at the end.
        initial_density: "gradual": the density of the model at first.
        growth: "gradual": where blocks grow.
        clock: whether each block has a clock of its own; SMET always has one.
        by_density: whether the learning rate of sparse weights is divided by their density.
        every: steps between changes; fewer in short runs.
        end: fraction of the steps after which no block moves.
    """

    method: str
    fraction: float = 0.3
    density: float = 1.0
    initial_density: float = 0.5
    growth: str = "gradient"
    clock: bool = False
    by_density: bool = False
    every: int = 100
    end: float = 0.75

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise BlockSparseError.expected("method", f"one of {', '.join(METHODS)}", repr(self.method))
        if self.method == GRADUAL and not 0 < self.density <= self.initial_density:
            raise BlockSparseError.expected("density", "above 0 and at most initial_density", self.density)
        integer("every", self.every, 1)
        for name in ("fraction", "end"):
            number(name, getattr(self, name), 0, 1)

    def mean_density(self, final: float) -> float:
        """Return the mean density over a run that ends with this one."""
        # The cubic schedule has an integral of a quarter.
        return final + (self.initial_density - final) * self.end / 4 if self.method == GRADUAL else final

    def build(self, model: torch.nn.Module, optimizer: Any, steps: int, **options: Any) -> DynamicSparsity | None:
        """Build the method for a run of these steps; None for fixed blocks."""
        end = max(1, round(self.end * steps))
        options |= {"end": end, "every": max(1, min(self.every, end // CHANGES))}
        if self.clock and self.method != SMET:
            optimizer = sparsity.BlockClock(optimizer)
        match self.method:
            case "set":
                return sparsity.SET(model, optimizer, self.fraction, init="zeros", **options)
            case "rigl":
                return sparsity.RigL(model, optimizer, alpha=self.fraction, **options)
            case "smet":
                return sparsity.SMET(model, optimizer, alpha=self.fraction, **options)
            case "chts":
                return sparsity.CHTs(model, optimizer, alpha=self.fraction, **options)
            case "gradual":
                options |= {"regrow": self.fraction, "growth": self.growth, "initial_density": self.initial_density}
                return sparsity.GradualBlockPruning(model, optimizer, self.density, scope="layer", **options)
        return None


class GrowTask(WrappedTask):
    """A task with a block-sparse model whose blocks move after updates.

    Args:
        task: the task to wrap.
        growth: method and schedule.
        steps: of the run.
    """

    def __init__(self, task: Task, growth: Growth, steps: int, seed: int = 0):
        super().__init__(task)
        self.growth, self.steps, self.seed = growth, steps, seed
        self.method: DynamicSparsity | None = None

    def attach(self, optimizer: torch.optim.Optimizer, ema: dict[str, Tensor]) -> None:
        """Build the method, which follows each update."""
        super().attach(optimizer, ema)
        if self.growth.by_density:
            divide_rates(self.model, optimizer)
        change = sync_means(self.model, ema)
        self.method = self.growth.build(self.model, optimizer, self.steps, seed=self.seed, on_layout_change=change)

    def inputs(self, step: int) -> tuple[Tensor, ...] | None:
        """Return the wrapped task's inputs; None while blocks move, which a CUDA graph would not see."""
        return self.task.inputs(step) if self.growth.method == FIXED else None

    def loss_of(self, *inputs: Tensor) -> Tensor:
        return self.task.loss_of(*inputs)

    def after_update(self) -> None:
        super().after_update()
        if self.method is not None:
            self.method.step()

    def state_dict(self) -> dict[str, Tensor]:
        own = {} if self.method is None else self.method.state_dict()
        inner = {f"task.{name}": tensor for name, tensor in self.task.state_dict().items()}
        return {f"method.{name}": tensor for name, tensor in own.items()} | inner

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if self.method is not None:
            self.method.load_state_dict(part(state, "method."))
        self.task.load_state_dict(part(state, "task."))

    def about(self) -> dict[str, Any]:
        return self.task.about() | {"growth": asdict(self.growth)}


def divide_rates(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give block-sparse weights groups of their own, whose learning rates are divided by the density."""
    for sparse in sparsity.rates_by_density(model, lr=1.0):
        moved = set(sparse["params"])
        for group in list(optimizer.param_groups):
            mine = [parameter for parameter in group["params"] if parameter in moved]
            if mine and sparse["lr"] != 1:
                group["params"] = [parameter for parameter in group["params"] if parameter not in moved]
                optimizer.add_param_group({**group, "params": mine, "lr": group["lr"] * sparse["lr"]})
