"""Copies of models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import BlockSparseError


def copied(model: nn.Module, same: Mapping[int, Any] | None = None, otherwise: str = "") -> Any:
    """A deep copy of a model, in which `same` takes the place of parts by their id, as `copy.deepcopy` takes it.

    Tensors that were computed from others, which PyTorch does not copy, are copied with the values.
    """
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        return copy.deepcopy(model, computed | dict(same or {}))
    except Exception as error:  # of any kind: it comes from the user's module
        expected = "one that copy.deepcopy can copy" + (f", or {otherwise}" if otherwise else "")
        raise BlockSparseError.expected("model", expected, f"{type(model).__name__}: {error}") from error
