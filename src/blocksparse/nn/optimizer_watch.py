"""Hooks on all optimizers, which refuse a step whose state belongs to another layout."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..checked import check_optimizer_state
from ..errors import BlockSparseError

# Optimizers in the order of their first steps, which is the same on all ranks. False if a state was loaded since then.
_stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()

# Callbacks before an optimizer's first step, and before the first step after its state was loaded.
before_first_step: list[Callable[[torch.optim.Optimizer], None]] = []

# Parameters whose shape has changed since the last step of an optimizer on them.
_resized: Any = WeakIdKeyDictionary()

# For parameters, a callback before the next update by an optimizer. It is removed once it returns True.
_before_next: Any = WeakIdKeyDictionary()

# For parameters whose layout was set without converting the optimizers' state: the state tensors for the old blocks,
# with their version counters.
_stale: Any = WeakIdKeyDictionary()


def stepped_optimizers() -> Iterable[torch.optim.Optimizer]:
    """Return all live optimizers that have stepped since this library was imported."""
    return list(_stepped)


def mark_resized(parameter: Tensor) -> None:
    """Mark a parameter whose shape has changed, so that the next step checks the state before it can overrun it."""
    _resized[parameter] = True


def mark_state_stale(parameter: Tensor) -> None:
    """Mark the optimizers' present state of a parameter as stale, so that steps with it are refused."""
    states = (optimizer.state.get(parameter, {}) for optimizer, is_own in _stepped.items() if is_own)
    tensors = [each for state in states for each in state.values() if isinstance(each, Tensor) and each.numel() > 1]
    if tensors:
        _stale[parameter] = [(weakref.ref(each), _version(each)) for each in tensors]


def call_before_next_step(parameter: Tensor, call: Callable[[torch.optim.Optimizer], bool]) -> None:
    """Call `call(optimizer)` before each update of the parameter by its gradient, until it returns True.

    A parameter has one such callback; a second one replaces the first.
    """
    _before_next[parameter] = call


def _version(tensor: Tensor) -> int:
    """Return the version counter of a tensor; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def after_gradients(args: Any, kwargs: Any, call: Callable[[], None]) -> tuple[Any, Any] | None:
    """Make a call once a step's gradients are computed: at once, or after each call of the step's closure.

    Args:
        args: the positional arguments of a step; the optimizer comes first.
        kwargs: its other arguments.
        call: a function without arguments.

    Returns:
        The arguments with another closure, which a hook before the step returns; None if there is no closure.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        call()
        return None

    def closure_and_call() -> Any:
        loss = closure()
        call()
        return loss

    if len(args) > 1:
        return (args[0], closure_and_call, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure_and_call}


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Check the states of parameters whose layouts changed, and call what waits for the optimizer's next step."""
    if is_dynamo_compiling():  # a compiled step sees no changes of layouts
        return None
    if not _stepped.get(optimizer):
        for call in before_first_step:
            call(optimizer)
    if not (_resized or _stale or _before_next):
        return None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _resized:
                check_optimizer_state(optimizer.state.get(parameter, {}), parameter, "its parameter")
                del _resized[parameter]
            if parameter in _stale:
                _refuse_stale_state(optimizer, parameter)
    return after_gradients(args, kwargs, partial(_call_waiting, optimizer)) if _before_next else None


def _call_waiting(optimizer: torch.optim.Optimizer) -> None:
    """Call what waits for an update of the optimizer's parameters, of those that have a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _before_next and parameter.grad is not None and _before_next[parameter](optimizer):
                del _before_next[parameter]


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Record that an optimizer has stepped, and watch its later loads of a state."""
    if is_dynamo_compiling():
        return
    # Wrappers that skip the constructor of their base class have no hooks.
    if optimizer not in _stepped and hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
        optimizer.register_load_state_dict_post_hook(_after_loading)
    _stepped[optimizer] = True


def _after_loading(optimizer: torch.optim.Optimizer) -> None:
    """Treat an optimizer whose state was loaded as one that has not stepped."""
    _stepped[optimizer] = False


def _refuse_stale_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Raise a BlockSparseError if the optimizer's state still belongs to the blocks of an earlier layout."""
    versions = {id(each): version for ref, version in _stale[parameter] if (each := ref()) is not None}
    if not versions:
        del _stale[parameter]
    for name, value in optimizer.state.get(parameter, {}).items():
        if id(value) in versions and versions[id(value)] == _version(value):
            raise BlockSparseError(
                f"{name} in the state of {type(optimizer).__name__} belongs to the blocks that a weight had before its "
                f"layout was set or loaded (values of {list(parameter.shape)} now): load the optimizer's state of the "
                "same time, start again with optimizer.state.clear(), or change layouts by "
                "blocksparse.sparsity.rewire, which moves the state along"
            )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
