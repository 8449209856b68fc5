"""What users put on a layer or a parameter: it goes along when another takes the place of these."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from dis import get_instructions
from functools import cache
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BlockSparseError
from ..nn.multi_weight import MultiWeightModule
from .sharding import is_dtensor

# The attribute in which a module has why weights were left dense, by the parameter's name, for the report.
REASONS = "_left_dense"

TREES = "_parameters", "_buffers", "_modules"
OF_MODULE = frozenset(vars(nn.Module()))


def own_forward(module: nn.Module) -> str | None:
    """Why no other module can take the place of this one, which computes something else than its class; or None."""
    mine = vars(module)
    if isinstance(module, torch.jit.ScriptModule):  # whose methods are all its own
        return None
    if "_hf_hook" in mine and "forward" in mine:
        return (
            "accelerate has hooked it: accelerate.hooks.remove_hook_from_module before, add_hook_to_module afterwards"
        )
    if "forward" in mine:
        return "its forward was set on the instance: `del module.forward` before (a forward hook would go along)"
    if mine.get("_compiled_call_impl") is not None:
        return "its own compile() was called: compile it afterwards"
    return None


def users_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that neither torch.nn.Module nor the module's class has set."""
    own = OF_MODULE | own_names(type(module)) | {REASONS}
    return {key: value for key, value in vars(module).items() if key not in own}


def carry_over(old: nn.Module, new: Any, name: str = "") -> Any:
    """Returns the new module, in the mode of the old one and with the hooks and all else that a user put on that one.

    That is attributes, buffers, parameters and modules that are not the class's own.

    Args:
        old: is left as it is. Hooks that are removed from it later are removed from the new one, too.
        new: which takes its place.
        name: of the module in the model, for the error.

    Raises:
        BlockSparseError: an attribute with a name that the new module's class uses for something else.
    """
    new.training = old.training
    for key in OF_MODULE:
        if "hook" in key:
            setattr(new, key, getattr(old, key))
    for key, value in users_attributes(old).items():
        if vars(new).get(key) is not value:
            _check_free(old, new, key, name)
            vars(new)[key] = value
    own = own_names(type(old))
    for tree in TREES:
        for key, value in vars(old)[tree].items():
            its = vars(new)[tree]
            if key in own or its.get(key) is value or (_has_several_weights(old) and _is_taken(new, key)):
                continue
            _check_free(old, new, key, name)
            its[key] = value
            if key in old._non_persistent_buffers_set:
                new._non_persistent_buffers_set.add(key)
    return new


def _check_free(old: nn.Module, new: nn.Module, key: str, name: str) -> None:
    if _is_taken(new, key) or (hasattr(type(new), key) and not hasattr(type(old), key)):
        expected = f"another name, as {type(new).__name__} has this one itself (rename it, or skip the layer)"
        raise BlockSparseError.expected(f"{name}.{key}".lstrip("."), expected, f"it on a {type(old).__name__}")


def _is_taken(module: nn.Module, key: str) -> bool:
    return key in vars(module) or any(key in vars(module)[tree] for tree in TREES)


def _has_several_weights(module: nn.Module) -> bool:
    """Whether its class names parameters by numbers of layers, or has others in their places, with the same names."""
    return isinstance(module, nn.RNNBase | MultiWeightModule)


def _own_names(kind: Any) -> frozenset[str]:
    """The names of attributes that the methods of a module's class, and of its bases, assign to instances."""
    names: set[str] = set()
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        if base.__module__.partition(".")[0] == "blocksparse":  # which sets some from outside
            names |= vars(base).keys() | set(vars(base).get("_state_names", ())) | {"bias"}
        for function in functions_of(base):
            names |= {each.argval for each in get_instructions(function) if each.opname == "STORE_ATTR"}
    return frozenset(names)


own_names: Callable[[Any], frozenset[str]] = cache(_own_names)


def functions_of(kind: type) -> Iterator[Any]:
    """The functions that a class defines itself, those of its properties too."""
    for value in vars(kind).values():
        parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
        for part in parts:
            function = unwrap(part) if callable(part) else None
            if hasattr(function, "__code__"):
                yield function


def hand_over_hooks(old: nn.Module, new: nn.Module) -> None:
    """Has hooks that PyTorch calls with the module that they were registered at get the one in its place."""
    hooks: Any = new._load_state_dict_pre_hooks.values()
    for hook in hooks:
        if getattr(hook, "with_module", False) and hook.module() is old:
            hook.module = weakref.ref(new)


# -- parameters --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Hooks:
    """Hooks of a parameter's gradient, which get it in the shape that they were written for.

    Args:
        hooks: as the parameter has them: those that are removed later are not called any more.
        take: makes of a tensor of the parameter's shape that of the one in its place: moves numbers, and drops some.
        shape: of the parameter.
    """

    hooks: Mapping[int, Callable[[Tensor], Tensor | None]]
    take: Callable[[Tensor], Tensor]
    shape: torch.Size

    def __call__(self, grad: Tensor) -> Tensor | None:
        if not self.hooks:
            return None
        seen = self._taken_back(grad)
        for hook in tuple(self.hooks.values()):
            changed = hook(seen)
            seen = seen if changed is None else changed
        return self.take(seen)

    def _taken_back(self, grad: Tensor) -> Tensor:
        numbers = torch.arange(1, self.shape.numel() + 1, dtype=torch.float64, device=grad.device)
        place = self.take(numbers.view(self.shape)).long()  # 0 is padding
        back = grad.new_zeros(self.shape.numel() + 1)
        back[place.flatten()] = grad.flatten()
        return back[1:].view(self.shape)


def carry_parameter(old: Any, new: Any, take: Callable[[Tensor], Tensor]) -> Any:
    """Returns the new parameter, with the attributes and hooks of the one whose place it takes.

    Args:
        old, new: the two.
        take: makes of a tensor of the old one's shape that of the new one. Hooks of the gradient get it in the old
            shape; those that are called once it is accumulated get the new parameter.
    """
    vars(new).update(vars(old))
    if old._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    if old._backward_hooks:
        trained = new.requires_grad
        same = is_dtensor(old)  # hooks get the shard, whichever it is
        hooks = old._backward_hooks
        new.requires_grad_().register_hook(_Hooks(hooks, _same if same else take, new.shape if same else old.shape))
        new.requires_grad_(trained)
    return new


def _same(tensor: Tensor) -> Tensor:
    return tensor
