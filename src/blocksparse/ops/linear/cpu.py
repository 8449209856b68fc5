"""The linear products on the CPU: tensors and plans to addresses, one call into the compiled core."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..checks import check_tensors, features_together
from ..cpu_core import DTYPES, address, ready
from ..cpu_plan import block_plan, column_plan, row_plan

refusal = cpu_core.refusal
_CPU = torch.device("cpu")


def linear_fast(
    x: Tensor, values: Tensor, bias: Tensor | None, layout: BlockLayout, transpose: bool, activation: str | None
) -> Tensor | None:
    """The whole of a usual call without gradients; None for what `linear` has to see, or to refuse.

    The product of a small layer takes a microsecond. The checks are those of `cpu_core.rows` and `address`, in one.
    """
    tasks = layout._derived.get(("linear tasks", transpose))  # there since the first call
    values = values.data  # as in `linear`
    dtype, shape, strides = x.dtype, x.shape, x.stride()
    in_features, out_features = layout.shape if transpose else layout.shape[::-1]
    if len(shape) == 2:
        tokens, distance = shape[0], strides[0]
    else:
        tokens, distance = x.numel() // in_features, in_features if x.is_contiguous() else 0
    if (
        tasks is None
        or layout.block_shape == (1, 1)  # whose products are not by tasks, which others may have made
        or dtype not in DTYPES
        or shape[-1:] != (in_features,)
        or strides[-1] != 1
        or distance < in_features
        or not x.is_cpu
    ):
        return None
    x_address, values_address = x.data_ptr(), ready(values, layout.values_shape, dtype)
    bias_address = 0 if bias is None else ready(bias, (out_features,), dtype)
    # No numbers, or their memory was freed: a view's address is its distance from 0 then.
    if x_address == x.element_size() * x.storage_offset() or not values_address or not (bias is None or bias_address):
        return None
    core, isa, _ = cpu_core.operands()
    y, y_address = cpu_core.new((*shape[:-1], out_features), x)
    rows, name = (x_address, distance), DTYPES[dtype]
    core.linear(tasks, isa, name, activation or "none", tokens, rows, values_address, bias_address, y_address)
    return y


def linear(
    x: Tensor, values: Tensor, bias: Tensor | None, layout: BlockLayout, transpose: bool, activation: str | None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if out is not None and not out.is_contiguous():
        y = linear(x, values, bias, layout, transpose, activation)
        check_tensors(y.dtype, y.device, out=(out, tuple(y.shape)))
        return out.copy_(y)
    if x.stride()[-1:] != (1,):
        x = features_together(x)
    # `.data`: what the values are now. Another thread may give the parameter other ones, while the core reads these.
    values = values.data.contiguous()
    bias = bias if bias is None else bias.contiguous()
    dtype, tokens = x.dtype, x.shape[0] if x.dim() else 0
    out_features, in_features = layout.shape[::-1] if transpose else layout.shape
    wanted = [
        ("x", x, (tokens, in_features), dtype),
        ("values", values, layout.values_shape, dtype),
        ("bias", bias, (out_features,), dtype),
    ]
    if out is None:
        y, y_address = cpu_core.new((tokens, out_features), x)
        core, isa, addresses = cpu_core.operands(*wanted)
    else:
        y = out
        core, isa, (*addresses, (y_address, _)) = cpu_core.operands(*wanted, ("out", y, (tokens, out_features), dtype))
    rows, (values_address, _), (bias_address, _) = addresses
    name, activation = DTYPES[dtype], activation or "none"
    if layout.block_shape == (1, 1):
        x_address, x_stride = rows
        start, col, position = column_plan(layout) if transpose else (layout.row_start, layout.col_of_block, None)
        working = working_memory(core.csr_working_bytes(isa, name, tokens, in_features))
        core.csr_linear(
            isa=isa, dtype=name, activation=activation, tokens=tokens,
            x=x_address, x_stride=x_stride, in_features=in_features, values=values_address, bias=bias_address,
            y=y_address, out_features=out_features, **_handed(working),
            start=start, col=col, position=position,
        )  # fmt: skip
        return y
    tasks = tasks_of(layout, transpose)
    core.linear(tasks, isa, name, activation, tokens, rows, values_address, bias_address, y_address)
    return y


def tasks_of(layout: BlockLayout, transpose: bool = False) -> Any:
    """`row_plan` as the compiled core takes it."""
    # Looked up first: each call asks for it, and the way through `derived` takes a tenth of a small product.
    key = "linear tasks", transpose
    return layout._derived.get(key) or layout.derived(key, lambda: row_plan(layout, transpose).tasks())


def linear_wgrad(grad: Tensor, x: Tensor, layout: BlockLayout, out: Tensor | None = None) -> Tensor:
    values = workspace.empty(layout.values_shape, x.dtype, _CPU) if out is None else out
    grad, x = features_together(grad), features_together(x)
    operands = _gradient_operands(grad, x, layout)
    operands["values"] = address("values", values, layout.values_shape, x.dtype)
    core = cpu_core.core()
    if layout.block_shape == (1, 1):
        size = core.csr_wgrad_working_bytes(operands["isa"], operands["dtype"], operands["tokens"], *layout.shape)
        working = working_memory(size)
        core.csr_wgrad(**operands, **_handed(working), start=layout.row_start, col=layout.col_of_block)
        return values
    plan = block_plan(layout)
    core.linear_wgrad(**operands, block=layout.block_shape, row=plan.row, col=plan.col, task_start=plan.task_start)
    return values


def gradients(
    grad: Tensor, x: Tensor, values: Tensor, layout: BlockLayout, needs_x: bool, needs_bias: bool
) -> tuple[Tensor | None, Tensor, Tensor | None] | None:
    """Computes those of x, values and bias in one call for a layout of single numbers; None where it cannot.

    The numbers of `linear` and `linear_wgrad`, which would each bring the same rows of `grad` from memory.
    """
    core, dtype = cpu_core.core(), x.dtype
    size = core.csr_gradients_working_bytes(cpu_core.isa(), DTYPES[dtype], cpu_core.length(x), *layout.shape)
    if not size:
        return None
    grad, x, values = features_together(grad), features_together(x), values.data.contiguous()
    operands, working = _gradient_operands(grad, x, layout), working_memory(size)
    grad_x, grad_x_address = cpu_core.new(tuple(x.shape), x) if needs_x else (None, 0)
    grad_values = workspace.empty(layout.values_shape, x.dtype, _CPU)
    grad_bias = torch.empty(layout.shape[:1], dtype=dtype, device=_CPU) if needs_bias else None
    start, col, position = column_plan(layout) if needs_x else (layout.row_start, layout.col_of_block, None)
    core.csr_gradients(
        **operands, values=address("values", values, layout.values_shape, dtype), grad_x=grad_x_address,
        grad_values=address("grad_values", grad_values, layout.values_shape, dtype),
        grad_bias=address("grad_bias", grad_bias, layout.shape[:1], dtype), **_handed(working),
        start=start, col=col, position=position,
    )  # fmt: skip
    return grad_x, grad_values, grad_bias


def _gradient_operands(grad: Tensor, x: Tensor, layout: BlockLayout) -> dict[str, int | str]:
    """What the products of grad and x take of them."""
    tokens, (out_features, in_features) = cpu_core.length(x), layout.shape
    _, isa, ((grad_address, grad_stride), (x_address, x_stride)) = cpu_core.operands(
        ("grad", grad, (tokens, out_features), x.dtype), ("x", x, (tokens, in_features), x.dtype)
    )
    return {
        "isa": isa,
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


def working_memory(size: int) -> Tensor:
    """Returns memory for one call, at least `size` bytes."""
    if size > workspace.MIN_BYTES:
        return workspace.empty((size,), torch.uint8, _CPU)
    if _small.memory.nbytes < size:
        _small.memory = torch.empty(size, dtype=torch.uint8, device=_CPU)
    return _small.memory


def _handed(working: Tensor) -> dict[str, int]:
    """Working memory as the core takes it, which knows how much of it is needed."""
    return {"working": address("working", working, tuple(working.shape), torch.uint8), "working_bytes": working.nbytes}
