"""The convolutions and their weights' gradient as operations.

Images are `[n, *space, channels]`, so ops see channels-last memory. `conv` maps the input image to the output, or with
`transposed` the output to the input (see plan.py); with `transpose`, inputs and outputs of the weight are exchanged. So
the gradient at its input is `conv` with both flags inverted. `conv_wgrad` is the product sampled on the layout. If each
position depends only on itself, both are the linear products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..activations import grad_before
from ..graph_layout import AnyLayout, index_tensors
from ..linear import LINEAR, LINEAR_WGRAD
from ..linear import triton as products
from ..lower_to_triton import lower_to_triton, needs_schedule, traced_layout
from ..registry import Geometry, LayoutOp, Options, Tensors, features_of, image_block
from . import cpu, planes, reference, triton
from .plan import axes_of, is_linear


class Conv(LayoutOp):
    """activation(W * x + bias) of images `[n, *space, channels]`.

    Its tensors are x, values and bias, its options transpose, transposed, size, stride, padding, dilation, activation.
    """

    def geometry(self, tensors: Any, nnz: int, grid: tuple[int, int], options: Options) -> Geometry:
        (x, values, _), (transpose, _, size, *_, activation) = tensors, options
        block = image_block(x, values, size, activation)
        out, in_ = features_of(grid, block, transpose)
        shapes = [(*x.shape[:-1], in_), (nnz, *block, *values.shape[3:]), (out,)]
        return Geometry(block, shapes, (x.shape[0], *size, out))

    def indices(self, layout: BlockLayout, tensors: Any, options: Options) -> Sequence[Tensor]:
        """Return crow and col, and the GPU's schedule if a graph needs it."""
        (x, values, _), (transpose, transposed, _, stride, padding, dilation, _) = tensors, options
        indices, kernel = index_tensors(layout, x.device), values.shape[3:]
        if not needs_schedule(layout, x):
            return indices
        alone = all(k == s == 1 and p == 0 for k, s, p in zip(kernel, stride, padding, strict=True))
        if alone and triton.as_linear(x.dtype):
            return LINEAR.indices(layout, (x.flatten(0, -2),), ())
        taps, last = int(kernel.numel()), (int(kernel[-1]), int(stride[-1]), int(dilation[-1]))
        return [*indices, *triton.schedule(layout, x.device, x.dtype, taps, last, transposed != transpose)]

    def compute(self, tensors: Any, layout: BlockLayout, options: Options) -> Tensor:
        """Return the convolution; one with a single tap and no stride or padding is computed as a linear product."""
        (x, values, bias), (transpose, transposed, size, *steps, activation) = tensors, options
        input, output = (size, x.shape[1:-1]) if transposed else (x.shape[1:-1], size)
        axes = axes_of(input, output, values.shape[3:], *steps)
        backend = self.on(x.device, x.dtype)
        if backend is cpu and planes.serves(x, layout, axes):
            y = planes.conv(x, values, bias, layout, transpose, transposed, axes, activation)
            if y is not None:
                return y
        if is_linear(axes) and (backend is not triton or triton.as_linear(x.dtype)):
            matrix = values.reshape(layout.values_shape)
            y = LINEAR.compute((x.reshape(-1, x.shape[-1]), matrix, bias), layout, (transpose, activation))
            # Not a view: autograd would refuse writes in place into the view of a node's output.
            return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])  # type: ignore[no-any-return]
        result: Tensor = backend.conv(x, values, bias, layout, transpose, transposed, axes, activation)
        return result

    def backward(
        self, grad: Tensor, saved: Any, layout: AnyLayout, options: Options, needed: Sequence[bool]
    ) -> Tensors:
        """Return the gradients of x, values and bias: transposed convolution, `ConvWgrad`, sums over positions."""
        (x, values, bias, output), (transpose, transposed, _, *steps, activation) = saved, options
        grad = grad_before(grad, activation, output, lambda: self((x, values, bias), layout, (*options[:-1], None)))
        grad_x = grad_values = grad_bias = None
        if needed[0]:
            inverted = not transpose, not transposed, x.shape[1:-1]
            grad_x = self((grad, values, None), layout, (*inverted, *steps, None))
        if needed[1]:
            pair = (x, grad) if transpose else (grad, x)
            grad_values = CONV_WGRAD(pair, layout, (transposed != transpose, values.shape[3:], *steps))
        if needed[2]:
            # Flattening images in planes would copy them. A compiler cannot ask `is_contiguous` of unknown sizes.
            flat = grad.reshape(-1, grad.shape[-1]) if grad.stride(-1) == 1 else grad
            grad_bias = flat.sum([*range(flat.dim() - 1)])
        return grad_x, grad_values, grad_bias


