"""The gated pair on the CPU: two linear products."""

from __future__ import annotations

from torch import Tensor

from ...layout import BlockLayout
from .. import cpu_core
from ..linear import linear

unsupported_reason = cpu_core.unsupported_reason


def gated_linear(
    x: Tensor, gate: Tensor, gate_layout: BlockLayout, up: Tensor, up_layout: BlockLayout, gate_bias: Tensor | None,
    up_bias: Tensor | None, activation: str | None,
) -> Tensor:  # fmt: skip
    return linear(x, gate, gate_layout, gate_bias, activation).mul_(linear(x, up, up_layout, up_bias))
