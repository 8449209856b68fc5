"""Block-sparse attention as an operation: composed of PyTorch's own, which bring their gradients."""

from __future__ import annotations

from ..registry import Op
from . import cpu, reference, triton

# Gathered rows serve every device.
ATTENTION = Op("attention", triton, cpu, reference, elsewhere=cpu)
