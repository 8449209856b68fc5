"""Convolutions over planes on the CPU: images in `[n, channels, height, width]` memory, small blocks, stride 1.

The core's other convolutions need channels-last memory and use a vector for the outputs of a block. Here a vector holds
positions, so that small blocks waste nothing, and images need no copy in another format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..cpu_core import DTYPES, address
from ..cpu_plan import block_plan
from .plan import Axis, channel_plan

# Larger blocks fill vectors with their outputs.
_MAX_BLOCK = 8
# The sums of the weight gradient are a vector for each value.
_MAX_VALUES = 1 << 18
# Copies of images have margins as wide as the kernel.
_MAX_REACH = 64


def serves(x: Tensor, layout: BlockLayout, axes: Sequence[Axis]) -> bool:
    """Return whether the functions below compute a convolution of x, `[n, height, width, channels]`."""
    return (
        max(layout.block_shape) <= _MAX_BLOCK
        and x.dtype in (torch.float32, torch.float64)
        and not x.is_contiguous()
        and x.movedim(-1, 1).is_contiguous()
        and x.numel() > 0
        and _serves_axes(tuple(axes), layout.nnz * math.prod(layout.block_shape))
    )


@lru_cache(maxsize=4096)
def _serves_axes(axes: tuple[Axis, ...], values: int) -> bool:
    """Return whether kernels over these axes are served, given the number of values per tap."""
    return (
        len(axes) == 2
        and values * math.prod(axis.kernel for axis in axes) <= _MAX_VALUES
        and all(
            axis.stride == 1
            and min(axis.input, axis.output) > 0
            and axis.dilation * (axis.kernel - 1) + abs(axis.padding) <= _MAX_REACH
            for axis in axes
        )
    )


def conv(
    x: Tensor, values: Tensor, bias: Tensor | None, layout: BlockLayout, transpose: bool, transposed: bool,
    axes: Sequence[Axis], activation: str | None,
) -> Tensor | None:  # fmt: skip
    """Return activation(W * x + bias), also in memory of planes.

    Return None if a value is not finite and would meet the zeros around an image.
    """
    values = values.data.contiguous()
    dtype, planes = x.dtype, x.movedim(-1, 1)
    out_channels, in_channels = layout.shape[::-1] if transpose else layout.shape
    taps = [_taps(axis, transposed) for axis in axes]
    y = _empty(len(x), [tap[1] for tap in taps], out_channels, dtype)
    bias = None if bias is None else bias.contiguous()
    plan = channel_plan(layout, transpose)
    done = cpu_core.core().conv_planes(
        isa=cpu_core.isa(), dtype=DTYPES[dtype], activation=activation or "none", transpose=transpose,
        block=layout.block_shape, images=len(x), axes=taps,
        x=address("x", planes, (len(x), in_channels, *(tap[0] for tap in taps)), dtype), in_channels=in_channels,
        values=address("values", values, (*layout.values_shape, *(axis.kernel for axis in axes)), dtype),
        bias=address("bias", bias, (out_channels,), dtype), y=y.data_ptr(), out_channels=out_channels,
        start=plan.start, col=plan.col, position=plan.block,
    )  # fmt: skip
    return y if done else None


def conv_wgrad(grad: Tensor, x: Tensor, layout: BlockLayout, transposed: bool, axes: Sequence[Axis]) -> Tensor:
    """Return the stored blocks of the gradient of the values, `[nnz, block_out, block_in, *kernel]`."""
    dtype, images = x.dtype, len(x)
    grad, x = grad.movedim(-1, 1).contiguous(), x.movedim(-1, 1)
    taps = [_taps(axis, transposed) for axis in axes]
    shape = *layout.values_shape, *(axis.kernel for axis in axes)
    values = workspace.empty(shape, dtype, x.device)
    out_channels, in_channels = layout.shape
    plan = block_plan(layout)
    cpu_core.core().conv_planes_wgrad(
        isa=cpu_core.isa(), dtype=DTYPES[dtype], block=layout.block_shape, images=images, axes=taps,
        grad=address("grad", grad, (images, out_channels, *(tap[1] for tap in taps)), dtype), out_channels=out_channels,
        x=address("x", x, (images, in_channels, *(tap[0] for tap in taps)), dtype), in_channels=in_channels,
        values=address("values", values, shape, dtype), row=plan.row, col=plan.col,
    )  # fmt: skip
    return values


def _taps(axis: Axis, transposed: bool) -> tuple[int, int, int, int, int]:
    """Return the sizes of input and output of this pass, and the taps: their number, the first's offset, the step."""
    if transposed:
        return axis.output, axis.input, axis.kernel, axis.padding, -axis.dilation
    return axis.input, axis.output, axis.kernel, -axis.padding, axis.dilation


def _empty(images: int, size: Sequence[int], channels: int, dtype: torch.dtype) -> Tensor:
    """Return an empty `[n, height, width, channels]` in memory of planes, which is no view."""
    height, width = size
    area = height * width
    count = images * channels * area
    shape, strides = (images, height, width, channels), (channels * area, width, 1, area)
    if count * dtype.itemsize < workspace.MIN_BYTES:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    # This tensor keeps the memory from being given to another thread.
    numbers = workspace.empty((count,), dtype, torch.device("cpu"))
    return torch.empty(0, dtype=dtype, device="cpu").set_(numbers.untyped_storage(), 0, shape, strides)
