"""The convolutions on the CPU: tensors and plans to addresses, one call into the compiled core."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...layout import BlockLayout
from .. import cpu_core
from ..cpu_core import DTYPES
from ..linear import cpu as linear
from .plan import Axis, channel_plan, is_linear, packed_taps, runs, three_axes

refusal = cpu_core.refusal


def conv(
    x: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    layout: BlockLayout,
    transpose: bool,
    scatter: bool,
    axes: Sequence[Axis],
    activation: str | None,
) -> torch.Tensor:
    x, values = x.contiguous(), values.contiguous()
    out_channels = layout.shape[1 if transpose else 0]
    if is_linear(axes):
        matrix = values.reshape(layout.values_shape)
        y = linear.linear(x.reshape(-1, x.shape[-1]), matrix, bias, layout, transpose, activation)
        return y.reshape(*x.shape[:-1], out_channels)
    bias = None if bias is None else bias.contiguous()
    axes = three_axes(axes)
    big, small, kernel = ([getattr(axis, name) for axis in axes] for name in ("big", "small", "kernel"))
    plan = channel_plan(layout, transpose)
    y = torch.empty(x.shape[0], *(big if scatter else small)[5 - x.dim() :], out_channels, dtype=x.dtype)
    cpu_core.core().conv(
        isa=cpu_core.isa(),
        dtype=DTYPES[x.dtype],
        activation=activation or "none",
        transpose=transpose,
        block=layout.block_shape,
        kernel=kernel,
        images=x.shape[0],
        x=x.data_ptr(),
        x_size=small if scatter else big,
        in_channels=x.shape[-1],
        values=values.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        y_size=big if scatter else small,
        out_channels=out_channels,
        axes=[runs(axis, scatter, cut).packed for cut in (True, False) for axis in axes],
        start=plan.start,
        col=plan.col,
        position=plan.block,
        order=plan.order,
    )
    return y


def conv_wgrad(
    grad: torch.Tensor, x: torch.Tensor, layout: BlockLayout, scatter: bool, axes: Sequence[Axis]
) -> torch.Tensor:
    grad, x = grad.contiguous(), x.contiguous()
    kernel = [axis.kernel for axis in axes]
    if is_linear(axes):
        values = linear.linear_wgrad(grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1]), layout)
        return values.reshape(*layout.values_shape, *kernel)
    axes = three_axes(axes)
    big, small = ([getattr(axis, name) for axis in axes] for name in ("big", "small"))
    values = torch.empty(*layout.values_shape, *kernel, dtype=x.dtype)
    cpu_core.core().conv_wgrad(
        isa=cpu_core.isa(),
        dtype=DTYPES[x.dtype],
        block=layout.block_shape,
        images=x.shape[0],
        grad=grad.data_ptr(),
        grad_size=big if scatter else small,
        out_channels=grad.shape[-1],
        x=x.data_ptr(),
        x_size=small if scatter else big,
        in_channels=x.shape[-1],
        big_grad=scatter,
        values=values.data_ptr(),
        axes=[packed_taps(axis) for axis in axes],
        row=layout.row_of_block.astype(np.int32),
        col=layout.col_of_block.astype(np.int32, copy=False),
    )
    return values
