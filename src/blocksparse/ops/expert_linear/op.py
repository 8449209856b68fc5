"""The products of experts as operations: the product, its transpose, and the gradient of the values.

Each is one node of autograd and of graphs, whose backward pass writes the gradient of all experts once. On a CPU,
one call of the compiled core serves all experts; other backends of `linear` are called per expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from .. import workspace
from ..graph_layout import AnyLayout
from ..linear import LINEAR
from ..registry import Geometry, LayoutOp, Options, Tensors, features_of
from . import cpu
from .parts import ExpertPart, parts_of


def _groups(starts: Tensor, rows: int, layout: BlockLayout) -> Iterator[tuple[int, int, ExpertPart]]:
    """Return for each expert the range of its rows and its part of the layout."""
    edges = _checked(starts, rows).tolist()
    return zip(edges[:-1], edges[1:], parts_of(layout, len(edges) - 1), strict=True)


def _checked(starts: Tensor, rows: int) -> Tensor:
    """Return these starts of groups of rows, or raise a BlockSparseError if they are none."""
    if int(starts[0]) != 0 or int(starts[-1]) > rows or bool((starts.diff() < 0).any()):
        raise BlockSparseError.expected("starts", f"0, then non-decreasing numbers up to {rows}", starts.tolist())
    return starts


class ExpertLinear(LayoutOp):
    """x W^T of each expert's rows, or x W with `transpose`.

    Its tensors are values and x, its options starts and transpose.
    """

    def geometry(self, tensors: Any, nnz: int, grid: tuple[int, int], options: Options) -> Geometry:
        (values, x), (starts, transpose) = tensors, options
        if values.dim() != 3 or x.dim() != 2:
            raise BlockSparseError.expected("values, x", "3-D, 2-D", f"{values.dim()}-D, {x.dim()}-D")
        block = values.shape[1], values.shape[2]
        out, in_ = features_of(_grid_of_part(grid, starts), block, transpose)
        return Geometry(block, [(nnz, *block), (x.shape[0], in_)], (x.shape[0], out))

    def compute(self, tensors: Any, layout: BlockLayout, options: Options) -> Tensor:
        """Return the products, one per expert with rows; rows behind the last expert's are 0."""
        (values, x), (starts, transpose) = tensors, options
        *_, shape = self.geometry(tensors, layout.nnz, layout.grid, options)
        if cpu.serves(layout, x, forward=not transpose):
            return cpu.expert_linear(x, values, layout, _checked(starts, x.shape[0]), transpose)
        y = workspace.empty(shape, x.dtype, x.device)
        y[int(starts[-1]) :].zero_()
        for begin, end, part in _groups(starts, x.shape[0], layout):
            if begin == end:
                continue
            rows, own, out = x[begin:end], values[part.blocks], y[begin:end]
            if part.is_matrix:
                torch.mm(rows, own[0] if transpose else own[0].T, out=out)
            else:
                LINEAR.on(x.device, x.dtype).linear(rows, own, None, part.layout, transpose, None, out)
        return y

    def backward(
        self, grad: Tensor, saved: Any, layout: AnyLayout, options: Options, needed: Sequence[bool]
    ) -> Tensors:
        """Return the gradients of values and x: `ExpertLinearWgrad` and the transposed product."""
        (values, x), (starts, transpose) = saved, options
        grad_values = grad_x = None
        if needed[0]:
            pair = (x, grad) if transpose else (grad, x)
            grad_values = EXPERT_LINEAR_WGRAD(pair, layout, (starts,))
        if needed[1]:
            grad_x = self((values, grad), layout, (starts, not transpose))
        return grad_values, grad_x


class ExpertLinearWgrad(LayoutOp):
    """The stored blocks of grad^T x of each expert's rows; its tensors are grad and x, its option is starts."""

    def geometry(self, tensors: Any, nnz: int, grid: tuple[int, int], options: Options) -> Geometry:
        (grad, x), (starts,) = tensors, options
        if grad.dim() != 2 or x.dim() != 2:
            raise BlockSparseError.expected("grad, x", "2-D, 2-D", f"{grad.dim()}-D, {x.dim()}-D")
        grid = _grid_of_part(grid, starts)
        block = grad.shape[1] // grid[0], x.shape[1] // grid[1]
        return Geometry(block, [(x.shape[0], size) for size in features_of(grid, block)], (nnz, *block))

    def compute(self, tensors: Any, layout: BlockLayout, options: Options) -> Tensor:
        """Return the stored blocks of all experts' gradients; those of an expert without rows are 0."""
        (grad, x), (starts,) = tensors, options
        if cpu.serves(layout, x):
            return cpu.expert_linear_wgrad(grad, x, layout, _checked(starts, x.shape[0]))
        values = workspace.empty(layout.values_shape, x.dtype, x.device)
        for begin, end, part in _groups(starts, x.shape[0], layout):
            left, right, out = grad[begin:end], x[begin:end], values[part.blocks]
            if begin == end:
                out.zero_()
            elif part.is_matrix:
                torch.mm(left.T, right, out=out[0])
            else:
                LINEAR.on(x.device, x.dtype).linear_wgrad(left, right, part.layout, out)
        return values

    def backward(
        self, grad: Tensor, saved: Any, layout: AnyLayout, options: Options, needed: Sequence[bool]
    ) -> Tensors:
        """Return the gradients of grad and x: products with the incoming gradient as the values."""
        (left, x), (starts,) = saved, options
        grad_left = EXPERT_LINEAR((grad, x), layout, (starts, False)) if needed[0] else None
        return grad_left, EXPERT_LINEAR((grad, left), layout, (starts, True)) if needed[1] else None


def _grid_of_part(grid: tuple[int, int], starts: Tensor) -> tuple[int, int]:
    """Return the grid of one expert's weight."""
    return grid[0] // (starts.shape[0] - 1), grid[1]


BACKENDS = LINEAR.backends.values()
EXPERT_LINEAR = ExpertLinear("expert_linear", "Tensor values, Tensor x", "Tensor starts, bool transpose", *BACKENDS)
EXPERT_LINEAR_WGRAD = ExpertLinearWgrad("expert_linear_wgrad", "Tensor grad, Tensor x", "Tensor starts", *BACKENDS)
