"""Takes parametrizations off modules, without those of their copies."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize


def take_off(module: nn.Module, name: str, leave_parametrized: bool) -> None:
    """Removes the parametrizations of a parameter, but not those of copies.

    A parametrized module has a class of its own, which copies (a running mean, say) share; PyTorch deletes the
    parameter's property from that class, so that they would lose it too.
    """
    kind = type(module)
    module.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
    parametrize.remove_parametrizations(module, name, leave_parametrized=leave_parametrized)
