"""Copies and modes of whole models, and parametrizations that state dicts, copies and resuming survive."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

from ..checked import check_model
from ..errors import BlockSparseError
from .references import HOOKS_OF_TENSORS, shared_with_copies
from .sharding import is_dtensor

WRAPPERS = DataParallel, DistributedDataParallel


def copy_model(model: nn.Module, same: Mapping[int, Any] | None = None, otherwise: str = "") -> Any:
    """Return a deep copy of a model, with the attributes and hooks of its parameters.

    `copy.deepcopy` refuses tensors that were computed from others; here they are copied with their values.

    Args:
        model: any module.
        same: objects to use instead of copies, by the id of the original, like the memo of `copy.deepcopy`.
        otherwise: what to try instead, for the error.

    Raises:
        BlockSparseError: a module that cannot be copied or, without `same`, whose copy would call parts of the model.
    """
    expected = "a module that copy.deepcopy can copy" + (f", or {otherwise}" if otherwise else "")
    if same is None and (where := shared_with_copies(model)):
        got = f"{type(model).__name__}: {where} refers to a part of the model, and a copy would use the original's"
        raise BlockSparseError.expected("model", expected, got)
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    memo = computed | dict(same or {})
    try:
        copied = copy.deepcopy(model, memo)
        for old, new in zip(model.parameters(), copied.parameters(), strict=True):
            if new is not old:
                _copy_attributes_and_hooks(old, new, memo)
    except Exception as error:  # the user's module may raise anything
        raise BlockSparseError.expected("model", expected, f"{type(model).__name__}: {error}") from error
    return copied


def _copy_attributes_and_hooks(old: Tensor, new: Tensor, memo: dict[int, Any]) -> None:
    """Give a copied parameter the attributes and hooks that PyTorch does not copy."""
    vars(new).update(copy.deepcopy(vars(old), memo))
    for name in HOOKS_OF_TENSORS:
        if hooks := getattr(old, name, None):
            setattr(new, name, copy.copy(hooks))


def unwrapped_model(model: Any, argument: str = "model") -> nn.Module:
    """Return the module that `torch.compile`, DataParallel or DistributedDataParallel wraps; others as they are.

    Raises:
        BlockSparseError: no module.
    """
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module) or isinstance(model, WRAPPERS):
        model = inner if isinstance(inner, nn.Module) else model.module
    check_model(model, argument)
    return model


def split_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments in an example: a tensor, a tuple or list of arguments, or a dict."""
    if isinstance(example, Mapping):
        return (), dict(example)
    is_sequence = isinstance(example, tuple | list) and not isinstance(example, PackedSequence)
    return tuple(example) if is_sequence else (example,), {}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the `with` block, and restore the modes of all modules behind it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def uncompiled() -> Iterator[None]:
    """Turn off what bypasses hooks of modules: fused encoder layers and compiled code."""
    fused = torch.backends.mha.get_fastpath_enabled()
    # Without this module, whose import takes seconds, nothing is compiled.
    may_be_compiled = "torch._dynamo" in sys.modules
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.compiler.set_stance("force_eager") if may_be_compiled else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def parameter_device(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def add_parametrization(module: nn.Module, name: str, parametrization: nn.Module) -> None:
    """Parametrize a parameter; state dicts also have its plain value, so that they load into the dense model.

    Args:
        module: the module.
        name: the parameter's name.
        parametrization: a module with a method `plain`, which maps the original parameter to that value.
    """
    # The trial run of the safe way would draw random numbers.
    parametrize.register_parametrization(module, name, parametrization, unsafe=True)
    module.register_state_dict_post_hook(_save_plain)
    module.register_load_state_dict_pre_hook(_ignore_plain)


def remove_parametrization(module: nn.Module, name: str, leave_parametrized: bool) -> None:
    """Remove the parametrizations of a parameter from this module only.

    A parametrized module has a class of its own, which its copies (an averaged model, say) share. PyTorch deletes the
    parameter's property from that class, so the module gets a class of its own first.
    """
    kind = type(module)
    module.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
    parametrize.remove_parametrizations(module, name, leave_parametrized=leave_parametrized)


@torch.no_grad()
def _save_plain(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Add plain values to a state dict."""
    for name, plain, original in _parametrizations(module):
        if f"{prefix}parametrizations.{name}.original" in state and not is_dtensor(original):
            state[prefix + name] = plain(original)


def _ignore_plain(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Remove plain values from a state dict before it is loaded."""
    for name, _plain, _original in _parametrizations(module):
        if f"{prefix}parametrizations.{name}.original" in state:
            state.pop(prefix + name, None)


def _parametrizations(module: Any) -> list[tuple[str, Any, Any]]:
    """Return name, `plain` and original of the parameters that `add_parametrization` parametrized."""
    if not parametrize.is_parametrized(module):
        return []
    items = module.parametrizations.items()
    return [(name, each[0].plain, each.original) for name, each in items if hasattr(each[0], "plain")]
