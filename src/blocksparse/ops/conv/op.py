"""The convolutions as torch.library ops: schema, meta kernel, autograd, the choice of the backend.

Images are `[n, *space, channels]`, so that channels-last memory is what the ops see. `conv` maps the input
image to the output, with `transposed` the output to the input (see plan.py); with `transpose` the weight is used with
its inputs and outputs exchanged. So the gradient of its input is `conv` with both turned around. `conv_wgrad` is the
product sampled on the layout. Each one's gradients are calls of these two again, as often as one likes.
"""

from __future__ import annotations

import torch

from ...errors import BlockSparseError
from .. import vmap
from ..checks import check_devices, check_operands
from ..linear.op import grid_of, layout_of
from ..registry import choose
from . import cpu, reference, triton
from .plan import axes_of

IMPLEMENTATIONS = {"triton": triton, "cpu": cpu, "reference": reference}

_library = torch.library.Library("blocksparse", "FRAGMENT")
_library.define(
    "conv(Tensor x, Tensor values, Tensor? bias, Tensor[] indices, SymInt in_blocks, "
    "bool transpose, bool transposed, SymInt[] size, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "str? activation) -> Tensor"
)
_library.define(
    "conv_wgrad(Tensor grad, Tensor x, Tensor[] indices, SymInt in_blocks, bool transposed, "
    "SymInt[] kernel, SymInt[] stride, SymInt[] padding, SymInt[] dilation) -> Tensor"
)
conv_op = torch.ops.blocksparse.conv.default
conv_wgrad_op = torch.ops.blocksparse.conv_wgrad.default


def _conv(x, values, bias, indices, in_blocks, transpose, transposed, size, stride, padding, dilation, activation):
    layout = layout_of(indices, *_of_conv(x, values, indices, in_blocks, size, activation))
    out_channels, in_channels = layout.shape[::-1] if transpose else layout.shape
    space = x.shape[1:-1]
    check_operands(
        x.dtype,
        x.device,
        x=(x, (x.shape[0], *space, in_channels)),
        values=(values, (*layout.values_shape, *values.shape[3:])),
        bias=(bias, (out_channels,)),
    )
    input, output = (size, space) if transposed else (space, size)
    axes = axes_of(input, output, values.shape[3:], stride, padding, dilation)
    backend = choose("conv", IMPLEMENTATIONS, x.device, x.dtype)
    return backend.conv(x, values, bias, layout, transpose, transposed, axes, activation)


def _conv_wgrad(grad, x, indices, in_blocks, transposed, kernel, stride, padding, dilation):
    layout = layout_of(indices, *_of_conv_wgrad(grad, x, indices, in_blocks, kernel))
    out_channels, in_channels = layout.shape
    check_operands(
        x.dtype,
        x.device,
        x=(x, (*x.shape[:-1], in_channels)),
        grad=(grad, (x.shape[0], *grad.shape[1:-1], out_channels)),
    )
    input, output = (grad, x) if transposed else (x, grad)
    axes = axes_of(input.shape[1:-1], output.shape[1:-1], kernel, stride, padding, dilation)
    return choose("conv_wgrad", IMPLEMENTATIONS, x.device, x.dtype).conv_wgrad(grad, x, layout, transposed, axes)


def _of_conv(x, values, indices, in_blocks, size, activation):
    """Grid and block, of what has the axes that the op asks for."""
    axes = len(size)
    if axes < 1 or x.dim() != axes + 2 or values.dim() != axes + 3 or activation not in reference.ACTIVATIONS:
        shapes = f"{list(x.shape)}, {list(values.shape)}, {list(size)}, {activation!r}"
        expected = "[n, *space, channels], [nnz, block_out, block_in, *kernel], a size of each axis, one of "
        expected += f"{list(reference.ACTIVATIONS)}"
        raise BlockSparseError.expected("x, values, size, activation", expected, shapes)
    return grid_of(indices, in_blocks), (values.shape[1], values.shape[2])


