"""Counts the real updates of an optimizer: a call of its step may leave all weights as they are."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..surgery.optimizer import unwrapped


class Updates:
    """Sees, by hooks, whether an optimizer has updated its parameters after the last backward pass.

    Training loops call `optimizer.step`, and it does nothing: accelerate's while gradients are accumulated, and
    GradScaler's after an overflow. An optimizer whose hooks do not run, such as in a CUDA graph, counts as one that
    updates at each call.

    Args:
        optimizer: may be wrapped by accelerate; None if it is not known.
        parameters: the hooks see the backward passes of the first one that is trained.
    """

    def __init__(self, optimizer: Any, parameters: Iterable[Tensor]):
        self.optimizer = optimizer
        self._updated = self._ever_updated = self._backward = False
        self._hooks: list[Any] = []
        # The hooks hold this object weakly, so that the optimizer and the model outlive the method.
        parameter = next((each for each in parameters if each.is_leaf and each.requires_grad), None)
        if parameter is not None:
            hook = partial(_after_backward, ref(self))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        if optimizer is not None:
            self._hooks.append(unwrapped(optimizer).register_step_post_hook(partial(_after_update, ref(self))))

    def close(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def missing(self) -> bool:
        """Whether a backward pass, but no update has come since the last call of this."""
        missing = self._backward and not self._updated
        self._backward = self._updated = False
        return missing and (self._ever_updated or _accelerate_accumulates() or self._overflowed())

    def _overflowed(self) -> bool:
        """Whether the first update was skipped: GradScaler skips it if a gradient is not finite."""
        if self.optimizer is None:
            return False
        if getattr(self.optimizer, "step_was_skipped", False):  # accelerate's
            return True
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        return any(parameter.grad is not None and not parameter.grad.isfinite().all() for parameter in parameters)


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer, whose step GradScaler calls after an overflow too, is skipping an update."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _accelerate_accumulates() -> bool:
    """Whether accelerate has told all its optimizers that gradients are still being accumulated."""
    accelerate = sys.modules.get("accelerate.state")
    return accelerate is not None and not accelerate.GradientState._shared_state.get("sync_gradients", True)


def _after_backward(updates: ref[Updates], *_: Any) -> None:
    if (mine := updates()) is not None:
        mine._backward = True


def _after_update(updates: ref[Updates], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if (mine := updates()) is not None and not was_skipped(optimizer):
        mine._updated = True
        # Replays of a CUDA graph run no hooks.
        mine._ever_updated = not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
