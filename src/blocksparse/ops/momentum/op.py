"""The step with momentum as an operation: it writes in place, and autograd has nothing to record."""

from __future__ import annotations

from ..registry import Op
from . import cpu, reference

MOMENTUM = Op("momentum", cpu, reference, elsewhere=reference)
