"""One step of training, as tests of methods call it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def update(optimizer: Any, loss: Tensor, *methods: Any) -> list[bool]:
    """Update the parameters by the gradient of a loss, then call `step` of the methods; return what they return."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return [method.step() for method in methods]
