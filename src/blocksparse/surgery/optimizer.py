"""The optimizer's state of a parameter that changes its shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import BlockSparseError


def has_parameter(optimizer: Any, parameter: Tensor) -> bool:
    """Whether the optimizer trains the parameter; a BlockSparseError where it is no optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BlockSparseError.expected("optimizer", "a torch.optim.Optimizer", type(optimizer).__name__)
    return any(given is parameter for group in optimizer.param_groups for given in group["params"])


def check_state(optimizer: torch.optim.Optimizer, parameter: Tensor, name: str) -> None:
    """Raises a BlockSparseError unless all that is kept for the parameter is of its shape, or one number."""
    for key, kept in optimizer.state.get(parameter, {}).items():
        numbers = kept.numel() if isinstance(kept, Tensor) else len(kept) if isinstance(kept, list | tuple) else 1
        if numbers != 1 and not (isinstance(kept, Tensor) and kept.shape == parameter.shape):
            shape = list(kept.shape) if isinstance(kept, Tensor) else type(kept).__name__
            what = f"{key!r} of {name} of the parameter's shape {list(parameter.shape)}, or one number"
            raise BlockSparseError.expected(f"the state of {type(optimizer).__name__}", what, shape)
