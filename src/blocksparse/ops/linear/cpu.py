"""The linear products on the CPU: each is one call of the compiled core with addresses and a plan."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..checks import check_tensors, contiguous_features
from ..cpu_core import DTYPES, address, address_or_zero
from ..cpu_plan import block_plan, column_plan, row_plan
from . import all_blocks

unsupported_reason = cpu_core.unsupported_reason
_CPU = torch.device("cpu")


def linear_fast(
    x: Tensor, values: Tensor, bias: Tensor | None, layout: BlockLayout, transpose: bool, activation: str | None
) -> Tensor | None:
    """Return the result of a usual call without gradients, or None if this fast path does not apply.

    After None, call `linear`, which serves other calls and raises errors.

    x is `[..., in]`, and y has the same leading axes. The product of a small layer takes a microsecond, so this makes
    the checks of `cpu_core.row_addresses` and `address` in one pass.
    """
    tasks = layout._derived.get(("linear tasks", transpose))  # None before the first call
    values = values.data  # as in `linear`
    dtype, shape, strides = x.dtype, x.shape, x.stride()
    in_features, out_features = layout.shape if transpose else layout.shape[::-1]
    if len(shape) == 2:
        tokens, distance = shape[0], strides[0]
    else:
        tokens, distance = x.numel() // in_features, in_features if x.is_contiguous() else 0
    if (
        tasks is None
        or layout.block_shape == (1, 1)  # these products use other plans
        or dtype not in DTYPES
        or shape[-1:] != (in_features,)
        or strides[-1] != 1
        or distance < in_features
        or not x.is_cpu
        or _is_dense_faster(layout, dtype, tokens)
    ):
        return None
    x_address, values_address = x.data_ptr(), address_or_zero(values, layout.values_shape, dtype)
    bias_address = 0 if bias is None else address_or_zero(bias, (out_features,), dtype)
    # x is empty, or its storage was freed: the address of a view is then its offset.
    if x_address == x.element_size() * x.storage_offset() or not values_address or not (bias is None or bias_address):
        return None
    core, isa, _ = cpu_core.arguments()
    y, y_address = cpu_core.allocate((*shape[:-1], out_features), x)
    rows, name = (x_address, distance), DTYPES[dtype]
    core.linear(tasks, isa, name, activation or "none", tokens, rows, values_address, bias_address, y_address)
    return y


def linear(
    x: Tensor, values: Tensor, bias: Tensor | None, layout: BlockLayout, transpose: bool, activation: str | None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return activation(x W^T + bias) `[tokens, out]`, or x W with `transpose`, in `out` if that is given.

    x is `[tokens, in]`.
    """
    if out is not None and not out.is_contiguous():
        y = linear(x, values, bias, layout, transpose, activation)
        check_tensors(y.dtype, y.device, out=(out, tuple(y.shape)))
        return out.copy_(y)
    if x.stride()[-1:] != (1,):
        x = contiguous_features(x)
    # `.data` keeps these values alive: another thread may replace the parameter's while the core reads them.
    values = values.data.contiguous()
    bias = bias if bias is None else bias.contiguous()
    dtype, tokens = x.dtype, x.shape[0] if x.dim() else 0
    out_features, in_features = layout.shape[::-1] if transpose else layout.shape
    inputs = [
        ("x", x, (tokens, in_features), dtype),
        ("values", values, layout.values_shape, dtype),
        ("bias", bias, (out_features,), dtype),
    ]
    if out is None:
        y, y_address = cpu_core.allocate((tokens, out_features), x)
        core, isa, addresses = cpu_core.arguments(*inputs)
    else:
        y = out
        core, isa, (*addresses, (y_address, _)) = cpu_core.arguments(*inputs, ("out", y, (tokens, out_features), dtype))
    rows, (values_address, _), (bias_address, _) = addresses
    name, activation = DTYPES[dtype], activation or "none"
    if layout.block_shape == (1, 1):
        x_address, x_stride = rows
        start, col, position = column_plan(layout) if transpose else (layout.row_start, layout.col_of_block, None)
        working = working_memory(core.csr_working_bytes(isa, name, tokens, in_features))
        core.csr_linear(
            isa=isa, dtype=name, activation=activation, tokens=tokens,
            x=x_address, x_stride=x_stride, in_features=in_features, values=values_address, bias=bias_address,
            y=y_address, out_features=out_features, **_memory_arguments(working),
            start=start, col=col, position=position,
        )  # fmt: skip
        return y
    if _is_dense_faster(layout, dtype, tokens):
        all_blocks.linear(x, values, bias, layout, transpose, None if activation == "none" else activation, y)
        return y
    tasks = row_plan(layout, transpose)
    core.linear(tasks, isa, name, activation, tokens, rows, values_address, bias_address, y_address)
    return y


