"""The linear products on the CPU: tensors and plans to addresses, one call into the compiled core."""

from __future__ import annotations

import threading

import torch

from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..cpu_core import DTYPES
from .plan import block_plan, column_plan, row_plan

refusal = cpu_core.refusal


def linear(
    x: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    layout: BlockLayout,
    transpose: bool,
    activation: str | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    x, values = _features_contiguous(x), values.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = out
    if y is None:
        y = workspace.empty((x.shape[0], layout.shape[1 if transpose else 0]), x.dtype, x.device)
    if layout.block_shape == (1, 1):
        _csr_linear(x, values, bias, layout, transpose, activation, y)
        return y
    plan = row_plan(layout, transpose)
    cpu_core.core().linear(
        isa=cpu_core.isa(),
        dtype=DTYPES[x.dtype],
        activation=activation or "none",
        transpose=transpose,
        block=layout.block_shape,
        tokens=x.shape[0],
        x=x.data_ptr(),
        x_stride=x.stride(0),
        in_features=x.shape[1],
        values=values.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        out_features=y.shape[1],
        start=plan.start,
        col=plan.col,
        position=plan.block,
        row=plan.row,
        begin=plan.begin,
        end=plan.end,
        task_start=plan.task_start,
    )
    return y


def linear_wgrad(grad: torch.Tensor, x: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    grad, x = _features_contiguous(grad), _features_contiguous(x)
    values = torch.empty(layout.values_shape, dtype=x.dtype)
    if layout.block_shape == (1, 1):
        _csr_wgrad(grad, x, layout, values)
        return values
    plan = block_plan(layout)
    cpu_core.core().linear_wgrad(
        isa=cpu_core.isa(),
        dtype=DTYPES[x.dtype],
        block=layout.block_shape,
        tokens=x.shape[0],
        grad=grad.data_ptr(),
        grad_stride=grad.stride(0),
        out_features=grad.shape[1],
        x=x.data_ptr(),
        x_stride=x.stride(0),
        in_features=x.shape[1],
        values=values.data_ptr(),
        row=plan.row,
        col=plan.col,
        task_start=plan.task_start,
    )
    return values


def gradients(
    grad: torch.Tensor, x: torch.Tensor, values: torch.Tensor, layout: BlockLayout, needs_x: bool, needs_bias: bool
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None] | None:
    """Those of x, values and bias of a layout of single numbers in one call, or None where that is not to be had.

    The numbers of `linear` and `linear_wgrad`, which would each bring the same rows of `grad` from memory.
    """
    core, isa, dtype = cpu_core.core(), cpu_core.isa(), DTYPES[x.dtype]
    size = 0
    if layout.block_shape == (1, 1):
        size = core.csr_gradients_working_bytes(isa, dtype, *grad.shape, x.shape[1])
    if not size:
        return None
    grad, x, values = _features_contiguous(grad), _features_contiguous(x), values.contiguous()
    grad_x = workspace.empty(x.shape, x.dtype, x.device) if needs_x else None
    grad_values, working = torch.empty(layout.values_shape, dtype=x.dtype), _working(size, x)
    grad_bias = torch.empty(grad.shape[1], dtype=x.dtype) if needs_bias else None
    start, col, position = column_plan(layout) if needs_x else (layout.row_start, layout.col_of_block, None)
    core.csr_gradients(
        isa=isa,
        dtype=dtype,
        tokens=x.shape[0],
        grad=grad.data_ptr(),
        grad_stride=grad.stride(0),
        out_features=grad.shape[1],
        x=x.data_ptr(),
        x_stride=x.stride(0),
        in_features=x.shape[1],
        values=values.data_ptr(),
        grad_x=0 if grad_x is None else grad_x.data_ptr(),
        grad_values=grad_values.data_ptr(),
        grad_bias=0 if grad_bias is None else grad_bias.data_ptr(),
        working=working.data_ptr(),
        start=start,
        col=col,
        position=position,
    )
    return grad_x, grad_values, grad_bias


def _csr_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    layout: BlockLayout,
    transpose: bool,
    activation: str | None,
    y: torch.Tensor,
) -> None:
    start, col, position = layout.row_start, layout.col_of_block, None
    if transpose:
        start, col, position = column_plan(layout)
    core, isa, dtype = cpu_core.core(), cpu_core.isa(), DTYPES[x.dtype]
    working = _working(core.csr_working_bytes(isa, dtype, *x.shape), x)
    core.csr_linear(
        isa=isa,
        dtype=dtype,
        activation=activation or "none",
        tokens=x.shape[0],
        x=x.data_ptr(),
        x_stride=x.stride(0),
        in_features=x.shape[1],
        values=values.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        working=working.data_ptr(),
        start=start,
        col=col,
        position=position,
    )


def _csr_wgrad(grad: torch.Tensor, x: torch.Tensor, layout: BlockLayout, values: torch.Tensor) -> None:
    core, isa, dtype = cpu_core.core(), cpu_core.isa(), DTYPES[x.dtype]
    working = _working(core.csr_wgrad_working_bytes(isa, dtype, *grad.shape, x.shape[1]), x)
    core.csr_wgrad(
        isa=isa,
        dtype=dtype,
        tokens=x.shape[0],
        grad=grad.data_ptr(),
        grad_stride=grad.stride(0),
        out_features=grad.shape[1],
        x=x.data_ptr(),
        x_stride=x.stride(0),
        in_features=x.shape[1],
        values=values.data_ptr(),
        working=working.data_ptr(),
        start=layout.row_start,
        col=layout.col_of_block,
    )


class _Small(threading.local):
    """Working memory that each thread keeps, as allocating it anew takes as long as the product of a small layer."""

    memory = torch.empty(0)


_small = _Small()


def _working(size: int, x: torch.Tensor) -> torch.Tensor:
    """Memory for one call, of whole cache lines."""
    if size > workspace.LEAST:
        return workspace.empty((size // 4,), torch.float32, x.device)
    if _small.memory.nbytes < size:
        _small.memory = torch.empty(size // 4)
    return _small.memory


def _features_contiguous(x: torch.Tensor) -> torch.Tensor:
    # The kernels take any distance between tokens, but the features of one token side by side.
    return x if x.stride(1) == 1 else x.contiguous()