def _of_conv_wgrad(grad, x, indices, in_blocks, kernel):
    if not 1 <= len(kernel) == x.dim() - 2 == grad.dim() - 2:
        shapes = f"{list(grad.shape)}, {list(x.shape)}, {list(kernel)}"
        raise BlockSparseError.expected("grad, x, kernel", "two [n, *space, channels], a size of each axis", shapes)
    out_blocks, in_blocks = grid_of(indices, in_blocks)
    return (out_blocks, in_blocks), (grad.shape[-1] // out_blocks, x.shape[-1] // in_blocks)


# -- meta kernels ------------------------------------------------------------------------------------------------


def _conv_meta(x, values, bias, indices, in_blocks, transpose, transposed, size, stride, padding, dilation, activation):
    grid, block = _of_conv(x, values, indices, in_blocks, size, activation)
    check_devices(indices, x=x, values=values, bias=bias)
    axis = 1 if transpose else 0
    return x.new_empty(x.shape[0], *size, grid[axis] * block[axis])


def _conv_wgrad_meta(grad, x, indices, in_blocks, transposed, kernel, stride, padding, dilation):
    _, block = _of_conv_wgrad(grad, x, indices, in_blocks, kernel)
    check_devices(indices, x=x, grad=grad)
    return x.new_empty(indices[1].shape[0], *block, *kernel)


# -- autograd ----------------------------------------------------------------------------------------------------


def _conv_setup(ctx, inputs, output):
    x, values, bias, indices, ctx.in_blocks, ctx.transpose, ctx.transposed, *ctx.steps, ctx.activation = inputs
    saved_output = output if ctx.activation == "relu" else None
    ctx.save_for_backward(x, values, bias, saved_output, *indices)


def _conv_backward(ctx, grad):
    x, values, bias, output, *indices = ctx.saved_tensors
    size, *steps = ctx.steps
    if ctx.activation == "relu":
        grad = torch.ops.aten.threshold_backward(grad, output, 0)
    elif ctx.activation is not None:
        # Only direct calls of the op come here: the public functions do not fuse these while training.
        flags = ctx.in_blocks, ctx.transpose, ctx.transposed
        before = conv_op(x, values, bias, indices, *flags, size, *steps, None)
        backward = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}[ctx.activation]
        grad = backward(grad, before)
    grad_x = grad_values = grad_bias = None
    if ctx.needs_input_grad[0]:
        turned = ctx.in_blocks, not ctx.transpose, not ctx.transposed
        grad_x = conv_op(grad, values, None, indices, *turned, x.shape[1:-1], *steps, None)
    if ctx.needs_input_grad[1]:
        left, right = (x, grad) if ctx.transpose else (grad, x)
        transposed = ctx.transposed != ctx.transpose
        grad_values = conv_wgrad_op(left, right, indices, ctx.in_blocks, transposed, values.shape[3:], *steps)
    if bias is not None and ctx.needs_input_grad[2]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return grad_x, grad_values, grad_bias, [None] * len(indices), *[None] * 8


def _conv_wgrad_setup(ctx, inputs, output):
    grad, x, indices, ctx.in_blocks, ctx.transposed, _, *ctx.steps = inputs
    ctx.save_for_backward(grad, x, *indices)


def _conv_wgrad_backward(ctx, grad_values):
    grad, x, *indices = ctx.saved_tensors
    grad_grad = grad_x = None
    if ctx.needs_input_grad[0]:
        flags = ctx.in_blocks, False, ctx.transposed
        grad_grad = conv_op(x, grad_values, None, indices, *flags, grad.shape[1:-1], *ctx.steps, None)
    if ctx.needs_input_grad[1]:
        flags = ctx.in_blocks, True, not ctx.transposed
        grad_x = conv_op(grad, grad_values, None, indices, *flags, x.shape[1:-1], *ctx.steps, None)
    return grad_grad, grad_x, [None] * len(indices), *[None] * 6


for _name, _run, _meta, _backward, _setup in (
    ("conv", _conv, _conv_meta, _conv_backward, _conv_setup),
    ("conv_wgrad", _conv_wgrad, _conv_wgrad_meta, _conv_wgrad_backward, _conv_wgrad_setup),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"blocksparse::{_name}", _meta, lib=_library)
    vmap.register(getattr(torch.ops.blocksparse, _name).default, _library)
    torch.library.register_autograd(f"blocksparse::{_name}", _backward, setup_context=_setup, lib=_library)