def _is_dense_faster(layout: BlockLayout, dtype: torch.dtype, tokens: int) -> bool:
    """Return whether the layout stores all blocks, and the dense product is faster for this many tokens."""
    return (
        tokens >= all_blocks.MIN_TOKENS
        and layout.nnz == layout.grid[0] * layout.grid[1]
        and min(layout.shape) >= all_blocks.MIN_FEATURES
        and (cpu_core.isa(), dtype) in all_blocks.FASTER
    )


def linear_wgrad(grad: Tensor, x: Tensor, layout: BlockLayout, out: Tensor | None = None) -> Tensor:
    """Return the stored blocks of grad^T x `[nnz, block_out, block_in]`, in `out` if that is given."""
    values = workspace.empty(layout.values_shape, x.dtype, _CPU) if out is None else out
    grad, x = contiguous_features(grad), contiguous_features(x)
    arguments = _gradient_arguments(grad, x, layout)
    arguments["values"] = address("values", values, layout.values_shape, x.dtype)
    core = cpu_core.core()
    if layout.block_shape == (1, 1):
        size = core.csr_wgrad_working_bytes(arguments["isa"], arguments["dtype"], arguments["tokens"], *layout.shape)
        working = working_memory(size)
        core.csr_wgrad(**arguments, **_memory_arguments(working), start=layout.row_start, col=layout.col_of_block)
        return values
    if _is_dense_faster(layout, x.dtype, cpu_core.row_count(x)):
        all_blocks.linear_wgrad(grad, x, layout, values)
        return values
    plan = block_plan(layout)
    core.linear_wgrad(**arguments, block=layout.block_shape, row=plan.row, col=plan.col, task_start=plan.task_start)
    return values


def gradients(
    grad: Tensor, x: Tensor, values: Tensor, layout: BlockLayout, needs_x: bool, needs_bias: bool
) -> tuple[Tensor | None, Tensor, Tensor | None] | None:
    """Return the gradients of x, values and bias for a layout of 1x1 blocks in one call; None if the core cannot.

    The results equal those of `linear` and `linear_wgrad`, which would each read the same rows of `grad` from memory.
    """
    core, dtype = cpu_core.core(), x.dtype
    size = core.csr_gradients_working_bytes(cpu_core.isa(), DTYPES[dtype], cpu_core.row_count(x), *layout.shape)
    if not size:
        return None
    grad, x, values = contiguous_features(grad), contiguous_features(x), values.data.contiguous()
    arguments, working = _gradient_arguments(grad, x, layout), working_memory(size)
    grad_x, grad_x_address = cpu_core.allocate(tuple(x.shape), x) if needs_x else (None, 0)
    grad_values = workspace.empty(layout.values_shape, x.dtype, _CPU)
    grad_bias = torch.empty(layout.shape[:1], dtype=dtype, device=_CPU) if needs_bias else None
    start, col, position = column_plan(layout) if needs_x else (layout.row_start, layout.col_of_block, None)
    core.csr_gradients(
        **arguments, values=address("values", values, layout.values_shape, dtype), grad_x=grad_x_address,
        grad_values=address("grad_values", grad_values, layout.values_shape, dtype),
        grad_bias=address("grad_bias", grad_bias, layout.shape[:1], dtype), **_memory_arguments(working),
        start=start, col=col, position=position,
    )  # fmt: skip
    return grad_x, grad_values, grad_bias


def _gradient_arguments(grad: Tensor, x: Tensor, layout: BlockLayout) -> dict[str, int | str]:
    """Return the arguments of the core that all products of grad and x have in common."""
    tokens, (out_features, in_features) = cpu_core.row_count(x), layout.shape
    _, isa, ((grad_address, grad_stride), (x_address, x_stride)) = cpu_core.arguments(
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
    """Working memory of each thread: allocating it per call takes as long as the product of a small layer."""

    memory = torch.empty(0, dtype=torch.uint8, device=_CPU)


_small = _Small()


def working_memory(size: int) -> Tensor:
    """Return at least `size` bytes of memory for one call."""
    if size > workspace.MIN_BYTES:
        return workspace.empty((size,), torch.uint8, _CPU)
    if _small.memory.nbytes < size:
        _small.memory = torch.empty(size, dtype=torch.uint8, device=_CPU)
    return _small.memory


def _memory_arguments(working: Tensor) -> dict[str, int]:
    """Return working memory as arguments of the core, which checks its size."""
    return {"working": address("working", working, tuple(working.shape), torch.uint8), "working_bytes": working.nbytes}
