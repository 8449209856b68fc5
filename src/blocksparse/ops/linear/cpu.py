"""The linear products on the CPU: tensors and plans to addresses, one call into the compiled core."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..checks import check_operands
from ..cpu_core import DTYPES, address, features_together, new, rows
from .plan import block_plan, column_plan, row_plan

refusal = cpu_core.refusal
_CPU = torch.device("cpu")


def linear(
    x: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    layout: BlockLayout,
    transpose: bool,
    activation: str | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if out is not None and not out.is_contiguous():
        y = linear(x, values, bias, layout, transpose, activation)
        check_operands(y.dtype, y.device, out=(out, tuple(y.shape)))
        return out.copy_(y)
    # `.data`: what the values are now. Another thread may give the parameter other ones, while the core reads these.
    x, values = features_together(x), values.data.contiguous()
    bias = bias if bias is None else bias.contiguous()
    core, isa, dtype, tokens = cpu_core.core(), cpu_core.isa(), x.dtype, cpu_core.length(x)
    out_features, in_features = layout.shape[::-1] if transpose else layout.shape
    x_address, x_stride = rows("x", x, (tokens, in_features), dtype)
    values_address = address("values", values, layout.values_shape, dtype)
    bias_address = address("bias", bias, (out_features,), dtype)
    if out is None:
        y, y_address = new((tokens, out_features), dtype)
    else:
        y, y_address = out, address("out", out, (tokens, out_features), dtype)
    if layout.block_shape == (1, 1):
        start, col, position = column_plan(layout) if transpose else (layout.row_start, layout.col_of_block, None)
        working = _working(core.csr_working_bytes(isa, DTYPES[dtype], tokens, in_features))
        core.csr_linear(
            isa=isa,
            dtype=DTYPES[dtype],
            activation=activation or "none",
            tokens=tokens,
            x=x_address,
            x_stride=x_stride,
            in_features=in_features,
            values=values_address,
            bias=bias_address,
            y=y_address,
            out_features=out_features,
            working=address("working", working, working.shape, torch.uint8),
            working_bytes=working.nbytes,
            start=start,
            col=col,
            position=position,
        )
        return y
    plan = row_plan(layout, transpose)
    core.linear(
        isa=isa,
        dtype=DTYPES[dtype],
        activation=activation or "none",
        transpose=transpose,
        block=layout.block_shape,
        tokens=tokens,
        x=x_address,
        x_stride=x_stride,
        in_features=in_features,
        values=values_address,
        bias=bias_address,
        y=y_address,
        out_features=out_features,
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
    grad, x = features_together(grad), features_together(x)
    core, operands = cpu_core.core(), _gradient_operands(grad, x, layout)
    values = torch.empty(layout.values_shape, dtype=x.dtype, device=_CPU)
    operands["values"] = address("values", values, layout.values_shape, x.dtype)
    if layout.block_shape == (1, 1):
        sizes = operands["tokens"], *layout.shape
        working = _working(core.csr_wgrad_working_bytes(operands["isa"], operands["dtype"], *sizes))
        core.csr_wgrad(**operands, **_handed(working), start=layout.row_start, col=layout.col_of_block)
        return values
    plan = block_plan(layout)
    core.linear_wgrad(**operands, block=layout.block_shape, row=plan.row, col=plan.col, task_start=plan.task_start)
    return values


def gradients(
    grad: torch.Tensor, x: torch.Tensor, values: torch.Tensor, layout: BlockLayout, needs_x: bool, needs_bias: bool
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None] | None:
    """Computes those of x, values and bias in one call for a layout of single numbers; None where it cannot.

    The numbers of `linear` and `linear_wgrad`, which would each bring the same rows of `grad` from memory.
    """
    if layout.block_shape != (1, 1):
        return None
    core, dtype = cpu_core.core(), x.dtype
    size = core.csr_gradients_working_bytes(cpu_core.isa(), DTYPES[dtype], cpu_core.length(x), *layout.shape)
    if not size:
        return None
    grad, x, values = features_together(grad), features_together(x), values.data.contiguous()
    operands, working = _gradient_operands(grad, x, layout), _working(size)
    grad_x, grad_x_address = new(x.shape, dtype) if needs_x else (None, 0)
    grad_values = torch.empty(layout.values_shape, dtype=x.dtype, device=_CPU)
    grad_bias = torch.empty(layout.shape[:1], dtype=dtype, device=_CPU) if needs_bias else None
    start, col, position = column_plan(layout) if needs_x else (layout.row_start, layout.col_of_block, None)
    core.csr_gradients(
        **operands,
        values=address("values", values, layout.values_shape, dtype),
        grad_x=grad_x_address,
        grad_values=address("grad_values", grad_values, layout.values_shape, dtype),
        grad_bias=address("grad_bias", grad_bias, layout.shape[:1], dtype),
        **_handed(working),
        start=start,
        col=col,
        position=position,
    )
    return grad_x, grad_values, grad_bias


def _gradient_operands(grad: torch.Tensor, x: torch.Tensor, layout: BlockLayout) -> dict[str, Any]:
    """What the products of grad and x take of them."""
    tokens, (out_features, in_features) = cpu_core.length(x), layout.shape
    x_address, x_stride = rows("x", x, (tokens, in_features), x.dtype)
    grad_address, grad_stride = rows("grad", grad, (tokens, out_features), x.dtype)
    return {
        "isa": cpu_core.isa(),
        "dtype": DTYPES[x.dtype],
        "tokens": tokens,
        "grad": grad_address,
        "grad_stride": grad_stride,
        "out_features": out_features,
        "x": x_address,
        "x_stride": x_stride,
        "in_features": in_features,
    }


class _Small(threading.local):
    """Working memory that each thread keeps: allocating it per call takes as long as the product of a small layer."""

    memory = torch.empty(0, dtype=torch.uint8, device=_CPU)


_small = _Small()


def _working(size: int) -> torch.Tensor:
    """Returns memory for one call, at least `size` bytes."""
    if size > workspace.MIN_BYTES:
        return workspace.empty((size,), torch.uint8, _CPU)
    if _small.memory.nbytes < size:
        _small.memory = torch.empty(size, dtype=torch.uint8, device=_CPU)
    return _small.memory


def _handed(working: torch.Tensor) -> dict[str, int]:
    """Working memory as the core takes it, which knows how much of it is needed."""
    return {
        "working": address("working", working, working.shape, torch.uint8),
        "working_bytes": working.nbytes,
    }
