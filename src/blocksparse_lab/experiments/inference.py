"""Time models side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse.measure import Samples, alternate

from ..machine import machine

SECONDS = 2.0  # per model


def race(models: Mapping[str, nn.Module], x: Tensor) -> tuple[Samples, dict[str, Any]]:
    """Time inference of models on one input, in turn in one process; also return the machine, with its load before."""
    here = machine()
    with torch.no_grad():
        calls = {name: (lambda model=model: model(x)) for name, model in models.items()}
        return alternate(calls, budget=SECONDS * len(calls)), here
