"""Training runs in which a dense model becomes block-sparse: a method of `sparsity` around any task of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from blocksparse import patterns, sparsity
from blocksparse.checked import integer, number
from blocksparse.checkpoint import part
from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.sparsity.pruning.dense_pruner import DensePruner

from ..training.callback import Task
from ..training.trainer import Trainer

FIXED = "fixed"
METHODS = ("one-shot", "gradual", "threshold", "group lasso", "l0", "movement", FIXED)
_TO_DENSITY = ("one-shot", "gradual", "movement", FIXED)

# Parameters that a method learns per block have this many times the rate of the weights.
GATES_RATE = 10


@dataclass(frozen=True)
class Pruning:
    """How the blocks to keep are found: with dense weights, in the first part of a run; after it they are fixed.

    Args:
        method: of `METHODS`. "one-shot" prunes by magnitude at the end of the search. "fixed" is the control of them
            all: blocks at random from the first step, whose weights begin as large as their number of inputs wants.
        density: what "one-shot", "gradual", "movement" and "fixed" come to, and the most that "group lasso" and "l0"
            leave, in each weight: magnitudes of layers of different widths do not compare. None for what the strength
            leaves.
        strength: what the density of the others depends on: of "threshold" its q, as a multiple of the 90th percentile
            of |w| of each weight of a trained dense model; of "group lasso" lambda; of "l0" the price of a weight in
            nats.
        penalty: of "threshold", the lambda of a group lasso in the loss besides (GLP).
        block_size: an int or (rows, columns).
        skip: names of what stays dense.
        search: the part of the steps that search; 0 for "fixed".
        times: steps of the whole run, as a multiple of those of the dense net: truly sparse ones cost a fraction.
        rate: the learning rate, as a multiple of that of the dense net.
    """

    method: str
    density: float | None = None
    strength: float = 0.0
    penalty: float = 0.0
    block_size: int | tuple[int, int] = 32
    skip: tuple[str, ...] = ()
    search: float = 2 / 3
    times: int = 1
    rate: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise BlockSparseError.expected("method", f"one of {', '.join(METHODS)}", repr(self.method))
        if self.density is None and self.method in _TO_DENSITY:
            raise BlockSparseError.expected("density", f"a number for {self.method}", self.density)
        if self.method == FIXED and self.search != 0:
            raise BlockSparseError.expected("search", "0 for fixed", self.search)
        if self.method != FIXED and not 0 < self.search <= 1:
            raise BlockSparseError.expected("search", "a number above 0 and at most 1", self.search)
        integer("times", self.times, 1)
        number("rate", self.rate, 0)

    def about(self) -> dict[str, Any]:
        """The settings that have an effect, ready for JSON."""
        unused = {"strength"} if self.method in _TO_DENSITY else set()
        unused |= {"density"} if self.method == "threshold" or self.density is None else set()
        unused |= set() if self.method == "threshold" else {"penalty"}
        unused |= set() if self.times > 1 else {"times"}
        unused |= set() if self.rate != 1 else {"rate"}
        return {key: value for key, value in asdict(self).items() if key not in unused}


class PruneTask(Task):
    """Wraps a task so that its model becomes block-sparse while it is trained.

    The method's `step` follows each update of the search. Then the model is truly sparse, and so are the steps, the
    optimizer's state and the checkpoints from there on, which bring the layouts.

    Args:
        task: what is trained.
        pruning: how it becomes sparse.
        steps: of the whole run.
        q: of "threshold", these percentiles, from `sparsity.percentiles`.
    """

    method: DensePruner
    replaces_model = True

    def __init__(self, task: Task, pruning: Pruning, steps: int, seed: int = 0, q: Mapping[str, float] | None = None):
        if pruning.method == "threshold" and q is None:
            raise BlockSparseError.expected("q", "percentiles of a trained dense model, for threshold", q)
        self.task, self.pruning, self.seed, self.q = task, pruning, seed, q or {}
        self.model, self.unit, self.per_nat = task.model, task.unit, task.per_nat
        self.loss_unit, self.bytes_per_step = task.loss_unit, task.bytes_per_step
        self.samples, self.samples_per_step = task.samples, task.samples_per_step
        self.steps_per_epoch = task.steps_per_epoch
        self.search = max(1, round(pruning.search * steps)) if pruning.search else 0
        self._penalties: list[Callable[[], Tensor]] = []
        self.sparse = False  # whether the model is, truly

    def split(self, rank: int, processes: int) -> None:
        self.task.split(rank, processes)
        self.share = self.task.share

    def attach(self, optimizer: torch.optim.Optimizer, ema: dict[str, Tensor]) -> None:
        """Makes the method, which follows each update."""
        if ema:
            raise BlockSparseError.expected("ema", "0 where a model is pruned", "running means of the parameters")
        self.task.attach(optimizer, ema)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.method = self._method(optimizer)

    def _method(self, optimizer: torch.optim.Optimizer) -> DensePruner:
        p, model, end = self.pruning, self.model, self.search
        if p.method == FIXED:
            return DensePruner(model, optimizer, block_size=p.block_size, skip=p.skip)
        every = max(1, end // 40)
        slowly: dict[str, Any] = {"begin": end // 4, "end": end, "every": every}
        rate = GATES_RATE * float(optimizer.param_groups[0]["lr"])
        of: dict[str, Any] = {"block_size": p.block_size, "skip": p.skip}
        to: dict[str, Any] = {"density": p.density, "scope": "layer", **of}
        if p.method == "one-shot":
            return sparsity.GradualPruning(model, optimizer, begin=end - 1, end=end, **to)
        if p.method == "gradual":
            return sparsity.GradualPruning(model, optimizer, **slowly, **to)
        if p.method == "movement":
            return sparsity.MovementPruning(model, optimizer, lr=rate, **slowly, **to)
        if p.method == "l0":
            gates = sparsity.L0Gates(model, optimizer, p.strength, samples=1, lr=rate, **to)
            self._penalties = [gates.penalty]
            return gates
        if p.method == "group lasso":
            return sparsity.GroupLasso(model, optimizer, p.strength, **to)
        if p.penalty:
            self._penalties = [sparsity.GroupLasso(model, optimizer, p.penalty, mode="penalty", **of).penalty]
        q = {name: p.strength * most for name, most in self.q.items()}
        ramp: dict[str, Any] = {"begin": end // 10, "ramp": end // 2, "end": end, "every": every}
        return sparsity.ThresholdPruning(model, optimizer, q, **ramp, **of)

    def before_step(self, step: int) -> None:
        """Makes the model truly sparse once the search is over."""
        self.task.before_step(step)
        if not self.sparse and self.searched:
            self._finish(self._at_random() if self.pruning.method == FIXED else None)

    def after_update(self) -> None:
        self.task.after_update()
        if not self.sparse:
            self.method.step()

    @property
    def searched(self) -> bool:
        """Whether the search is over."""
        return self.method.calls >= self.search

    def loss(self, step: int) -> Tensor:
        """The other task's loss; while the pattern is searched, with what the method adds to it."""
        penalties = () if self.sparse else self._penalties
        return sum((penalty() for penalty in penalties), self.task.loss(step))

    @torch.no_grad()
    def _at_random(self) -> dict[str, BlockLayout]:
        """Layouts of "fixed"; the weights become as large as if they had been drawn for so few inputs."""
        density, layouts = cast(float, self.pruning.density), {}
        for nth, (name, blocks) in enumerate(self.method.blocks.items()):
            layout = patterns.random(blocks.shape, blocks.block_shape, density, seed=1000 * self.seed + nth)
            self.method.dense[name].mul_(layout.density**-0.5)
            layouts[name] = layout
        return layouts

    def _finish(self, layouts: Mapping[str, BlockLayout] | None = None) -> None:
        self.model = self.task.model = self.method.finish(layouts)
        self.sparse = True

    def finish(self) -> nn.Module:
        """The model, truly sparse from now on, if it was not already."""
        if not self.sparse:
            self._finish()
        return self.model

    def evaluate(self, model: nn.Module) -> float:
        return self.task.evaluate(model)

    def state_dict(self) -> dict[str, Tensor]:
        if self.sparse:
            own = {f"layout.{name}": layout.mask() for name, layout in self.method.layouts().items()}
        else:
            own = {f"method.{name}": tensor for name, tensor in self.method.state_dict().items()}
        return own | {f"task.{name}": tensor for name, tensor in self.task.state_dict().items()}

    def resume(self, state: dict[str, Tensor]) -> None:
        """Makes the model sparse if that of the state is, so that its parameters fit."""
        masks = part(state, "layout.").items()
        if masks:
            self._finish({name: BlockLayout(mask, self.method.blocks[name].block_shape) for name, mask in masks})

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if not self.sparse:
            self.method.load_state_dict(part(state, "method."))
        self.task.load_state_dict(part(state, "task."))

    def about(self) -> dict[str, Any]:
        q = {"q": dict(self.q)} if self.pruning.method == "threshold" else {}
        return self.task.about() | {"pruning": self.pruning.about() | q}


def finished(trainer: Trainer) -> nn.Module:
    """The model of a finished run, in evaluation mode, by its trainer newly made; of a `PruneTask` truly sparse."""
    devices = [trainer.device] if trainer.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        trainer.load()
    task = trainer.task
    return (task.finish() if isinstance(task, PruneTask) else trainer.model).eval()
