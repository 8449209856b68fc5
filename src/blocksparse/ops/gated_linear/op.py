"""The gated pair of products: the choice of its backend."""

from __future__ import annotations

from ..registry import Op
from . import cpu, reference, triton

GATED_LINEAR = Op("gated_linear", triton, cpu, reference)
