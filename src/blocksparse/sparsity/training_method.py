"""What all methods have in common that work while a model is trained: one place in the training loop, one state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checked import check_state
from ..errors import BlockSparseError
from ..surgery.optimizer import check_optimizer, unwrapped
from .updates import Updates


class TrainingMethod:
    """Changes which weights of a model are stored, or used, while it is trained.

    Every method is called at the same place, once in each iteration:

        optimizer.zero_grad()
        loss(model(x)).backward()       # with + method.penalty(), where a method has one
        optimizer.step()
        method.step()

    What a method needs of the backward pass it collects by hooks. `begin`, `end` and `every` count calls of `step`,
    the first of which is number 1: nothing changes before call `begin`, the last change is at or before call `end`
    (only MovementPruning's choice moves on until `finish`).
    Where a paper counts epochs, `step` is called after each epoch, or `every` is a number of iterations.

    A call does not count, and changes nothing, if the optimizer has not updated the weights since the backward pass:
    accelerate's optimizer while gradients are accumulated, GradScaler's after an overflow. In a loop of your own that
    accumulates gradients, call `step` after each `optimizer.step()`, not after each backward pass: before the first
    update every call counts.
    """

    calls = 0
    optimizer: Any = None
    _updates: Updates | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_updates": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Neither an optimizer nor a parameter takes its hooks along when it is copied or pickled.
        self.__dict__.update(state)
        self._watch_updates()

    @property
    def finished(self) -> bool:
        """Whether the method has done its last, so that no call can follow."""
        return False

    def step(self) -> bool:
        """Counts a call after an update; returns whether this one may have changed the pattern.

        Raises:
            BlockSparseError: the method is finished.
        """
        self._check_unfinished("step")
        if self._updates is not None and self._updates.missing():
            return False
        self.calls += 1
        with torch.no_grad():
            return self._step()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state to save besides those of the model and the optimizer."""
        return {"calls": torch.tensor(self.calls)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Resumes from a state; the model's and the optimizer's states are loaded as usual.

        Raises:
            BlockSparseError: a state of something else, or the method is finished.
        """
        self._check_unfinished("load_state_dict")
        check_state(state, self.state_dict())
        self.calls = int(state["calls"])

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Continues with another optimizer of the same parameters, such as that of a second run.

        A method that was made without an optimizer stays without one.

        Raises:
            BlockSparseError: an optimizer without one of the weights; the method is finished.
        """
        self._check_unfinished("use_optimizer")
        if self.optimizer is None or unwrapped(self.optimizer) is unwrapped(optimizer):
            return
        for name, parameter in self._named_parameters().items():
            if parameter.requires_grad:
                check_optimizer(optimizer, parameter, name)
        self.optimizer = optimizer
        self._watch_updates()

    def _named_parameters(self) -> dict[str, Tensor]:
        """The parameters whose pattern the method changes, by name."""
        return {}

    def _watch_updates(self) -> None:
        if self._updates is not None:
            self._updates.close()
        self._updates = Updates(self.optimizer, self._named_parameters().values())

    def _step(self) -> bool:
        return False

    def _check_unfinished(self, what: str) -> None:
        if self.finished:
            raise BlockSparseError(f"{what}() after finish(): use the model that finish returned, or make a new method")
