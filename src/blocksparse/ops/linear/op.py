"""The two products as torch.library ops: schema, meta kernel, autograd, the choice of the backend.

`linear` is y = x W^T + b; with `transpose` it is y = x W, the gradient of its own input. `linear_wgrad` is the
product sampled on the layout. Each one's gradients are calls of these two again, so they can be differentiated
as often as one likes. The layout comes as its index tensors, `indices`: crow and col, so that a compiled or exported
graph stands alone. Graphs compiled for a GPU bring their schedule behind them and see through the ops to the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from ...checked import checked_ints
from ...errors import BlockSparseError
from ...layout import BlockLayout, layout_of_indices
from .. import vmap
from ..checks import can_skip_dispatcher, check_devices, check_operands, needs_grad
from ..registry import choose
from . import cpu, reference, triton

IMPLEMENTATIONS = {"triton": triton, "cpu": cpu, "reference": reference}
# Graphs compiled for devices of this type hold the launches of kernels in place of the ops.
SEEN_THROUGH = "cuda"

_library = torch.library.Library("blocksparse", "DEF")
_library.define(
    "linear(Tensor x, Tensor values, Tensor? bias, Tensor[] indices, SymInt in_blocks, bool transpose, "
    "str? activation) -> Tensor"
)
_library.define("linear_wgrad(Tensor grad, Tensor x, Tensor[] indices, SymInt in_blocks) -> Tensor")
linear_op = torch.ops.blocksparse.linear.default
linear_wgrad_op = torch.ops.blocksparse.linear_wgrad.default


def _linear(x, values, bias, indices, in_blocks, transpose, activation):
    grid, block = _of_linear(x, values, indices, in_blocks, activation)
    layout = layout_of(indices, grid, block)
    out_features, in_features = layout.shape[::-1] if transpose else layout.shape
    check_operands(
        x.dtype,
        x.device,
        x=(x, (x.shape[0], in_features)),
        values=(values, layout.values_shape),
        bias=(bias, (out_features,)),
    )
    return backend_of(x).linear(x, values, bias, layout, transpose, activation)


def _linear_wgrad(grad, x, indices, in_blocks):
    layout = layout_of(indices, *_of_linear_wgrad(grad, x, indices, in_blocks))
    out_features, in_features = layout.shape
    check_operands(x.dtype, x.device, x=(x, (len(x), in_features)), grad=(grad, (len(x), out_features)))
    return backend_of(x).linear_wgrad(grad, x, layout)


def _of_linear(x, values, indices, in_blocks, activation):
    """Grid and block, of what has the axes that the op asks for."""
    if x.dim() != 2 or values.dim() != 3 or activation not in reference.ACTIVATIONS:
        expected = f"2-D, 3-D, one of {list(reference.ACTIVATIONS)}"
        got = f"{x.dim()}-D, {values.dim()}-D, {activation!r}"
        raise BlockSparseError.expected("x, values, activation", expected, got)
    return grid_of(indices, in_blocks), (values.shape[1], values.shape[2])


def _of_linear_wgrad(grad, x, indices, in_blocks):
    if grad.dim() != 2 or x.dim() != 2:
        raise BlockSparseError.expected(
            "grad, x", "[tokens, out], [tokens, in]", f"{list(grad.shape)}, {list(x.shape)}"
        )
    out_blocks, in_blocks = grid_of(indices, in_blocks)
    return (out_blocks, in_blocks), (grad.shape[1] // out_blocks, x.shape[1] // in_blocks)


def backend_of(x: Tensor) -> ModuleType:
    """The module that serves products with x."""
    return choose("linear", IMPLEMENTATIONS, x.device, x.dtype)


def indices_of(layout: BlockLayout, x: Tensor) -> list[Tensor]:
    """The index tensors that stand for the layout in a call with x."""
    indices = [*layout.indices_on(x.device)]
    if torch.compiler.is_dynamo_compiling() and x.device.type == SEEN_THROUGH:
        indices = [*indices, *triton.schedule(layout, x.device, x.dtype, x.shape[0])]
    return indices


def grid_of(indices: Sequence[Tensor], in_blocks: int) -> tuple[int, int]:
    """Returns (out_blocks, in_blocks) from the sizes of index tensors, which may be traced."""
    # Behind these two comes the schedule of a graph for a GPU.
    vectors = len(indices) >= 2 and indices[0].dim() == indices[1].dim() == 1
    if not vectors or indices[0].shape[0] < 2 or in_blocks < 1:
        got = f"{[list(index.shape) for index in indices]}, {in_blocks}"
        raise BlockSparseError.expected(
            "indices, in_blocks", "crow [out_blocks + 1], col [nnz] of at least one block row, a positive int", got
        )
    return indices[0].shape[0] - 1, in_blocks


def layout_of(indices: Sequence[Tensor], grid: tuple[int, int], block: tuple[int, int]) -> BlockLayout:
    """Returns the layout of these index tensors, or makes one of them (as in a graph loaded from a file).

    Raises:
        BlockSparseError: index tensors that are not those of a layout of this grid.
    """
    crow, col = indices[:2]
    known = getattr(col, "_blocksparse_layout", None)
    layout = known() if known is not None else None
    if layout is not None and layout.block_shape == block and layout.grid == grid:
        # Others, such as a copy that was written to, are compared.
        own_crow, own_col = layout.indices_on(col.device)
        if own_crow is crow and own_col is col:
            return layout
    starts, cols = checked_ints("crow_indices", crow), checked_ints("col_indices", col)
    return _layout_from_bytes((starts.tobytes(), starts.dtype), (cols.tobytes(), cols.dtype), grid, block)


@lru_cache(maxsize=64)
def _layout_from_bytes(
    crow: tuple[bytes, np.dtype], col: tuple[bytes, np.dtype], grid: tuple[int, int], block: tuple[int, int]
) -> BlockLayout:
    return layout_of_indices(np.frombuffer(*crow), np.frombuffer(*col), grid, block)


# -- meta kernels ------------------------------------------------------------------------------------------------


def _linear_meta(x, values, bias, indices, in_blocks, transpose, activation):
    grid, block = _of_linear(x, values, indices, in_blocks, activation)
    check_devices(indices, x=x, values=values, bias=bias)
    axis = 1 if transpose else 0
    return x.new_empty(x.shape[0], grid[axis] * block[axis])


def _linear_wgrad_meta(grad, x, indices, in_blocks):
    _, block = _of_linear_wgrad(grad, x, indices, in_blocks)
    check_devices(indices, x=x, grad=grad)
    return x.new_empty(indices[1].shape[0], *block)


# -- autograd ----------------------------------------------------------------------------------------------------


# `torch.library.register_autograd` takes lists of tensors by flattening and rebuilding all arguments on every way in
# and out, which takes longer than the products of a small layer. Here the indices are arguments of their own.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keys, x, values, bias, in_blocks, transpose, activation, *indices):
        output = _redispatch_after_autograd(linear_op, keys, x, values, bias, indices, in_blocks, transpose, activation)
        ctx.in_blocks, ctx.transpose, ctx.activation = in_blocks, transpose, activation
        ctx.save_for_backward(x, values, bias, output if activation == "relu" else None, *indices)
        return output

    @staticmethod
    def backward(ctx, grad):
        x, values, bias, output, *indices = ctx.saved_tensors
        if ctx.activation == "relu":
            grad = torch.ops.aten.threshold_backward(grad, output, 0)
        elif ctx.activation is not None:
            # Only direct calls of the op come here: the public function does not fuse these while training.
            before = linear_op(x, values, bias, indices, ctx.in_blocks, ctx.transpose, None)
            backward = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}[ctx.activation]
            grad = backward(grad, before)
        found = _gradients(grad, x, values, indices, ctx.in_blocks, ctx.transpose, ctx.needs_input_grad[1:4])
        return None, *found, None, None, None, *[None] * len(indices)


class _LinearWgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keys, grad, x, in_blocks, *indices):
        ctx.in_blocks = in_blocks
        ctx.save_for_backward(grad, x, *indices)
        return _redispatch_after_autograd(linear_wgrad_op, keys, grad, x, indices, in_blocks)

    @staticmethod
    def backward(ctx, grad_values):
        grad, x, *indices = ctx.saved_tensors
        grad_grad = grad_x = None
        if ctx.needs_input_grad[1]:
            grad_grad = linear_op(x, grad_values, None, indices, ctx.in_blocks, False, None)
        if ctx.needs_input_grad[2]:
            grad_x = linear_op(grad, grad_values, None, indices, ctx.in_blocks, True, None)
        return None, grad_grad, grad_x, None, *[None] * len(indices)


def _linear_autograd(keys, x, values, bias, indices, in_blocks, transpose, activation):
    if needs_grad(x, values, bias):
        return _Linear.apply(keys, x, values, bias, in_blocks, transpose, activation, *indices)
    return _redispatch_after_autograd(linear_op, keys, x, values, bias, indices, in_blocks, transpose, activation)


def _linear_wgrad_autograd(keys, grad, x, indices, in_blocks):
    if needs_grad(grad, x):
        return _LinearWgrad.apply(keys, grad, x, in_blocks, *indices)
    return _redispatch_after_autograd(linear_wgrad_op, keys, grad, x, indices, in_blocks)


class EagerLinear(torch.autograd.Function):
    """The product where nothing but autograd needs to see it, on checked operands.

    PyTorch's way through ops written in Python takes longer than the products of a small layer. Of the activations it
    takes "relu".
    """

    @staticmethod
    def forward(ctx, x, values, bias, layout, transpose, activation):
        output = backend_of(x).linear(x, values, bias, layout, transpose, activation)
        ctx.layout, ctx.transpose = layout, transpose
        ctx.save_for_backward(x, values, output if activation == "relu" else None)
        return output

    @staticmethod
    def backward(ctx, grad):
        x, values, output = ctx.saved_tensors
        if output is not None:
            grad = torch.ops.aten.threshold_backward(grad, output, 0)
        layout, needed = ctx.layout, ctx.needs_input_grad[:3]
        if can_skip_dispatcher(grad, x, values):
            found = _eager_gradients(grad, x, values, layout, ctx.transpose, needed)
        else:
            found = _gradients(grad, x, values, indices_of(layout, x), layout.grid[1], ctx.transpose, needed)
        return *found, None, None, None


def _gradients(grad, x, values, indices, in_blocks, transpose, needed):
    """Those of x, values and bias, by the ops, as far as they are needed."""
    grad_x = grad_values = None
    if needed[0]:
        grad_x = linear_op(grad, values, None, indices, in_blocks, not transpose, None)
    if needed[1]:
        left, right = (x, grad) if transpose else (grad, x)
        grad_values = linear_wgrad_op(left, right, indices, in_blocks)
    return grad_x, grad_values, grad.sum(0) if needed[2] else None


def _eager_gradients(grad, x, values, layout, transpose, needed):
    """The same by the backend itself, in one call where it can."""
    backend = backend_of(x)
    if needed[1] and not transpose and backend is cpu:
        found = cpu.gradients(grad, x, values, layout, needed[0], needed[2])
        if found is not None:
            return found
    grad_x = grad_values = None
    if needed[0]:
        grad_x = backend.linear(grad, values, None, layout, not transpose, None)
    if needed[1]:
        left, right = (x, grad) if transpose else (grad, x)
        grad_values = backend.linear_wgrad(left, right, layout)
    return grad_x, grad_values, grad.sum(0) if needed[2] else None


def _redispatch_after_autograd(op, keys, *arguments):
    """Dispatches the op to what comes after autograd: compilers, fake tensors, the kernels."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


