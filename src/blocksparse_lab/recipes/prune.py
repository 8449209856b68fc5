"""Make a dense model block-sparse while it is trained: a method of `sparsity` around any task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from blocksparse import patterns, sparsity
from blocksparse.checked import integer, number, positive_fraction
from blocksparse.checkpoint import part
from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.sparsity.pruning.dense_pruner import DensePruner

from ..training.callback import Task, WrappedTask
from ..training.trainer import Trainer

FIXED = "fixed"
METHODS = ("one-shot", "gradual", "threshold", "group lasso", "l0", "movement", FIXED)
_TO_DENSITY = ("one-shot", "gradual", "movement", FIXED)

# Factor of the learning rate for parameters that a method learns per block.
GATES_RATE = 10


@dataclass(frozen=True)
class Pruning:
    """Method and schedule of pruning: the first part of a run searches blocks with dense weights.

    Args:
        method: one of `METHODS`. "one-shot" prunes by magnitude at the end of the search. "fixed" is the baseline:
            random blocks from the first step, with weights scaled for their number of inputs.
        density: target of "one-shot", "gradual", "movement" and "fixed", and upper bound of "group lasso" and "l0", per
            weight, as magnitudes of layers of different widths do not compare. None: determined by `strength`.
        strength: sets the density of the others. "threshold": its q as a multiple of the 90th percentile of |w| of each
            weight of a trained dense model. "group lasso": lambda. "l0": the price of a weight in nats.
        penalty: "threshold": lambda of an additional group lasso in the loss (GLP).
        block_size: an int or (rows, columns).
        skip: names of modules or weights that stay dense.
        search: fraction of the steps that search; 0 for "fixed".
        times: steps of the run as a multiple of the dense net's, as sparse steps cost a fraction.
        rate: learning rate as a multiple of the dense net's.
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
        if self.method != FIXED:
            positive_fraction("search", self.search)
        integer("times", self.times, 1)
        number("rate", self.rate, 0)

    def about(self) -> dict[str, Any]:
        """Return the settings that have an effect, ready for JSON."""
        unused = {"strength"} if self.method in _TO_DENSITY else set()
        unused |= {"density"} if self.method == "threshold" or self.density is None else set()
        unused |= set() if self.method == "threshold" else {"penalty"}
        unused |= set() if self.times > 1 else {"times"}
        unused |= set() if self.rate != 1 else {"rate"}
        return {key: value for key, value in asdict(self).items() if key not in unused}


class PruneTask(WrappedTask):
    """A task whose model becomes block-sparse during training.

    The method's `step` follows each update of the search. After the search the model, its steps, the optimizer's state
    and the checkpoints, which bring the layouts, are truly sparse.

    Args:
        task: the task to wrap.
        pruning: method and schedule.
        steps: of the whole run.
        q: for "threshold", percentiles from `sparsity.percentiles`.
    """

    method: DensePruner
    replaces_model = True

    def __init__(self, task: Task, pruning: Pruning, steps: int, seed: int = 0, q: Mapping[str, float] | None = None):
        if pruning.method == "threshold" and q is None:
            raise BlockSparseError.expected("q", "percentiles of a trained dense model, for threshold", q)
        super().__init__(task)
        self.pruning, self.seed, self.q = pruning, seed, q or {}
        self.search = max(1, round(pruning.search * steps)) if pruning.search else 0
        self._penalties: list[Callable[[], Tensor]] = []
        self.sparse = False  # whether the model is truly sparse

    def attach(self, optimizer: torch.optim.Optimizer, ema: dict[str, Tensor]) -> None:
        """Build the method, which follows each update."""
        if ema:
            raise BlockSparseError.expected("ema", "0 where a model is pruned", "running means of the parameters")
        super().attach(optimizer, ema)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.method = self._build_method(optimizer)

    def _build_method(self, optimizer: torch.optim.Optimizer) -> DensePruner:
        """Build the pruning method of the settings; set `_penalties`, the terms that it adds to the loss."""
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
        """Make the model truly sparse once the search is over."""
        super().before_step(step)
        if not self.sparse and self.searched:
            self._finish(self._at_random() if self.pruning.method == FIXED else None)

    def after_update(self) -> None:
        super().after_update()
        if not self.sparse:
            self.method.step()

    @property
    def searched(self) -> bool:
        """Whether the search is over."""
        return self.method.calls >= self.search

    def loss(self, step: int) -> Tensor:
        """Return the wrapped task's loss, plus the method's penalties during the search."""
        penalties = () if self.sparse else self._penalties
        return sum((penalty() for penalty in penalties), super().loss(step))

    @torch.no_grad()
    def _at_random(self) -> dict[str, BlockLayout]:
        """Draw the layouts of "fixed", and scale the weights as if drawn for so few inputs."""
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
        """Make the model truly sparse, if it is not, and return it."""
        if not self.sparse:
            self._finish()
        return self.model

    def state_dict(self) -> dict[str, Tensor]:
        if self.sparse:
            own = {f"layout.{name}": layout.mask() for name, layout in self.method.layouts().items()}
        else:
            own = {f"method.{name}": tensor for name, tensor in self.method.state_dict().items()}
        return own | {f"task.{name}": tensor for name, tensor in self.task.state_dict().items()}

    def resume(self, state: dict[str, Tensor]) -> None:
        """Make the model sparse if the saved state is of a sparse model, so that its parameters fit."""
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


def load_finished(trainer: Trainer) -> nn.Module:
    """Load the model of a finished run, by a new trainer of it, in evaluation mode; a `PruneTask`'s is truly sparse."""
    devices = [trainer.device] if trainer.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        trainer.load()
    task = trainer.task
    return (task.finish() if isinstance(task, PruneTask) else trainer.model).eval()
