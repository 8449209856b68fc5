"""The base class of all methods that work during training."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checked import check_state
from ..errors import BlockSparseError
from ..surgery.optimizer import check_optimizer, is_optimizer, unwrapped
from .updates import Updates


class TrainingMethod:
    """A method that changes which weights of a model are stored or used during training.

    Every method is called at the same place of the training loop, once per iteration:

        optimizer.zero_grad()
        loss(model(x)).backward()       # + method.penalty(), if the method has one
        optimizer.step()
        method.step()

    Methods collect what they need of the backward pass by hooks. `begin`, `end` and `every` count calls of `step`; the
    first call is number 1. Nothing changes before call `begin`, and the last change is at or before call `end`; only
    MovementPruning keeps exchanging blocks until `finish`. If a paper counts epochs, call `step` after each epoch, or
    set `every` to the iterations per epoch.

    A call does not count, and changes nothing, if the optimizer has skipped the update since the backward pass:
    accelerate does so while it accumulates gradients, GradScaler after an overflow. If your own loop accumulates
    gradients, call `step` after each `optimizer.step()`, not after each backward pass: every call before the first
    update counts.
    """

    calls = 0
    optimizer: Any = None
    _updates: Updates | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_updates": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copies and pickles of optimizers and parameters have no hooks.
        self.__dict__.update(state)
        self._watch_updates()

    def __repr__(self) -> str:
        """Return the settings that apply now, and the calls so far."""
        options = {name: getattr(self, name, None) for name in inspect.signature(type(self)).parameters}
        listed = [f"{name}={value!r}" for name, value in options.items() if isinstance(value, int | float | str)]
        return f"{type(self).__name__}({', '.join([*listed, f'calls={self.calls}'])})"

    @property
    def finished(self) -> bool:
        """Whether `finish` was called, after which `step`, `penalty`, `finish` and loading raise."""
        return False

    def step(self) -> bool:
        """Count a call after an update; return whether it may have changed the pattern.

        Raises:
            BlockSparseError: `finish` was called.
        """
        self._check_unfinished("step")
        if self._updates is not None and self._updates.was_missed():
            return False
        self.calls += 1
        with torch.inference_mode(False), torch.no_grad():
            return self._step()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state to save, in addition to the states of the model and the optimizer."""
        return {"calls": torch.tensor(self.calls, device="cpu"), "method": _as_tensor(type(self).__name__)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Resume from a state. Load the states of the model and the optimizer as usual.

        Raises:
            BlockSparseError: the state of another method, or `finish` was called.
        """
        self._check_unfinished("load_state_dict")
        own = self.state_dict()
        if isinstance(state, Mapping):
            state = {"method": own["method"], **state}  # states of earlier versions do not name it
            if (name := _as_name(state["method"])) not in (None, type(self).__name__):
                raise BlockSparseError.expected("state", f"that of {type(self).__name__}", f"that of {name}")
        check_state(state, own)
        self.calls = int(state["calls"])

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Continue with another optimizer of the same parameters, such as the optimizer of a second run.

        A method that was created without an optimizer stays without one.

        Raises:
            BlockSparseError: no optimizer, one that lacks one of the weights, or `finish` was called.
        """
        self._check_unfinished("use_optimizer")
        if not is_optimizer(optimizer):
            raise BlockSparseError.expected("optimizer", "a torch.optim.Optimizer", type(optimizer).__name__)
        if self.optimizer is None or unwrapped(self.optimizer) is unwrapped(optimizer):
            return
        for name, parameter in self._named_parameters().items():
            if parameter.requires_grad:
                check_optimizer(optimizer, parameter, name)
        self.optimizer = optimizer
        self._watch_updates()

    def _named_parameters(self) -> dict[str, Tensor]:
        """Return the parameters whose pattern the method changes, by name."""
        return {}

    def _watch_updates(self) -> None:
        """Record updates of the current optimizer from now on."""
        if self._updates is not None:
            self._updates.close()
        self._updates = Updates(self.optimizer, self._named_parameters().values())

    def _step(self) -> bool:
        """Do the work of `step`; return whether the pattern may have changed."""
        return False

    def _check_unfinished(self, call: str) -> None:
        """Raise a BlockSparseError if `finish` was called before this call."""
        if self.finished:
            raise BlockSparseError(f"{call}() after finish(): use the model that finish returned, or make a new method")


def _as_tensor(name: str) -> Tensor:
    """Return the bytes of a name, as states of methods have tensors only."""
    return torch.tensor([*name.encode()], dtype=torch.uint8, device="cpu")


def _as_name(value: Any) -> str | None:
    """Return the name of which a value has the bytes, or None."""
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.is_meta:
        return None
    return bytes(value.flatten().tolist()).decode(errors="replace")
