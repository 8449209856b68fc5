"""The step with momentum: the choice of its backend."""

from __future__ import annotations

from ..registry import Op
from . import cpu, reference

MOMENTUM = Op("momentum", cpu, reference, fallback=reference)
