"""The convolutions on the CPU: each is one call of the compiled core with addresses and a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..cpu_core import DTYPES, address
from ..cpu_plan import block_plan
from .plan import Axis, channel_plan, core_plan

unsupported_reason = cpu_core.unsupported_reason


def conv(
    x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, layout: BlockLayout, transpose: bool,
    transposed: bool, axes: Sequence[Axis], activation: str | None,
) -> torch.Tensor:  # fmt: skip
    """Return activation(W * x + bias) `[n, *space, channels]`; the axes have sizes, strides, padding and dilation."""
    x, values = x.contiguous(), values.data.contiguous()  # as in `linear`
    bias = None if bias is None else bias.contiguous()
    dtype, images = x.dtype, cpu_core.row_count(x)
    out_channels, in_channels = layout.shape[::-1] if transpose else layout.shape
    y_shape = images, *(axis.input if transposed else axis.output for axis in axes), out_channels
    y = workspace.empty(y_shape, dtype, x.device)  # fails before a plan of an image that is too large
    plan, rows = core_plan(tuple(axes), transposed), channel_plan(layout, transpose)
    (input, output, kernel), three = plan.sizes, plan.three
    from_size = output if transposed else input
    cpu_core.core().conv(
        isa=cpu_core.isa(), dtype=DTYPES[dtype], activation=activation or "none", transpose=transpose,
        block=layout.block_shape, kernel=three.kernel, images=images,
        x=address("x", x, (images, *from_size, in_channels), dtype),
        x_size=three.output if transposed else three.input, in_channels=in_channels,
        values=address("values", values, (*layout.values_shape, *kernel), dtype),
        bias=address("bias", bias, (out_channels,), dtype),
        y=address("y", y, y_shape, dtype), y_size=three.input if transposed else three.output,
        out_channels=out_channels, axes=plan.runs,
        start=rows.start, col=rows.col, position=rows.block, order=rows.order,
    )  # fmt: skip
    return y


def conv_wgrad(
    grad: torch.Tensor, x: torch.Tensor, layout: BlockLayout, transposed: bool, axes: Sequence[Axis]
) -> torch.Tensor:
    """Return the stored blocks of the gradient of the values, `[nnz, block_out, block_in, *kernel]`."""
    grad, x = grad.contiguous(), x.contiguous()
    dtype, images = x.dtype, cpu_core.row_count(x)
    out_channels, in_channels = layout.shape
    plan, blocks = core_plan(tuple(axes), transposed), block_plan(layout)
    (input, output, kernel), three = plan.sizes, plan.three
    grad_size, x_size = (input, output) if transposed else (output, input)
    shape = *layout.values_shape, *kernel
    values = workspace.empty(shape, dtype, x.device)
    cpu_core.core().conv_wgrad(
        isa=cpu_core.isa(), dtype=DTYPES[dtype], block=layout.block_shape, images=images,
        grad=address("grad", grad, (images, *grad_size, out_channels), dtype),
        grad_size=three.input if transposed else three.output, out_channels=out_channels,
        x=address("x", x, (images, *x_size, in_channels), dtype),
        x_size=three.output if transposed else three.input, in_channels=in_channels, transposed=transposed,
        values=address("values", values, shape, dtype), axes=plan.taps, row=blocks.row, col=blocks.col,
    )  # fmt: skip
    return values
