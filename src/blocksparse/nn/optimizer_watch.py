"""Knows the optimizers that have stepped, and stops one whose state belongs to another layout."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..checked import check_kept
from ..errors import BlockSparseError

# Whether the state is that of the last step, not one loaded since. In the order of first steps, the same on all ranks.
_stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()

# Called with an optimizer before its first step, and before the first one after its state was loaded.
before_first_step: list[Callable[[torch.optim.Optimizer], None]] = []

# Parameters whose shape has changed since an optimizer last stepped on them.
_resized: Any = WeakIdKeyDictionary()

# What is to be called before the next step of an optimizer on a parameter; True once it is done.
_before_next: Any = WeakIdKeyDictionary()

# Of parameters whose layout was set without a way from the old blocks to the new ones: the tensors that optimizers kept
# for the old blocks, with PyTorch's counters of what was written to them.
_left_behind: Any = WeakIdKeyDictionary()


def stepped_optimizers() -> Iterable[torch.optim.Optimizer]:
    """Every live optimizer that has stepped since this library was imported."""
    return list(_stepped)


def note_resized(parameter: Tensor) -> None:
    """Has the next step on the parameter compare shapes with the optimizer's state: fused ones would write past it."""
    _resized[parameter] = True


def note_left_behind(parameter: Tensor) -> None:
    """Has steps on the parameter refuse the state that optimizers keep for it now, unless it is replaced before."""
    states = (optimizer.state.get(parameter, {}) for optimizer, is_own in _stepped.items() if is_own)
    kept = [each for state in states for each in state.values() if isinstance(each, Tensor) and each.numel() > 1]
    if kept:
        _left_behind[parameter] = [(weakref.ref(each), _version(each)) for each in kept]


def call_before_next_step(parameter: Tensor, call: Callable[[torch.optim.Optimizer], bool]) -> None:
    """Calls it before each step on the parameter with a gradient until it returns True; one call for a parameter."""
    _before_next[parameter] = call


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if is_dynamo_compiling():  # a compiled step sees no changes of layouts
        return
    if not _stepped.get(optimizer):
        for call in before_first_step:
            call(optimizer)
    if not (_resized or _left_behind or _before_next):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _resized:
                check_kept(optimizer.state.get(parameter, {}), parameter, "its parameter")
                del _resized[parameter]
            if parameter in _left_behind:
                _refuse_left_behind(optimizer, parameter)
            if parameter in _before_next and parameter.grad is not None and _before_next[parameter](optimizer):
                del _before_next[parameter]


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if is_dynamo_compiling():
        return
    # Some wrappers leave out the constructor of their base class, and have no hooks.
    if optimizer not in _stepped and hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
        optimizer.register_load_state_dict_post_hook(_after_loading)
    _stepped[optimizer] = True


def _after_loading(optimizer: torch.optim.Optimizer) -> None:
    _stepped[optimizer] = False


def _refuse_left_behind(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    left = {id(each): version for ref, version in _left_behind[parameter] if (each := ref()) is not None}
    if not left:
        del _left_behind[parameter]
    for name, kept in optimizer.state.get(parameter, {}).items():
        if id(kept) in left and left[id(kept)] == _version(kept):
            raise BlockSparseError(
                f"{name} in the state of {type(optimizer).__name__} belongs to the blocks that a weight had before its "
                f"layout was set or loaded (values of {list(parameter.shape)} now): load the optimizer's state of the "
                "same time, start again with optimizer.state.clear(), or change layouts by "
                "blocksparse.sparsity.rewire, which moves the state along"
            )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
