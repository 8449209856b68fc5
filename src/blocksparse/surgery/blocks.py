"""How a dense weight falls into blocks: padding, its numbers by block, numbers per block spread over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from ..convert import from_dense
from ..layout import BlockLayout
from .sharding import is_dtensor, sharding

Pair = tuple[int, int]


class Blocks:
    """The blocks of a parameter of a dense module; the parameter itself is not kept.

    Args:
        shape: of the parameter, `[out, in, *kernel]`.
        block_shape: (rows, columns).
        parts: how many weights it is, one above the other: four for an LSTM's gates. Each is padded by itself.
        transposed: whether the parameter is `[in, out, *kernel]`.
        stacked: whether it is `[parts, out, in]`.
        multiple: what the rows of a part and the columns are padded to, `block_shape` by default.
    """

    def __init__(
        self,
        shape: Sequence[int],
        block_shape: Pair,
        parts: int = 1,
        transposed: bool = False,
        multiple: Pair | None = None,
        stacked: bool = False,
    ):
        self._stacked = stacked
        shape = (shape[0] * shape[1], *shape[2:]) if stacked else shape
        self.size_of_matrix = out, in_ = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
        """(out, in) of the weight, without padding."""
        self._axes, self.transposed = len(shape) - 2, transposed
        self.block_shape, self.parts = block_shape, parts
        rows, columns = multiple or block_shape
        self.shape = _up(out // parts, rows) * parts, _up(in_, columns)
        """(out, in) of the layouts, whole blocks."""
        self.grid = self.shape[0] // block_shape[0], self.shape[1] // block_shape[1]
        self.taps = prod(shape[2:])
        self.size = block_shape[0] * block_shape[1] * self.taps
        """Numbers that each stored block has, padding included."""
        self.inside = (1, 3, *range(4, 4 + self._axes))
        """The axes of `fold` that are within a block."""

    def place_of_line(self, axis: int) -> np.ndarray:
        """Where each row (axis 0) or column (1) of the weight is once it is padded, int64, rising."""
        count, parts = self.size_of_matrix[axis], self.parts if axis == 0 else 1
        part, within = np.divmod(np.arange(count), count // parts)
        return part * (self.shape[axis] // parts) + within

    def block_of_line(self, axis: int) -> np.ndarray:
        """The row (axis 0) or column (1) of blocks of each row or column of the weight, int64, rising."""
        return self.place_of_line(axis) // self.block_shape[axis]

    @property
    def needs_padding(self) -> bool:
        return self.shape != self.size_of_matrix

    def matrix(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as `[out, in, *kernel]`: a view, which can be written to."""
        if self._stacked and tensor.dim() == 3:  # not `[out, in]` already
            return tensor.flatten(0, 1)
        return tensor.transpose(0, 1) if self.transposed else tensor

    def padded(self, tensor: Tensor) -> Tensor:
        """The same with zeros up to whole blocks, behind each part; differentiable."""
        return pad(self.matrix(tensor), self.shape, self.parts)

    def fold(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as `[out_blocks, rows, in_blocks, columns, *kernel]`, padded with zeros."""
        (out, in_), (height, width) = self.grid, self.block_shape
        matrix = self.padded(tensor)
        return matrix.reshape(out, height, in_, width, *matrix.shape[2:])

    def sums(self, tensor: Tensor) -> Tensor:
        """The sum over each block of a tensor of the parameter's shape, `[out_blocks, in_blocks]`."""
        return self.fold(tensor).sum(self.inside)

    def spread(self, per_block: Tensor) -> Tensor:
        """`[out_blocks, in_blocks]` as a tensor that broadcasts to the parameter: each number in all of its block."""
        (out, in_), (height, width) = self.grid, self.block_shape
        full = per_block[:, None, :, None].expand(out, height, in_, width)
        full = full.reshape(self.parts, out * height // self.parts, in_ * width)
        full = full[:, : self.size_of_matrix[0] // self.parts, : self.size_of_matrix[1]].reshape(self.size_of_matrix)
        full = full.unflatten(0, (self.parts, -1)) if self._stacked else full.T if self.transposed else full
        return full.reshape(*full.shape, *[1] * self._axes)


def pad(tensor: Tensor, shape: tuple[int, ...], parts: int = 1) -> Tensor:
    """The tensor with zeros behind each of its parts, so that its first axes have this shape."""
    if tuple(tensor.shape[: len(shape)]) == shape:
        return tensor
    split = tensor.unflatten(0, (parts, -1))
    target = (shape[0] // parts, *shape[1:])
    more = [(0, size - here) for size, here in zip(target, split.shape[1:], strict=False)]
    behind = [(0, 0)] * (tensor.dim() - len(shape))
    return F.pad(split, [n for pair in reversed(more + behind) for n in pair]).flatten(0, 1)


def reduce_blocks(blocks: Blocks, dense: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `reduce` of the folded weight, `[out_blocks, in_blocks]`, on every process; the weight may be sharded."""
    return sharding().reduce_blocks(blocks, dense, reduce) if is_dtensor(dense) else reduce(blocks.fold(dense))


def mask_blocks_(blocks: Blocks, dense: Tensor, keep: Tensor) -> None:
    """Zero all blocks of a dense weight, sharded or not, except those to keep, bool `[out_blocks, in_blocks]`."""
    if is_dtensor(dense):
        sharding().mask_blocks_(blocks, dense, keep)
    else:
        dense.masked_fill_(~blocks.spread(keep.to(dense.device)), 0)


def values_of(blocks: Blocks, layout: BlockLayout, dense: Tensor) -> Tensor:
    """Return the values of a dense weight on a layout; they are sharded by blocks if the weight is sharded."""
    if is_dtensor(dense):
        return sharding().values_of(blocks, layout, dense)
    return from_dense(blocks.padded(dense), layout)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