class ConvWgrad(LayoutOp):
    """The gradient of the stored blocks.

    Its tensors are grad and x, its options transposed, kernel, stride, padding and dilation.
    """

    def geometry(self, tensors: Any, nnz: int, grid: tuple[int, int], options: Options) -> Geometry:
        (grad, x), kernel = tensors, options[1]
        if not 1 <= len(kernel) == x.dim() - 2 == grad.dim() - 2:
            got = f"{list(grad.shape)}, {list(x.shape)}, {list(kernel)}"
            raise BlockSparseError.expected("grad, x, kernel", "two [n, *space, channels], a size of each axis", got)
        block = grad.shape[-1] // grid[0], x.shape[-1] // grid[1]
        out, in_ = features_of(grid, block)
        shapes = [(x.shape[0], *grad.shape[1:-1], out), (*x.shape[:-1], in_)]
        return Geometry(block, shapes, (nnz, *block, *kernel))

    def compute(self, tensors: Any, layout: BlockLayout, options: Options) -> Tensor:
        """Return the gradient of the values; one of a single tap is computed as that of a linear product."""
        (grad, x), (transposed, kernel, *steps) = tensors, options
        input, output = (grad, x) if transposed else (x, grad)
        axes = axes_of(input.shape[1:-1], output.shape[1:-1], kernel, *steps)
        backend = self.on(x.device, x.dtype)
        if backend is cpu and planes.serves(x, layout, axes):
            return planes.conv_wgrad(grad, x, layout, transposed, axes)
        if is_linear(axes) and (backend is not triton or triton.as_linear(x.dtype)):
            pair = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
            return LINEAR_WGRAD.compute(pair, layout, ()).reshape(*layout.values_shape, *kernel)
        result: Tensor = backend.conv_wgrad(grad, x, layout, transposed, axes)
        return result

    def backward(
        self, grad: Tensor, saved: Any, layout: AnyLayout, options: Options, needed: Sequence[bool]
    ) -> Tensors:
        """Return the gradients of grad and x: convolutions with the incoming gradient as the values."""
        (left, x), (transposed, _, *steps) = saved, options
        grad_left = grad_x = None
        if needed[0]:
            grad_left = CONV((x, grad, None), layout, (False, transposed, left.shape[1:-1], *steps, None))
        if needed[1]:
            grad_x = CONV((left, grad, None), layout, (True, not transposed, x.shape[1:-1], *steps, None))
        return grad_left, grad_x


BACKENDS = triton, cpu, reference
STEPS = "SymInt[] stride, SymInt[] padding, SymInt[] dilation"
CONV = Conv(
    "conv",
    "Tensor x, Tensor values, Tensor? bias",
    f"bool transpose, bool transposed, SymInt[] size, {STEPS}, str? activation",
    *BACKENDS,
)
CONV_WGRAD = ConvWgrad("conv_wgrad", "Tensor grad, Tensor x", f"bool transposed, SymInt[] kernel, {STEPS}", *BACKENDS)
conv_op, conv_wgrad_op = CONV.torch_op, CONV_WGRAD.torch_op


# -- torch.compile -----------------------------------------------------------------------------------------------


def launch_conv(
    x: Tensor, values: Tensor, bias: Tensor | None, indices: Sequence[Tensor], in_blocks: int, transpose: bool,
    transposed: bool, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    activation: str | None,
) -> Any:  # fmt: skip
    """Launch the Triton kernels of `Conv` in a compiled graph, or return NotImplemented for sizes that vary."""
    if _is_any_dynamic(*x.shape[1:-1], *size):
        return NotImplemented
    input, output = (size, x.shape[1:-1]) if transposed else (x.shape[1:-1], size)
    axes = axes_of(input, output, values.shape[3:], stride, padding, dilation)
    layout = traced_layout(indices, in_blocks, values.shape[1:3])
    if is_linear(axes) and triton.as_linear(x.dtype):
        matrix = values.reshape(layout.values_shape)
        y = products.linear(x.reshape(-1, x.shape[-1]), matrix, bias, layout, transpose, activation)
        return y.reshape(*x.shape[:-1], y.shape[-1])
    if triton.in_one_launch(axes, transposed):
        return NotImplemented
    return triton.conv(x, values, bias, layout, transpose, transposed, axes, activation)


def launch_conv_wgrad(
    grad: Tensor, x: Tensor, indices: Sequence[Tensor], in_blocks: int, transposed: bool, kernel: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
) -> Any:  # fmt: skip
    """Launch the Triton kernels of `ConvWgrad` in a compiled graph, or return NotImplemented for sizes that vary."""
    if _is_any_dynamic(*grad.shape[1:-1], *x.shape[1:-1]):
        return NotImplemented
    block = grad.shape[-1] // (indices[0].shape[0] - 1), x.shape[-1] // in_blocks
    layout = traced_layout(indices, in_blocks, block)
    input, output = (grad, x) if transposed else (x, grad)
    axes = axes_of(input.shape[1:-1], output.shape[1:-1], kernel, stride, padding, dilation)
    if is_linear(axes) and triton.as_linear(x.dtype):
        values = products.linear_wgrad(grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1]), layout)
        return values.reshape(*layout.values_shape, *kernel)
    return triton.conv_wgrad(grad, x, layout, transposed, axes)


def _is_any_dynamic(*sizes: Any) -> bool:
    """Return whether a size of space is dynamic; the geometry of the kernels depends on these sizes."""
    return any(isinstance(size, torch.SymInt) for size in sizes)


lower_to_triton(CONV, launch_conv)
lower_to_triton(CONV_WGRAD, launch_conv_wgrad)
