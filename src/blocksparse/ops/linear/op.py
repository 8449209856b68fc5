"""The two products as torch.library ops: schema, meta kernel, autograd, the choice of the backend.

`linear` is y = x W^T + b; with `transpose` it is y = x W, the gradient of its own input. `linear_wgrad` is the
product sampled on the layout. Each one's gradients are calls of these two again, so they can be differentiated
as often as one likes. The layout comes as its index tensors: a compiled or exported graph then stands alone.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..registry import choose
from . import cpu, reference

IMPLEMENTATIONS = {"cpu": cpu, "reference": reference}

_library = torch.library.Library("blocksparse", "DEF")
_library.define(
    "linear(Tensor x, Tensor values, Tensor? bias, Tensor crow_indices, Tensor col_indices, SymInt in_blocks, "
    "bool transpose, str? activation) -> Tensor"
)
_library.define(
    "linear_wgrad(Tensor grad, Tensor x, Tensor crow_indices, Tensor col_indices, SymInt in_blocks) -> Tensor"
)
linear_op = torch.ops.blocksparse.linear.default
linear_wgrad_op = torch.ops.blocksparse.linear_wgrad.default


def _linear(x, values, bias, crow_indices, col_indices, in_blocks, transpose, activation):
    if values.dim() != 3 or activation not in reference.ACTIVATIONS:
        expected = f"3-D, one of {list(reference.ACTIVATIONS)}"
        raise BlockSparseError.expected("values, activation", expected, f"{values.dim()}-D, {activation!r}")
    layout = layout_of(crow_indices, col_indices, in_blocks, (values.shape[1], values.shape[2]))
    out_features, in_features = layout.shape[::-1] if transpose else layout.shape
    _check_op(
        x.dtype,
        x.device,
        x=(x, (*x.shape[:1], in_features)),
        values=(values, layout.values_shape),
        bias=(bias, (out_features,)),
    )
    backend = choose("linear", IMPLEMENTATIONS, x.device, x.dtype)
    return backend.linear(x, values, bias, layout, transpose, activation)


def _linear_wgrad(grad, x, crow_indices, col_indices, in_blocks):
    if grad.dim() != 2 or x.dim() != 2 or in_blocks < 1:
        shapes = f"{list(grad.shape)}, {list(x.shape)}, {in_blocks}"
        raise BlockSparseError.expected("grad, x, in_blocks", "[tokens, out], [tokens, in], a positive int", shapes)
    block = (grad.shape[1] // (crow_indices.shape[0] - 1), x.shape[1] // in_blocks)
    layout = layout_of(crow_indices, col_indices, in_blocks, block)
    out_features, in_features = layout.shape
    _check_op(x.dtype, x.device, x=(x, (len(x), in_features)), grad=(grad, (len(x), out_features)))
    return choose("linear_wgrad", IMPLEMENTATIONS, x.device, x.dtype).linear_wgrad(grad, x, layout)


def _check_op(dtype: torch.dtype, device: torch.device, **tensors: tuple[Tensor | None, tuple[int, ...]]) -> None:
    # The public functions have checked and said more; this keeps who calls the op itself inside of the memory.
    for name, (tensor, shape) in tensors.items():
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device):
            got = f"{list(tensor.shape)}, {tensor.dtype}, {tensor.device}"
            raise BlockSparseError.expected(name, f"{list(shape)}, {dtype}, {device}", got)


def layout_of(crow: Tensor, col: Tensor, in_blocks: int, block: tuple[int, int]) -> BlockLayout:
    """The layout that these index tensors came from, or one made of them (in a graph loaded from a file, say)."""
    known = getattr(col, "_blocksparse_layout", None)
    layout = known() if known is not None else None
    if layout is not None and layout.block_shape == block and layout.grid[1] == in_blocks:
        return layout
    return _layout_from_bytes(crow.cpu().numpy().tobytes(), col.cpu().numpy().tobytes(), col.dtype, in_blocks, block)


@lru_cache(maxsize=64)
def _layout_from_bytes(crow: bytes, col: bytes, dtype: torch.dtype, in_blocks: int, block: tuple[int, int]):
    starts, cols = (torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0) for data in (crow, col))
    rows = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff().long())
    return BlockLayout.from_indices(rows, cols.long(), (len(starts) - 1, in_blocks), block)


# -- meta kernels ------------------------------------------------------------------------------------------------


def _linear_meta(x, values, bias, crow_indices, col_indices, in_blocks, transpose, activation):
    if transpose:
        return x.new_empty(x.shape[0], in_blocks * values.shape[2])
    return x.new_empty(x.shape[0], (crow_indices.shape[0] - 1) * values.shape[1])


def _linear_wgrad_meta(grad, x, crow_indices, col_indices, in_blocks):
    block_out, block_in = grad.shape[1] // (crow_indices.shape[0] - 1), x.shape[1] // in_blocks
    return x.new_empty(col_indices.shape[0], block_out, block_in)


# -- autograd ----------------------------------------------------------------------------------------------------


def _linear_setup(ctx, inputs, output):
    x, values, bias, crow, col, ctx.in_blocks, ctx.transpose, ctx.activation = inputs
    saved_output = output if ctx.activation == "relu" else None
    ctx.save_for_backward(x, values, bias, crow, col, saved_output)


def _linear_backward(ctx, grad):
    x, values, bias, crow, col, output = ctx.saved_tensors
    if ctx.activation == "relu":
        grad = torch.ops.aten.threshold_backward(grad, output, 0)
    elif ctx.activation is not None:
        # Only who calls the op itself comes here: the public function does not fuse these while training.
        before = linear_op(x, values, bias, crow, col, ctx.in_blocks, ctx.transpose, None)
        backward = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}[ctx.activation]
        grad = backward(grad, before)
    grad_x = grad_values = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = linear_op(grad, values, None, crow, col, ctx.in_blocks, not ctx.transpose, None)
    if ctx.needs_input_grad[1]:
        left, right = (x, grad) if ctx.transpose else (grad, x)
        grad_values = linear_wgrad_op(left, right, crow, col, ctx.in_blocks)
    if bias is not None and ctx.needs_input_grad[2]:
        grad_bias = grad.sum(0)
    return grad_x, grad_values, grad_bias, None, None, None, None, None


def _linear_wgrad_setup(ctx, inputs, output):
    grad, x, crow, col, ctx.in_blocks = inputs
    ctx.save_for_backward(grad, x, crow, col)


def _linear_wgrad_backward(ctx, grad_values):
    grad, x, crow, col = ctx.saved_tensors
    grad_grad = grad_x = None
    if ctx.needs_input_grad[0]:
        grad_grad = linear_op(x, grad_values, None, crow, col, ctx.in_blocks, False, None)
    if ctx.needs_input_grad[1]:
        grad_x = linear_op(grad, grad_values, None, crow, col, ctx.in_blocks, True, None)
    return grad_grad, grad_x, None, None, None


for _name, _run, _meta, _backward, _setup in (
    ("linear", _linear, _linear_meta, _linear_backward, _linear_setup),
    ("linear_wgrad", _linear_wgrad, _linear_wgrad_meta, _linear_wgrad_backward, _linear_wgrad_setup),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"blocksparse::{_name}", _meta, lib=_library)
    torch.library.register_autograd(f"blocksparse::{_name}", _backward, setup_context=_setup, lib=_library)
