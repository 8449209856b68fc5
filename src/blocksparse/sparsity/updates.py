"""Detection of optimizer steps that update no weights."""

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
    """A record, kept by hooks, of whether an optimizer has updated its parameters since the last backward pass.

    Some calls of `optimizer.step` do nothing: accelerate's while it accumulates gradients, GradScaler's after an
    overflow. An optimizer whose hooks do not run, as in a CUDA graph, is assumed to update at each call.

    Args:
        optimizer: the optimizer, possibly wrapped by accelerate; None if it is unknown.
        parameters: the parameters; hooks observe the backward passes of the first one that is trained.
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
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def was_missed(self) -> bool:
        """Return whether a backward pass came without an update since the last call of this method."""
        missed = self._backward and not self._updated
        self._backward = self._updated = False
        return missed and (self._ever_updated or accelerate_accumulates() or self._overflowed())

    def _overflowed(self) -> bool:
        """Return whether the first update was skipped: GradScaler skips it if a gradient is not finite."""
        if self.optimizer is None:
            return False
        if getattr(self.optimizer, "step_was_skipped", False):  # accelerate's
            return True
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        return any(parameter.grad is not None and not parameter.grad.isfinite().all() for parameter in parameters)


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a fused optimizer skips this update; GradScaler calls its step after an overflow too."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def accelerate_accumulates() -> bool:
    """Return whether accelerate is accumulating gradients."""
    accelerate = sys.modules.get("accelerate.state")
    return accelerate is not None and not accelerate.GradientState._shared_state.get("sync_gradients", True)


def _after_backward(updates: ref[Updates], *_: Any) -> None:
    """Record a backward pass, unless the record is gone."""
    if (record := updates()) is not None:
        record._backward = True


def _after_update(updates: ref[Updates], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Record an update, unless the optimizer skips it or the record is gone."""
    if (record := updates()) is not None and not was_skipped(optimizer):
        record._updated = True
        # Replays of a CUDA graph run no hooks.
        record._ever_updated = not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
