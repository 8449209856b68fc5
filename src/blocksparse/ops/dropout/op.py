"""Dropout with a leaky ReLU as an operation: modules record it themselves."""

from __future__ import annotations

from ..registry import Op
from . import cpu, reference

DROPOUT = Op("dropout", cpu, reference, elsewhere=reference)
