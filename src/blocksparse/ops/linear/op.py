"""The two linear products.

`linear` is y = x W^T + b; with `transpose` it is y = x W, the gradient of its own input. `linear_wgrad` is the
product sampled on the layout. Graphs compiled for a GPU bring their schedule behind the index tensors and see through
the ops to the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..activations import ACTIVATIONS, grad_before
from ..operands import OperandLayout
from ..registry import (
    LIBRARY,
    Geometry,
    LayoutOp,
    Pattern,
    Tensors,
    features_of,
    indices_of,
    needs_grad,
    only_autograd_active,
)
from . import cpu, reference, triton

# Graphs compiled for devices of this type hold the launches of kernels in place of the ops.
SEEN_THROUGH = "cuda"


class _Product(LayoutOp):
    def indices(self, layout: BlockLayout, x: Tensor) -> Sequence[Tensor]:
        indices = indices_of(layout, x.device)
        fixed = not isinstance(layout, OperandLayout)
        if fixed and torch.compiler.is_dynamo_compiling() and x.device.type == SEEN_THROUGH:
            return [*indices, *triton.schedule(layout, x.device, x.dtype, x.shape[0])]
        return indices


class Linear(_Product):
    """activation(x W^T + bias), or activation(x W + bias): x, values, bias; transpose, activation."""

    def geometry(self, tensors: Any, nnz: int, grid: tuple[int, int], options: Sequence[Any]) -> Geometry:
        (x, values, _), (transpose, activation) = tensors, options
        if x.dim() != 2 or values.dim() != 3 or activation not in ACTIVATIONS:
            expected = f"2-D, 3-D, one of {list(ACTIVATIONS)}"
            got = f"{x.dim()}-D, {values.dim()}-D, {activation!r}"
            raise BlockSparseError.expected("x, values, activation", expected, got)
        tokens, block = x.shape[0], (values.shape[1], values.shape[2])
        out, in_ = features_of(grid, block, transpose)
        return Geometry(block, [(tokens, in_), (nnz, *block), (out,)], (tokens, out))

    def backward(
        self, grad: Tensor, kept: Any, layout: BlockLayout | Pattern, options: Sequence[Any], needed: Sequence[bool]
    ) -> Tensors:
        (x, values, bias, output), (transpose, activation) = kept, options
        # Only direct calls of the op keep a bias: the public function does not fuse "gelu" and "silu" while training.
        grad = grad_before(grad, activation, output, lambda: self((x, values, bias), layout, (transpose, None)))
        linear: Callable[..., Tensor] = self
        wgrad: Callable[..., Tensor] = LINEAR_WGRAD
        if isinstance(layout, BlockLayout) and only_autograd_active(grad, x, values):
            if needed[1] and not transpose and layout.block_shape == (1, 1) and not needs_grad(grad, x, values):
                together = getattr(self.on(x.device, x.dtype), "gradients", None)
                found: Tensors | None = together and together(grad, x, values, layout, needed[0], needed[2])
                if found is not None:
                    return found
            linear, wgrad = self.direct, LINEAR_WGRAD.direct
        grad_x = grad_values = None
        if needed[0]:
            grad_x = linear((grad, values, None), layout, (not transpose, None))
        if needed[1]:
            grad_values = wgrad((x, grad) if transpose else (grad, x), layout)
        return grad_x, grad_values, grad.sum(0) if needed[2] else None


class LinearWgrad(_Product):
    """The blocks of grad^T x that the layout stores: grad, x."""

    def geometry(self, tensors: Any, nnz: int, grid: tuple[int, int], options: Sequence[Any]) -> Geometry:
        grad, x = tensors
        if grad.dim() != 2 or x.dim() != 2:
            raise BlockSparseError.expected(
                "grad, x", "[tokens, out], [tokens, in]", f"{list(grad.shape)}, {list(x.shape)}"
            )
        block = grad.shape[1] // grid[0], x.shape[1] // grid[1]
        return Geometry(block, [(x.shape[0], size) for size in features_of(grid, block)], (nnz, *block))

    def backward(
        self, grad: Tensor, kept: Any, layout: BlockLayout | Pattern, options: Sequence[Any], needed: Sequence[bool]
    ) -> Tensors:
        left, x = kept
        grad_left = LINEAR((x, grad, None), layout, (False, None)) if needed[0] else None
        return grad_left, LINEAR((left, grad, None), layout, (True, None)) if needed[1] else None


BACKENDS = triton, cpu, reference
LINEAR = Linear("linear", "Tensor x, Tensor values, Tensor? bias", "bool transpose, str? activation", *BACKENDS)
LINEAR_WGRAD = LinearWgrad("linear_wgrad", "Tensor grad, Tensor x", "", *BACKENDS)
linear_op, linear_wgrad_op = LINEAR.torch_op, LINEAR_WGRAD.torch_op


# -- torch.compile -----------------------------------------------------------------------------------------------


def _linear_traced(
    x: Tensor, values: Tensor, bias: Tensor | None, indices: Sequence[Tensor], in_blocks: int, transpose: bool,
    activation: str | None,
) -> Tensor:  # fmt: skip
    layout = _traced_layout(indices, in_blocks, values.shape[1:])
    return triton.linear(x, values, bias, layout, transpose, activation)


def _linear_wgrad_traced(grad: Tensor, x: Tensor, indices: Sequence[Tensor], in_blocks: int) -> Tensor:
    block = grad.shape[1] // (indices[0].shape[0] - 1), x.shape[1] // in_blocks
    return triton.linear_wgrad(grad, x, _traced_layout(indices, in_blocks, block))


def _traced_layout(indices: Sequence[Tensor], in_blocks: int, block: Sequence[int]) -> triton.TracedLayout:
    crow, col, *schedule = indices
    # Sizes of a layout are constants, whatever sizes of x the tracer takes for dynamic.
    grid = int(crow.shape[0]) - 1, int(in_blocks)
    return triton.TracedLayout(grid, (int(block[0]), int(block[1])), int(col.shape[0]), schedule)


def _see_through(traced: Callable[..., Tensor]) -> Callable[..., Any]:
    """Replaces the op by launches of its kernels in a graph with a schedule, as `torch.library.triton_op` does."""

    def rule(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        scheduled = any(isinstance(argument, list | tuple) and len(argument) > 2 for argument in args)
        # Exported graphs keep the op, so that they are self-contained.
        if not scheduled or not torch._functorch.config.decompose_custom_triton_ops:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return traced(*args, **kwargs)

    return rule


for _op, _traced in ((LINEAR, _linear_traced), (LINEAR_WGRAD, _linear_wgrad_traced)):
    torch.library.register_torch_dispatch(
        f"blocksparse::{_op.name}", FunctionalTensorMode, _see_through(_traced), lib=LIBRARY
    )
