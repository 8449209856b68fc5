"""The optimizer's state of a parameter that changes its shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checked import check_kept
from ..errors import BlockSparseError


def has_parameter(optimizer: Any, parameter: Tensor) -> bool:
    """Whether the optimizer trains the parameter; a BlockSparseError where it is no optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BlockSparseError.expected("optimizer", "a torch.optim.Optimizer", type(optimizer).__name__)
    return any(given is parameter for group in optimizer.param_groups for given in group["params"])


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of what accelerate or Lightning put around it, which has neither its hooks nor its state."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def check_optimizer(optimizer: Any, parameter: Tensor, name: str) -> None:
    """Raises a BlockSparseError unless the optimizer, if any, has the parameter, and a state that can follow it."""
    if optimizer is None:
        return
    if not has_parameter(optimizer, parameter):
        raise BlockSparseError.expected("optimizer", f"one that has the parameter {name}", type(optimizer).__name__)
    check_kept(optimizer.state.get(parameter, {}), parameter, name)
