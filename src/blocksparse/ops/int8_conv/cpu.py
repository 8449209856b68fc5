"""The convolutions in 8 bits on the CPU; the compiled core gathers the patches of a few outputs at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ...layout import BlockLayout
from .. import cpu_core
from ..conv.plan import Axis, is_linear, three_axes
from ..int8_linear import cpu
from .reference import of_patches

unsupported_reason = cpu_core.unsupported_reason


def int8_conv(
    x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, layout: BlockLayout, axes: Sequence[Axis],
    activation: str | None,
) -> Tensor:  # fmt: skip
    """Return activation(W * x + bias), `[n, *space, in] -> [n, *space, out]`."""
    size = x.shape[0], *(axis.output for axis in axes)
    rows, taps = x.contiguous().flatten(0, -2), math.prod(values.shape[3:])
    along = () if is_linear(axes) else three_axes(axes)
    y = cpu.product(rows, values, scales, bias, of_patches(layout, taps), activation, math.prod(size), along)
    return y.view(*size, layout.shape[0])
