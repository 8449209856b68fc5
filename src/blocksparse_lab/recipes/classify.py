"""Classifiers of rows whose topology changes during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse.checked import integer, number
from blocksparse.checkpoint import part
from blocksparse.errors import BlockSparseError
from blocksparse.sparsity import SET, SMET, BlockClock, CHTs, GradualBlockPruning, ImportancePruning, RigL
from blocksparse.sparsity.sparse_training.dynamic_sparsity import DynamicSparsity

from ..option import option
from ..training.callback import EpochTask
from ..training.running_means import sync_means

KIND = "classify"
METHODS = ("set", "smet", "chts", "rigl", "gradual", "none")
BETWEEN_EPOCHS = ("set", "smet", "chts")

# Batches joined in an evaluation, which needs memory for the outputs of two layers, not of all.
_EVALUATED_AT_ONCE = 2


class Data(Protocol):
    """Labelled rows: `rows` to train on and `tested` held-out ones, such as a `data.table.Table`."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def tested(self) -> int: ...
    @property
    def features(self) -> int: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    def take(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return rows to train on, by index, `[n, features]`, and their labels `[n]`."""
        ...

    def held_out(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the held-out rows and their labels in batches."""
        ...

    def digest(self) -> dict[str, Any]:
        """Return facts that identify the data, ready for JSON."""
        ...


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Schedule of importance pruning of neurons."""

    importance_from: int | None = option(None, "Prune the least important neurons after this number of epochs.")
    importance_every: int = option(10, "Epochs between such prunings.")
    importance_percentile: float = option(20.0, "Percentage of a layer's neurons to prune each time.")

    def __post_init__(self) -> None:
        if self.importance_from is not None:
            integer("importance_from", self.importance_from, 0)
        integer("importance_every", self.importance_every, 1)
        number("importance_percentile", self.importance_percentile, 0, 100)


@dataclass(frozen=True)
class Topology(Importance):
    """Schedule of topology changes during training. The output layer never changes.

    Args:
        method: "set", "smet" or "chts" for these methods of `bs.sparsity` between epochs, "rigl" for `RigL` every
            `every` steps during the first three quarters of the steps, "gradual" for `GradualBlockPruning` with
            regrowth during the first half, or "none". CHTs and gradual pruning have a `BlockClock`, as SMET.
        zeta, evolve_every: (initial) fraction that moves, and epochs between evolutions; not for RigL.
        regrow: SET's initial values of new connections.
        elastic: SET's zeta halves after 9/16 of the epochs and is 0 after 3/4, as in MEST's elastic mutation (Yuan et
            al. 2021; by its code, which drops by magnitude alone).
        fraction, every: RigL's alpha, and steps between changes.
        initial_density, density: at which gradual pruning begins and ends, of the layers that change.
    """

    method: str = "none"
    zeta: float = 0.3
    evolve_every: int = 1
    regrow: str = "he"
    elastic: bool = False
    fraction: float = 0.3
    every: int = 100
    initial_density: float = 1.0
    density: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in METHODS:
            raise BlockSparseError.expected("method", f"one of {', '.join(METHODS)}", repr(self.method))

    def about(self) -> dict[str, Any]:
        """Return the settings that have an effect, ready for JSON."""
        used = {
            "set": ("method", "zeta", "evolve_every", "regrow", *(["elastic"] if self.elastic else [])),
            **dict.fromkeys(("smet", "chts"), ("method", "zeta", "evolve_every")),
            "rigl": ("method", "fraction", "every"),
            "gradual": ("method", "zeta", "evolve_every", "initial_density", "density"),
            "none": (),
        }[self.method]
        pruning = tuple(key for key in asdict(self) if key.startswith("importance"))
        used += pruning if self.importance_from is not None else ()
        return {key: value for key, value in asdict(self).items() if key in used}


class ClassifyTask(EpochTask):
    """Cross entropy on batches of rows in a new order per epoch; the held-out figure is the error in %.

    The topology is pruned and then evolved between epochs, and so after the evaluation of an epoch. It does not change
    after the last epoch, as in the papers.

    Args:
        model: `[n, features] -> [n, classes]`; the topology of its layer `output` never changes.
        data: to train and to evaluate on.
        epochs: of the run; its settings have the `steps` of this task.
        batch: rows per step.
        topology: schedule of changes.
        about: describes the model, ready for JSON.
        penalty: returns a term to add to the loss.
    """

    unit = "% test error"
    loss_unit = "nats"
    per_nat = 1.0

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        epochs: int,
        batch: int = 128,
        topology: Topology | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        about: dict[str, Any] | None = None,
        penalty: Callable[[], Tensor] | None = None,
    ):
        if epochs < 1:
            raise BlockSparseError.expected("epochs", "a positive int", epochs)
        super().__init__(model, device, data.rows, batch, seed, "rows", data.features * 4)
        self.data, self.topology, self.penalty = data, topology or Topology(), penalty
        self.steps = epochs * self.steps_per_epoch
        self.methods: dict[str, DynamicSparsity] = {}
        self._about = about if about is not None else {"repr": repr(model)}
        self._digest = data.digest()

    def attach(self, optimizer: torch.optim.Optimizer, ema: dict[str, Tensor]) -> None:
        """Build the sparsity methods; momentum and running means follow moved connections."""
        t = self.topology
        how: dict[str, Any] = {
            "skip": getattr(self.model, "output", ()),
            "on_layout_change": sync_means(self.model, ema),
        }
        self.methods = {}
        if t.importance_from is not None:
            self.methods["importance"] = ImportancePruning(
                self.model, optimizer, percentile=t.importance_percentile, begin=t.importance_from + 1,
                every=t.importance_every, **how,
            )  # fmt: skip
        if t.method == "set":
            self.methods["set"] = SET(
                self.model, optimizer, t.zeta, every=t.evolve_every, init=t.regrow, seed=self.seed, **how
            )
        moving: dict[str, Any] = {"alpha": t.zeta, "every": t.evolve_every, "seed": self.seed} | how
        epochs = self.steps // self.steps_per_epoch
        if t.method == "smet":
            self.methods["smet"] = SMET(self.model, optimizer, epochs, **moving)
        clock: Any = BlockClock(optimizer) if t.method in ("chts", "gradual") else None
        if t.method == "chts":
            self.methods["chts"] = CHTs(self.model, clock, epochs, **moving)
        if t.method == "rigl":
            end = max(1, 3 * self.steps // 4)
            self.methods["rigl"] = RigL(self.model, optimizer, end, every=t.every, alpha=t.fraction, **how)
        if t.method == "gradual":
            end, every = max(1, self.steps // 2), t.evolve_every * self.steps_per_epoch
            self.methods["gradual"] = GradualBlockPruning(
                self.model, clock, t.density, end=end, every=every, regrow=t.zeta,
                initial_density=t.initial_density, seed=self.seed, **how,
            )  # fmt: skip

    def before_step(self, step: int) -> None:
        if step and step % self.steps_per_epoch == 0:
            if self.topology.elastic and isinstance(method := self.methods.get("set"), SET):
                self._apply_elastic_mutation(method, step / self.steps)
            self._change("importance", *BETWEEN_EPOCHS)

    def _apply_elastic_mutation(self, method: SET, trained: float) -> None:
        """Apply MEST's elastic mutation for the fraction of steps done: 90 and 120 of its 160 epochs."""
        method.zeta = self.topology.zeta * (1 if trained < 9 / 16 else 0.5 if trained < 3 / 4 else 0)

    def after_update(self) -> None:
        self._change("rigl", "gradual")

    def _change(self, *names: str) -> None:
        for name in names:
            if name in self.methods:
                self.methods[name].step()

    def loss(self, step: int) -> Tensor:
        """Return the cross entropy of a step in nats, plus the penalty."""
        rows, labels = (tensor.to(self.device) for tensor in self.take(step))
        loss = F.cross_entropy(self.model(rows).float(), labels)
        return loss if self.penalty is None else loss + self.penalty()

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """Return a step's rows and labels, on the CPU."""
        return self.data.take(self.rows_of(step))

    def evaluate(self, model: nn.Module) -> float:
        """Return the error rate on the held-out rows in %."""
        wrong, count = 0, 0
        for rows, labels in self.data.held_out(_EVALUATED_AT_ONCE * self.batch):
            predicted = model(rows.to(self.device)).argmax(1).cpu()
            wrong, count = wrong + int((predicted != labels).sum()), count + len(labels)
        return 100 * wrong / count

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{name}.{key}": t for name, method in self.methods.items() for key, t in method.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, method in self.methods.items():
            method.load_state_dict(part(state, f"{name}."))

    def about(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "model": {"seed": self.seed} | self._about,
            "topology": self.topology.about(),
            "data": self._digest,
            "batch": self.batch,
        }
