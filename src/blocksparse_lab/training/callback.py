"""Callbacks of the training loop, and `Task`, the first of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blocksparse.errors import BlockSparseError


class Callback:
    """A participant in a training. The loop calls each method at its place; by default a method does nothing."""

    def attach(self, optimizer: torch.optim.Optimizer, ema: dict[str, Tensor]) -> None:
        """Receive the optimizer and the running means, by parameter name, before training starts.

        A callback that changes or adds parameters keeps both up to date.
        """

    def began(self, step: int) -> None:
        """Note that training starts after `step` steps."""

    def before_step(self, step: int) -> None:
        """Prepare a step. A task may change its model and replace its parameters here."""

    def after_update(self) -> None:
        """Act after an update of the parameters, such as by the `step()` of a sparsity method."""

    def after_step(self, step: int) -> None:
        """Act after a step; `step` counts the steps done."""

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a context for a phase of the loop: "train" (one step), "evaluate" or "save"."""
        return nullcontext()

    def logged(self, record: Mapping[str, Any]) -> None:
        """Receive a log line, with "loss" (the mean since the last such line) or with "held_out"."""

    def note(self, text: str) -> None:
        """Receive a note for the user."""


class Task(Callback):
    """A model, its data and its loss.

    The trainer moves the model to the device of the settings. `unit` is the unit of the held-out figure; a loss in nats
    times `per_nat` is in `loss_unit`, by default the same unit. A step reads `bytes_per_step` bytes of the training
    data, or `samples_per_step` of `samples`.
    """

    model: nn.Module
    unit: str
    loss_unit: str | None = None
    per_nat: float = 1.0
    bytes_per_step: int
    samples: str = "bytes"
    samples_per_step: int | None = None
    steps_per_epoch: int | None = None
    share: float = 1.0  # fraction of each batch that this process computes
    replaces_model: bool = False  # during training

    def split(self, rank: int, processes: int) -> None:
        """Compute only the shard of each batch that belongs to `rank`. Called before all else."""
        raise BlockSparseError.expected(type(self).__name__, "one process: start it without torchrun", processes)

    def inputs(self, step: int) -> tuple[Tensor, ...] | None:
        """Return the inputs of `loss_of`, with the same shapes for each step; None if a step cannot be a CUDA graph."""
        return None

    def loss_of(self, *inputs: Tensor) -> Tensor:
        """Return the loss in nats; reads nothing else from the host and keeps its state in fixed tensors."""
        raise NotImplementedError

    def loss(self, step: int) -> Tensor:
        """Return the loss of a step in nats, determined by the step and the carried state, and update that state."""
        return self.loss_of(*(self.inputs(step) or ()))

    def evaluate(self, model: nn.Module) -> float:
        """Return the held-out figure in `unit`; lower is better. Gradients are off."""
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """Describe the task and a digest of its data, ready for JSON. A run resumes only if the description is
        equal."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that is carried from step to step."""
        return {}

    def resume(self, state: dict[str, Tensor]) -> None:
        """Give the model the parameters that belong to a saved state, before the model's own state is loaded."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the state."""


class WrappedTask(Task):
    """A task whose model another method changes during training.

    It forwards `split`, `attach`, `before_step`, `after_update`, `loss` and `evaluate` to the wrapped task. Subclasses
    forward the state, `about` and, for CUDA graphs, `inputs` and `loss_of`.
    """

    def __init__(self, task: Task):
        self.task = task
        self.model, self.unit, self.per_nat = task.model, task.unit, task.per_nat
        self.loss_unit, self.bytes_per_step = task.loss_unit, task.bytes_per_step
        self.samples, self.samples_per_step = task.samples, task.samples_per_step
        self.steps_per_epoch = task.steps_per_epoch

    def split(self, rank: int, processes: int) -> None:
        self.task.split(rank, processes)
        self.share = self.task.share

    def attach(self, optimizer: torch.optim.Optimizer, ema: dict[str, Tensor]) -> None:
        self.task.attach(optimizer, ema)

    def before_step(self, step: int) -> None:
        self.task.before_step(step)

    def after_update(self) -> None:
        self.task.after_update()

    def loss(self, step: int) -> Tensor:
        return self.task.loss(step)

    def evaluate(self, model: nn.Module) -> float:
        return self.task.evaluate(model)


class EpochTask(Task):
    """A task over rows or images in an order that seed and epoch determine.

    Rows that do not fill a batch are left out of their epoch. `samples` is the plural noun for a row.
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
        self.mine = slice(0, batch)  # this process's rows of each batch
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def split(self, rank: int, processes: int) -> None:
        self.mine, self.share = part_of_batch(self.batch, rank, processes)

    def rows_of(self, step: int) -> np.ndarray:
        """Return the indices of a step's rows for this process."""
        epoch, nth = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        return self._order[1][nth * self.batch : (nth + 1) * self.batch][self.mine]


def part_of_batch(batch: int, rank: int, processes: int) -> tuple[slice, float]:
    """Return the slice of a batch for a process and the fraction that it is of the batch.

    >>> part_of_batch(10, 1, 4)
    (slice(2, 5, None), 0.3)
    """
    if batch < processes:
        raise BlockSparseError.expected("batch", f"a sample or more for each of {processes} processes", batch)
    begin, end = batch * rank // processes, batch * (rank + 1) // processes
    return slice(begin, end), (end - begin) / batch