# -- torch.compile -----------------------------------------------------------------------------------------------


def _linear_traced(x, values, bias, indices, in_blocks, transpose, activation):
    layout = _traced_layout(indices, in_blocks, values.shape[1:])
    return triton.linear(x, values, bias, layout, transpose, activation)


def _linear_wgrad_traced(grad, x, indices, in_blocks):
    block = grad.shape[1] // (indices[0].shape[0] - 1), x.shape[1] // in_blocks
    return triton.linear_wgrad(grad, x, _traced_layout(indices, in_blocks, block))


def _traced_layout(indices, in_blocks, block) -> triton.TracedLayout:
    crow, col, *schedule = indices
    # Sizes of a layout are constants, whatever sizes of x the tracer takes for dynamic.
    grid = int(crow.shape[0]) - 1, int(in_blocks)
    return triton.TracedLayout(grid, (int(block[0]), int(block[1])), int(col.shape[0]), schedule)


def _see_through(traced):
    """Replaces the op by launches of its kernels in a graph with a schedule, as `torch.library.triton_op` does."""

    def rule(mode, op, types, args, kwargs):
        scheduled = any(isinstance(argument, list | tuple) and len(argument) > 2 for argument in args)
        # Exported graphs keep the op, so that they are self-contained.
        if not scheduled or not torch._functorch.config.decompose_custom_triton_ops:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return traced(*args, **kwargs)

    return rule


for _name, _run, _meta, _autograd, _traced in (
    ("linear", _linear, _linear_meta, _linear_autograd, _linear_traced),
    ("linear_wgrad", _linear_wgrad, _linear_wgrad_meta, _linear_wgrad_autograd, _linear_wgrad_traced),
):
    _op = f"blocksparse::{_name}"
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(_op, _meta, lib=_library)
    vmap.register(getattr(torch.ops.blocksparse, _name).default, _library)
    torch.library.register_torch_dispatch(_op, FunctionalTensorMode, _see_through(_traced), lib=_library)
