"""The convolutions on the CPU: each is one call of the compiled core with addresses and a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..cpu_core import DTYPES, address
from ..cpu_plan import block_plan
from .plan import Axis, channel_plan, packed_taps, runs, three_axes

unsupported_reason = cpu_core.unsupported_reason


def conv(
    x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, layout: BlockLayout, transpose: bool,
    transposed: bool, axes: Sequence[Axis], activation: str | None,
) -> torch.Tensor:  # fmt: skip
    """Return activation(W * x + bias) `[n, *space, channels]`; the axes have sizes, strides, padding and dilation."""
    x, values = x.contiguous(), values.data.contiguous()  # as in `linear`
    dtype, images = x.dtype, cpu_core.row_count(x)
    out_channels, in_channels = layout.shape[::-1] if transpose else layout.shape
    input, output, kernel = _sizes(axes)
    from_size, to_size = (output, input) if transposed else (input, output)
    x_address = address("x", x, (images, *from_size, in_channels), dtype)
    values_address = address("values", values, (*layout.values_shape, *kernel), dtype)
    bias = None if bias is None else bias.contiguous()
    y = workspace.empty((images, *to_size, out_channels), dtype, x.device)
    axes = three_axes(axes)
    input, output, kernel = _sizes(axes)
    plan = channel_plan(layout, transpose)
    cpu_core.core().conv(
        isa=cpu_core.isa(), dtype=DTYPES[dtype], activation=activation or "none", transpose=transpose,
        block=layout.block_shape, kernel=kernel, images=images,
        x=x_address, x_size=output if transposed else input, in_channels=in_channels, values=values_address,
        bias=address("bias", bias, (out_channels,), dtype),
        y=address("y", y, (images, *to_size, out_channels), dtype), y_size=input if transposed else output,
        out_channels=out_channels,
        axes=[runs(axis, transposed, cut).packed for cut in (True, False) for axis in axes],
        start=plan.start, col=plan.col, position=plan.block, order=plan.order,
    )  # fmt: skip
    return y


def conv_wgrad(
    grad: torch.Tensor, x: torch.Tensor, layout: BlockLayout, transposed: bool, axes: Sequence[Axis]
) -> torch.Tensor:
    """Return the stored blocks of the gradient of the values, `[nnz, block_out, block_in, *kernel]`."""
    grad, x = grad.contiguous(), x.contiguous()
    dtype, images = x.dtype, cpu_core.row_count(x)
    out_channels, in_channels = layout.shape
    input, output, kernel = _sizes(axes)
    grad_size, x_size = (input, output) if transposed else (output, input)
    x_address = address("x", x, (images, *x_size, in_channels), dtype)
    grad_address = address("grad", grad, (images, *grad_size, out_channels), dtype)
    shape = *layout.values_shape, *kernel
    values = workspace.empty(shape, dtype, x.device)
    axes = three_axes(axes)
    input, output, kernel = _sizes(axes)
    plan = block_plan(layout)
    cpu_core.core().conv_wgrad(
        isa=cpu_core.isa(), dtype=DTYPES[dtype], block=layout.block_shape, images=images,
        grad=grad_address, grad_size=input if transposed else output, out_channels=out_channels, x=x_address,
        x_size=output if transposed else input, in_channels=in_channels, transposed=transposed,
        values=address("values", values, shape, dtype), axes=[packed_taps(axis) for axis in axes],
        row=plan.row, col=plan.col,
    )  # fmt: skip
    return values


def _sizes(axes: Sequence[Axis]) -> tuple[list[int], list[int], list[int]]:
    """Return the sizes of input, output and kernel."""
    return [axis.input for axis in axes], [axis.output for axis in axes], [axis.kernel for axis in axes]
