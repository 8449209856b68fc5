"""Moves what users added to a module or parameter, such as hooks and attributes, to its replacement."""

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

# The attribute of a module with the reasons why its parameters were left dense, by name. `report` shows them.
REASONS = "_left_dense"

TREES = "_parameters", "_buffers", "_modules"
OF_MODULE = frozenset(vars(nn.Module()))


def record_reasons(model: nn.Module, reasons: Mapping[str, str]) -> None:
    """Record why weights of a model were left dense, by name; `report` reads it."""
    for name, reason in reasons.items():
        module, _, parameter = name.rpartition(".")
        vars(model.get_submodule(module)).setdefault(REASONS, {})[parameter] = reason


def users_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that neither torch.nn.Module nor the module's class has set."""
    own = OF_MODULE | own_names(type(module)) | {REASONS}
    return {key: value for key, value in vars(module).items() if key not in own}


def carry_over(old: nn.Module, new: Any, name: str = "") -> Any:
    """Return the new module with the mode and hooks of the old one, and everything that users added to it.

    Args:
        old: the replaced module, which is left as it is. Hooks that are removed from it later are removed from the new
            one, too.
        new: its replacement.
        name: the module's name in the model, for the error.

    Raises:
        BlockSparseError: a user's attribute whose name the new module's class uses for something else.
    """
    new.training = old.training
    for key in OF_MODULE:
        if "hook" in key:
            setattr(new, key, getattr(old, key))
    for key, value in users_attributes(old).items():
        if vars(new).get(key) is not value:
            _check_name_is_free(old, new, key, name)
            vars(new)[key] = value
    own = own_names(type(old))
    # These classes name parameters by themselves, so that the replacement has entries of the same names.
    names_parameters = isinstance(old, nn.RNNBase | MultiWeightModule)
    for tree in TREES:
        for key, value in vars(old)[tree].items():
            its = vars(new)[tree]
            if key in own or its.get(key) is value or (names_parameters and _is_taken(new, key)):
                continue
            _check_name_is_free(old, new, key, name)
            its[key] = value
            if key in old._non_persistent_buffers_set:
                new._non_persistent_buffers_set.add(key)
    return new


def _check_name_is_free(old: nn.Module, new: nn.Module, key: str, name: str) -> None:
    """Raise a BlockSparseError if the replacement uses an attribute's name for something else."""
    if _is_taken(new, key) or (hasattr(type(new), key) and not hasattr(type(old), key)):
        raise BlockSparseError(
            f"{f'{name}.{key}'.lstrip('.')} on a {type(old).__name__}: {type(new).__name__} uses this name itself. "
            "Rename the attribute, or skip the layer."
        )


def _is_taken(module: nn.Module, key: str) -> bool:
    """Return whether a module has an attribute, parameter, buffer or submodule of this name."""
    return key in vars(module) or any(key in vars(module)[tree] for tree in TREES)


def _own_names(kind: Any) -> frozenset[str]:
    """Return the names that the methods of a module's class and its bases assign to instances."""
    names: set[str] = set()
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        if base.__module__.partition(".")[0] == "blocksparse":  # our code also sets some from outside
            names |= vars(base).keys() | set(vars(base).get("_state_names", ())) | {"bias"}
        for function in functions_of(base):
            names |= {each.argval for each in get_instructions(function) if each.opname == "STORE_ATTR"}
    return frozenset(names)


own_names: Callable[[Any], frozenset[str]] = cache(_own_names)


def functions_of(kind: type) -> Iterator[Any]:
    """Yield the functions that a class defines itself, those of its properties too."""
    for value in vars(kind).values():
        parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
        for part in parts:
            function = unwrap(part) if callable(part) else None
            if hasattr(function, "__code__"):
                yield function


def hand_over_hooks(old: nn.Module, new: nn.Module) -> None:
    """Make hooks that PyTorch calls with their module get the replacement instead."""
    hooks: Any = new._load_state_dict_pre_hooks.values()
    for hook in hooks:
        if getattr(hook, "with_module", False) and hook.module() is old:
            hook.module = weakref.ref(new)


# -- parameters --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Hooks:
    """A gradient hook of a replacement that calls the old parameter's hooks with the gradient in the old shape.

    Args:
        hooks: the old parameter's own dict, so that removed hooks are not called any more.
        convert: maps a tensor of the old shape to the new shape; it moves and drops elements.
        shape: the old shape.
    """

    hooks: Mapping[int, Callable[[Tensor], Tensor | None]]
    convert: Callable[[Tensor], Tensor]
    shape: torch.Size

    def __call__(self, grad: Tensor) -> Tensor | None:
        if not self.hooks:
            return None
        seen = self._in_old_shape(grad)
        for hook in tuple(self.hooks.values()):
            changed = hook(seen)
            seen = seen if changed is None else changed
        return self.convert(seen)

    def _in_old_shape(self, grad: Tensor) -> Tensor:
        """Return the gradient in the old parameter's shape, with 0 for dropped elements."""
        numbers = torch.arange(1, self.shape.numel() + 1, dtype=torch.float64, device=grad.device)
        place = self.convert(numbers.view(self.shape)).long()  # 0 is padding
        back = grad.new_zeros(self.shape.numel() + 1)
        back[place.flatten()] = grad.flatten()
        return back[1:].view(self.shape)


def carry_parameter(old: Any, new: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Return the new parameter with the attributes and hooks of the old one.

    Args:
        old, new: the parameters.
        convert: maps a tensor of the old shape to the new shape. Gradient hooks get the gradient in the old shape;
            hooks after accumulation get the new parameter.
    """
    vars(new).update(vars(old))
    if old._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    if old._backward_hooks:
        trained = new.requires_grad
        same = is_dtensor(old)  # hooks get the shard in its own shape
        hooks = old._backward_hooks
        new.requires_grad_().register_hook(
            _Hooks(hooks, _identity if same else convert, new.shape if same else old.shape)
        )
        new.requires_grad_(trained)
    return new


def _identity(tensor: Tensor) -> Tensor:
    return tensor
