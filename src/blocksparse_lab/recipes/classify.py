"""Classifiers of rows, with a topology that changes in training: the task for the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse.checkpoint import part
from blocksparse.errors import BlockSparseError
from blocksparse.nn.module import BlockSparseModule
from blocksparse.sparsity import SET, ImportancePruning, RigL, remap_blocks
from blocksparse.sparsity.sparse_training.dynamic_sparsity import DynamicSparsity

KIND = "classify"
METHODS = ("set", "rigl", "none")

# Batches that an evaluation joins: without gradients each takes less memory.
_EVALUATED_AT_ONCE = 4


class Data(Protocol):
    """Rows with a class each: a `data.table.Table`, or a `data.synthetic.Synthetic`."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int:
        """The number of rows to train on."""
        ...

    @property
    def tested(self) -> int:
        """The number of the other rows."""
        ...

    @property
    def features(self) -> int: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    def take(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Rows to train on, by their numbers, `[n, features]`, and their labels `[n]`."""
        ...

    def held_out(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The other rows and their labels, in batches."""
        ...

    def digest(self) -> dict[str, Any]:
        """Identifies the data, ready for JSON."""
        ...


@dataclass(frozen=True)
class Topology:
    """How the topology changes while the model is trained; nothing of it changes the output layer.

    Args:
        method: "set", `bs.sparsity.SET` between epochs; "rigl", `bs.sparsity.RigL` every `every` steps, until three
            quarters of the steps; or "none".
        zeta: of "set".
        evolve_every, regrow: of "set": epochs from one evolution to the next, and the first values of new connections,
            as `bs.sparsity.SET` names them.
        fraction, every: of "rigl", its alpha, and the steps from one change to the next.
        importance_from: epochs after which `bs.sparsity.ImportancePruning` begins; None for none of it.
        importance_every: epochs from one such pruning to the next.
        importance_percentile: of each.

    Raises:
        BlockSparseError: an unknown method. Numbers are checked by the methods.
    """

    method: str = "none"
    zeta: float = 0.3
    evolve_every: int = 1
    regrow: str = "he"
    fraction: float = 0.3
    every: int = 100
    importance_from: int | None = None
    importance_every: int = 10
    importance_percentile: float = 20.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise BlockSparseError.expected("method", f"one of {', '.join(METHODS)}", repr(self.method))

    def about(self) -> dict[str, Any]:
        """The settings that have an effect, ready for JSON."""
        used = {
            "set": ("method", "zeta", "evolve_every", "regrow"),
            "rigl": ("method", "fraction", "every"),
            "none": (),
        }[self.method]
        pruning = tuple(key for key in asdict(self) if key.startswith("importance"))
        used += pruning if self.importance_from is not None else ()
        return {key: value for key, value in asdict(self).items() if key in used}


class ClassifyTask:
    """Cross entropy on batches of rows, in another order in each epoch; the held-out figure is the error in %.

    The order, and so each batch, is determined by the seed and the step; rows that do not fill a batch are left out
    of their epoch. Between two epochs, and so after the evaluation at the end of one, the topology is pruned, then
    evolved; after the last one nothing changes, as in the papers.

    Args:
        model: with `output`, the layer that is left as it is, where its topology changes; `[n, features] -> [n,
            classes]`.
        data: to train and to evaluate on.
        epochs: of the run, whose settings have `steps` of this task.
        batch: rows of a step.
        topology: how it changes.
        seed: of the order of the rows and of the topology.
        device: of model and data.
        about: what the model is, ready for JSON.

    Raises:
        BlockSparseError: a batch larger than the data, no epoch.

    >>> import torch
    >>> from blocksparse_lab.data.synthetic import Synthetic
    >>> from blocksparse_lab.models.mlp import SparseMLP
    >>> from blocksparse_lab.recipes.classify import ClassifyTask, Topology
    >>> data = Synthetic(features=100, rows=64, tested=20)
    >>> task = ClassifyTask(SparseMLP([100, 50, 2], epsilon=5), data, epochs=3, batch=16, topology=Topology("set"))
    >>> task.steps, task.loss(0).dim()
    (12, 0)
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
    ):
        if epochs < 1:
            raise BlockSparseError.expected("epochs", "a positive int", epochs)
        if not 1 <= batch <= data.rows:
            raise BlockSparseError.expected("batch", f"an int from 1 to the rows to train on, {data.rows:,}", batch)
        self.device = torch.device(device)
        self.model, self.data, self.batch, self.seed = model.to(self.device), data, batch, seed
        self.topology = topology or Topology()
        self.steps_per_epoch = data.rows // batch
        self.steps = epochs * self.steps_per_epoch
        self.bytes_per_step = batch * data.features * 4
        self.methods: dict[str, DynamicSparsity] = {}
        self._about = about if about is not None else {"repr": repr(model)}
        self._digest = data.digest()
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def attach(self, optimizer: torch.optim.Optimizer, ema: dict[str, Tensor]) -> None:
        """Makes the methods: momentum and running means follow the connections."""
        t = self.topology
        names = {module: f"{name}.values" for name, module in self.model.named_modules()}

        def on_layout_change(module: BlockSparseModule, source: Tensor) -> None:
            if (name := names[module]) in ema:
                # The mean of a new connection begins with its first value.
                ema[name] = remap_blocks(ema[name], source, module.values.detach()[source < 0])

        skip = getattr(self.model, "output", ())
        self.methods = {}
        if t.importance_from is not None:
            self.methods["importance"] = ImportancePruning(
                self.model, optimizer, percentile=t.importance_percentile, begin=t.importance_from + 1,
                every=t.importance_every, skip=skip, on_layout_change=on_layout_change,
            )  # fmt: skip
        if t.method == "set":
            self.methods["set"] = SET(
                self.model,
                optimizer,
                t.zeta,
                every=t.evolve_every,
                init=t.regrow,
                skip=skip,
                seed=self.seed,
                on_layout_change=on_layout_change,
            )
        if t.method == "rigl":
            end = max(1, 3 * self.steps // 4)
            rigl = RigL(
                self.model,
                optimizer,
                end,
                every=t.every,
                alpha=t.fraction,
                skip=skip,
                on_layout_change=on_layout_change,
            )
            optimizer.register_step_post_hook(_after_update(rigl))
            self.methods["rigl"] = rigl

    def rows_of(self, step: int) -> np.ndarray:
        """The numbers of a step's rows."""
        epoch, nth = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.data.rows)
        return self._order[1][nth * self.batch : (nth + 1) * self.batch]

    def loss(self, step: int) -> Tensor:
        """The cross entropy of a step in nats; before the first step of an epoch the topology changes."""
        if step and step % self.steps_per_epoch == 0:
            for name in ("importance", "set"):
                if name in self.methods:
                    self.methods[name].step()
        rows, labels = (tensor.to(self.device) for tensor in self.take(step))
        return F.cross_entropy(self.model(rows).float(), labels)

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """A step's rows and their labels, on the CPU."""
        return self.data.take(self.rows_of(step))

    def evaluate(self, model: nn.Module) -> float:
        """The part of the held-out rows that are put in the wrong class, in %."""
        wrong, count = 0, 0
        for rows, labels in self.data.held_out(_EVALUATED_AT_ONCE * self.batch):
            found = model(rows.to(self.device)).argmax(1).cpu()
            wrong, count = wrong + int((found != labels).sum()), count + len(labels)
        return 100 * wrong / count

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{name}.{key}": t for name, method in self.methods.items() for key, t in method.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, method in self.methods.items():
            method.load_state_dict(part(state, f"{name}."))

    def about(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "model": self._about | {"seed": self.seed},
            "topology": self.topology.about(),
            "data": self._digest,
            "batch": self.batch,
        }


def _after_update(rigl: RigL) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        rigl.step()

    return hook
