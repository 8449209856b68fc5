"""Copies of models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import BlockSparseError
from .references import HOOKS_OF_TENSORS, shared_with_copies


def copied(model: nn.Module, same: Mapping[int, Any] | None = None, otherwise: str = "") -> Any:
    """A deep copy of a model, in which `same` takes the place of parts by their id, as `copy.deepcopy` takes it.

    Tensors that were computed from others, which PyTorch does not copy, are copied with the values, and the attributes
    and hooks of parameters go along. Without `same` a BlockSparseError where the copy would call parts of the model.
    """
    expected = "one that copy.deepcopy can copy" + (f", or {otherwise}" if otherwise else "")
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
        made = copy.deepcopy(model, memo)
        for old, new in zip(model.parameters(), made.parameters(), strict=True):
            if new is not old:
                _carry(old, new, memo)
    except Exception as error:  # of any kind: it comes from the user's module
        raise BlockSparseError.expected("model", expected, f"{type(model).__name__}: {error}") from error
    return made


def _carry(old: Tensor, new: Tensor, memo: dict[int, Any]) -> None:
    """Gives a copy of a parameter the attributes and hooks that PyTorch does not copy."""
    vars(new).update(copy.deepcopy(vars(old), memo))
    for name in HOOKS_OF_TENSORS:
        if hooks := getattr(old, name, None):
            setattr(new, name, copy.copy(hooks))
