"""Puts parametrizations on modules whose checkpoints load without them, and takes them off again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .sharding import is_dtensor


def put_on(module: nn.Module, name: str, parametrization: nn.Module) -> None:
    """Parametrizes a parameter by something with `plain`, a function of the parameter.

    State dicts of the module have `plain` of the parameter too, under its own name: so a checkpoint from the middle of
    the training loads into the dense model, where that has the parameter.
    """
    # Without the trial run, which would draw random numbers.
    parametrize.register_parametrization(module, name, parametrization, unsafe=True)
    module.register_state_dict_post_hook(_add_plain)
    module.register_load_state_dict_pre_hook(_leave_out_plain)


def take_off(module: nn.Module, name: str, leave_parametrized: bool) -> None:
    """Removes the parametrizations of a parameter, but not those of copies.

    A parametrized module has a class of its own, which copies (a running mean, say) share; PyTorch deletes the
    parameter's property from that class, so that they would lose it too.
    """
    kind = type(module)
    module.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
    parametrize.remove_parametrizations(module, name, leave_parametrized=leave_parametrized)


@torch.no_grad()
def _add_plain(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, plain, original in _parametrized(module):
        if f"{prefix}parametrizations.{name}.original" in state and not is_dtensor(original):
            state[prefix + name] = plain(original)


def _leave_out_plain(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, _plain, _original in _parametrized(module):
        if f"{prefix}parametrizations.{name}.original" in state:
            state.pop(prefix + name, None)


def _parametrized(module: Any) -> list[tuple[str, Any, Any]]:
    """The parameters of a module, by name, that `put_on` parametrized; none once they are taken off."""
    if not parametrize.is_parametrized(module):
        return []
    found = module.parametrizations.items()
    return [(name, each[0].plain, each.original) for name, each in found if hasattr(each[0], "plain")]
