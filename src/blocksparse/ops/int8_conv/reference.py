"""The definition of the convolutions in 8 bits: the linear product in 8 bits of gathered patches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...layout import BlockLayout
from ..conv.plan import Axis
from ..conv.reference import taps_of
from ..int8_linear import reference

unsupported_reason = reference.unsupported_reason


def int8_conv(
    x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, layout: BlockLayout, axes: Sequence[Axis],
    activation: str | None,
) -> Tensor:  # fmt: skip
    """Return activation(W * x + bias), `[n, *space, in] -> [n, *space, out]`."""
    rows = patches(x, layout, axes)
    blocks, wide = values.movedim(2, -1).flatten(2), of_patches(layout, math.prod(values.shape[3:]))
    y = reference.int8_linear(rows.flatten(0, -2), blocks, scales, bias, wide, activation)
    return y.reshape(*rows.shape[:-1], layout.shape[0])


def patches(x: Tensor, layout: BlockLayout, axes: Sequence[Axis]) -> Tensor:
    """Return the patch of each output, with zeros outside of the image: `[n, *space, in] -> [n, *space, in * taps]`.

    Each block of channels has its inputs of all taps side by side, tap by tap.
    """
    kernel, (_, width) = [axis.kernel for axis in axes], layout.block_shape
    size = [axis.output for axis in axes]
    result = x.new_zeros(x.shape[0], *size, layout.grid[1], math.prod(kernel), width)
    for (_, *tap), output, input in taps_of(axes):
        result[output][..., int(np.ravel_multi_index(tap, kernel)), :] = x[input].unflatten(-1, (-1, width))
    return result.flatten(-3)


def of_patches(layout: BlockLayout, taps: int) -> BlockLayout:
    """Return the layout of the linear product of patches: the same blocks, each with the inputs of all taps."""

    def make() -> BlockLayout:
        height, width = layout.block_shape
        return BlockLayout.from_indices(layout.row_of_block, layout.col_of_block, layout.grid, (height, taps * width))

    return layout.derived(("patches", taps), make)
