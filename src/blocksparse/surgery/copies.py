"""Copies of models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import BlockSparseError


def copied(model: nn.Module, same: Mapping[int, Any] | None = None, otherwise: str = "") -> Any:
    """A deep copy of a model; of tensors that were computed from others, which PyTorch does not copy, with the values.

    Args:
        model: any module. A weight that `torch.nn.utils.prune` or `weight_norm` computes is computed again in each
            call.
        same: what takes the place of parts of the model, by the id of the part: as `copy.deepcopy` takes it.
        otherwise: the way out where a model cannot be copied, for the error.

    Raises:
        BlockSparseError: a model with something in it that cannot be copied, a lock say.
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
