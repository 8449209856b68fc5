"""The two linear products as operations.

`linear` is y = x W^T + b; with `transpose` it is y = x W, the gradient of its own input. `linear_wgrad` is the
product sampled on the layout. Graphs compiled for a GPU are lowered to the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..activations import grad_before
from ..graph_layout import AnyLayout, index_tensors
from ..lower_to_triton import is_bucket_known, lower_to_triton, needs_schedule, traced_layout
from ..registry import (
    Geometry,
    LayoutOp,
    Options,
    Tensors,
    can_call_directly,
    features_of,
    matrix_block,
    needs_grad,
)
from . import cpu, reference, triton


class Linear(LayoutOp):
    """activation(x W^T + bias), or with `transpose` activation(x W + bias).

    Its tensors are x, values and bias, its options transpose and activation.
    """

    def indices(self, layout: BlockLayout, tensors: Any, options: Options) -> Sequence[Tensor]:
        """Return crow and col, and the GPU's schedule if a graph needs it."""
        x, indices = tensors[0], index_tensors(layout, tensors[0].device)
        if not (needs_schedule(layout, x) and is_bucket_known(x.shape[0])):
            return indices
        return [*indices, *triton.schedule(layout, x.device, x.dtype, x.shape[0])]

    def geometry(self, tensors: Any, nnz: int, grid: tuple[int, int], options: Options) -> Geometry:
        (x, values, _), (transpose, activation) = tensors, options
        block = matrix_block(x, values, activation)
        out, in_ = features_of(grid, block, transpose)
        return Geometry(block, [(x.shape[0], in_), (nnz, *block), (out,)], (x.shape[0], out))

    def backward(
        self, grad: Tensor, saved: Any, layout: AnyLayout, options: Options, needed: Sequence[bool]
    ) -> Tensors:
        """Return the gradients of x, values and bias: the transposed product, `LinearWgrad`, and sums over tokens.

        With blocks of 1x1 on the CPU, one call of the core computes all three if none is differentiated again.
        """
        (x, values, bias, output), (transpose, activation) = saved, options
        # Only calls of the op itself save a bias: the public function does not fuse "gelu" and "silu" in training.
        grad = grad_before(grad, activation, output, lambda: self((x, values, bias), layout, (transpose, None)))
        linear: Callable[..., Tensor] = self
        wgrad: Callable[..., Tensor] = LINEAR_WGRAD
        if can_call_directly(layout, grad, x, values):
            if needed[1] and not transpose and layout.block_shape == (1, 1) and not needs_grad(grad, x, values):
                all_gradients = getattr(self.on(x.device, x.dtype), "gradients", None)
                grads: Tensors | None = all_gradients and all_gradients(grad, x, values, layout, needed[0], needed[2])
                if grads is not None:
                    return grads
            linear, wgrad = self.direct, LINEAR_WGRAD.direct
        grad_x = grad_values = None
        if needed[0]:
            grad_x = linear((grad, values, None), layout, (not transpose, None))
        if needed[1]:
            grad_values = wgrad((x, grad) if transpose else (grad, x), layout)
        return grad_x, grad_values, grad.sum(0) if needed[2] else None


class LinearWgrad(LayoutOp):
    """The blocks of grad^T x that the layout stores; its tensors are grad and x."""

    def geometry(self, tensors: Any, nnz: int, grid: tuple[int, int], options: Options) -> Geometry:
        grad, x = tensors
        if grad.dim() != 2 or x.dim() != 2:
            raise BlockSparseError.expected(
                "grad, x", "[tokens, out], [tokens, in]", f"{list(grad.shape)}, {list(x.shape)}"
            )
        block = grad.shape[1] // grid[0], x.shape[1] // grid[1]
        return Geometry(block, [(x.shape[0], size) for size in features_of(grid, block)], (nnz, *block))

    def backward(
        self, grad: Tensor, saved: Any, layout: AnyLayout, options: Options, needed: Sequence[bool]
    ) -> Tensors:
        """Return the gradients of grad and x: products with the incoming gradient as the values."""
        left, x = saved
        grad_left = LINEAR((x, grad, None), layout, (False, None)) if needed[0] else None
        return grad_left, LINEAR((left, grad, None), layout, (True, None)) if needed[1] else None


BACKENDS = triton, cpu, reference
LINEAR = Linear("linear", "Tensor x, Tensor values, Tensor? bias", "bool transpose, str? activation", *BACKENDS)
LINEAR_WGRAD = LinearWgrad("linear_wgrad", "Tensor grad, Tensor x", "", *BACKENDS)
linear_op, linear_wgrad_op = LINEAR.torch_op, LINEAR_WGRAD.torch_op


# -- torch.compile -----------------------------------------------------------------------------------------------


def launch_linear(
    x: Tensor, values: Tensor, bias: Tensor | None, indices: Sequence[Tensor], in_blocks: int, transpose: bool,
    activation: str | None,
) -> Tensor:  # fmt: skip
    """Launch the Triton kernels of `Linear` in a compiled graph."""
    layout = traced_layout(indices, in_blocks, values.shape[1:])
    return triton.linear(x, values, bias, layout, transpose, activation)


def launch_linear_wgrad(grad: Tensor, x: Tensor, indices: Sequence[Tensor], in_blocks: int) -> Tensor:
    """Launch the Triton kernel of `LinearWgrad` in a compiled graph."""
    block = grad.shape[1] // (indices[0].shape[0] - 1), x.shape[1] // in_blocks
    return triton.linear_wgrad(grad, x, traced_layout(indices, in_blocks, block))


lower_to_triton(LINEAR, launch_linear)
lower_to_triton(LINEAR_WGRAD, launch_linear_wgrad)
