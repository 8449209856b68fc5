"""What takes part in a training: callbacks, and the task itself, which is the first of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blocksparse.errors import BlockSparseError


class Callback:
    """Takes part in a training. Each method is called at its place in the loop, and does nothing unless overridden."""

    def attach(self, optimizer: torch.optim.Optimizer, ema: dict[str, Tensor]) -> None:
        """Once, before all else: the optimizer, and the running means by the parameters' names.

        It may give model and optimizer new parameters, and keeps both up to date where it changes parameters.
        """

    def began(self, step: int) -> None:
        """Training begins, with `step` steps done before."""

    def before_step(self, step: int) -> None:
        """A step begins; a task may change its model, and give it other parameters."""

    def after_update(self) -> None:
        """The optimizer has moved the parameters: the place for the `step()` of a method of sparsity."""

    def after_step(self, step: int) -> None:
        """A step is done: `step` in all."""

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """What surrounds a part of the loop: "train", a step; "evaluate"; "save"."""
        return nullcontext()

    def logged(self, record: Mapping[str, Any]) -> None:
        """A line was logged: with "loss", of the steps since the last such line, or with "held_out"."""

    def note(self, text: str) -> None:
        """A note for the user."""


class Task(Callback):
    """A model, its data and its loss, for the trainer, which puts the model on the settings' device.

    `unit` is that of the held-out figure; a loss in nats times `per_nat` is in `loss_unit`, by default the same unit. A
    step reads `bytes_per_step` bytes of the training data, or `samples_per_step` of `samples`.
    """

    model: nn.Module
    unit: str
    loss_unit: str | None = None
    per_nat: float = 1.0
    bytes_per_step: int
    samples: str = "bytes"
    samples_per_step: int | None = None
    steps_per_epoch: int | None = None
    share: float = 1.0  # of a batch, that this process takes
    replaces_model: bool = False  # while it is trained

    def split(self, rank: int, processes: int) -> None:
        """Has the task take a part of each batch, that of one of several processes; before all else."""
        raise BlockSparseError.expected(type(self).__name__, "one process", f"{processes}")

    def inputs(self, step: int) -> tuple[Tensor, ...] | None:
        """What `loss_of` needs for a step, of the same shapes each time; None if a step cannot be a CUDA graph."""
        return None

    def loss_of(self, *inputs: Tensor) -> Tensor:
        """The loss in nats; reads nothing else from the host, and keeps its state in tensors that stay."""
        raise NotImplementedError

    def loss(self, step: int) -> Tensor:
        """The loss of a step in nats, which the step and the carried state determine; carries the state on."""
        return self.loss_of(*(self.inputs(step) or ()))

    def evaluate(self, model: nn.Module) -> float:
        """The figure on held-out data, in the unit; the lower the better. Gradients are off."""
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """Describes the task, ready for JSON, with a digest of the data: a run resumes only if this is the same."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """The state carried from step to step."""
        return {}

    def resume(self, state: dict[str, Tensor]) -> None:
        """Gives the model the parameters that it had with this state; before the model's own state is loaded."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Brings the state back."""


class EpochTask(Task):
    """A task on rows, or images, in another order in each epoch, which seed and step determine.

    Rows that do not fill a batch are left out of their epoch. `samples` is what a row is, in the plural.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str,
        rows: int,
        batch: int,
        seed: int,
        samples: str,
        row_bytes: int,
    ):
        if not 1 <= batch <= rows:
            raise BlockSparseError.expected("batch", f"an int from 1 to the {samples} to train on, {rows:,}", batch)
        self.device = torch.device(device)
        self.model, self.batch, self.seed, self.rows = model.to(self.device), batch, seed, rows
        self.samples, self.samples_per_step, self.bytes_per_step = samples, batch, batch * row_bytes
        self.steps_per_epoch: int = rows // batch
        self.mine = slice(0, batch)  # of each batch
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def split(self, rank: int, processes: int) -> None:
        self.mine, self.share = part_of_batch(self.batch, rank, processes)

    def rows_of(self, step: int) -> np.ndarray:
        """The numbers of a step's rows that this process takes."""
        epoch, nth = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        return self._order[1][nth * self.batch : (nth + 1) * self.batch][self.mine]


def part_of_batch(batch: int, rank: int, processes: int) -> tuple[slice, float]:
    """The samples of a batch that a process takes, about as many as each other one, and their share.

    >>> part_of_batch(10, 1, 4)
    (slice(2, 5, None), 0.3)
    """
    if batch < processes:
        raise BlockSparseError.expected("batch", f"a sample or more for each of {processes} processes", batch)
    begin, end = batch * rank // processes, batch * (rank + 1) // processes
    return slice(begin, end), (end - begin) / batch
