"""The division of a dense weight into blocks: padding, views by block, reductions per block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from ..convert import from_dense
from ..layout import BlockLayout
from ..nn.padding import padded_to
from .sharding import is_dtensor, sharding

Pair = tuple[int, int]


class Blocks:
    """The blocks of a dense parameter; the parameter itself is not stored.

    Args:
        shape: the parameter's shape, `[out, in, *kernel]`.
        block_shape: (rows, columns).
        parts: the number of weights in it, one above the other, such as the 4 gates of an LSTM (default 1). Each is
            padded by itself.
        transposed: whether the parameter is `[in, out, *kernel]`.
        multiple: the rows of a part and the columns are padded to multiples of it (default `block_shape`).
        stacked: whether the parameter is `[parts, out, in]`.
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
        self.shape = padded_to(out // parts, rows) * parts, padded_to(in_, columns)
        """(out, in) of the layouts, padded to whole blocks."""
        self.grid = self.shape[0] // block_shape[0], self.shape[1] // block_shape[1]
        self.taps = prod(shape[2:])
        self.size = block_shape[0] * block_shape[1] * self.taps
        """The number of parameters in a block, padding included."""
        self.inside = (1, 3, *range(4, 4 + self._axes))
        """The axes of `fold` that are inside a block."""

    def place_of_line(self, axis: int) -> np.ndarray:
        """Return the positions of the weight's rows (axis 0) or columns (axis 1) after padding, int64, rising."""
        count, parts = self.size_of_matrix[axis], self.parts if axis == 0 else 1
        part, within = np.divmod(np.arange(count), count // parts)
        return part * (self.shape[axis] // parts) + within

    def block_of_line(self, axis: int) -> np.ndarray:
        """Return the row (axis 0) or column (axis 1) of blocks that each row or column of the weight is in, int64."""
        return self.place_of_line(axis) // self.block_shape[axis]

    @property
    def needs_padding(self) -> bool:
        return self.shape != self.size_of_matrix

    def matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape as `[out, in, *kernel]`, a writable view."""
        if self._stacked and tensor.dim() == 3:  # not `[out, in]` already
            return tensor.flatten(0, 1)
        return tensor.transpose(0, 1) if self.transposed else tensor

    def padded(self, tensor: Tensor) -> Tensor:
        """Return `matrix(tensor)` padded with zeros to whole blocks, each part by itself; differentiable."""
        return pad(self.matrix(tensor), self.shape, self.parts)

    def fold(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape, padded, as `[out_blocks, rows, in_blocks, columns, *kernel]`."""
        (out, in_), (height, width) = self.grid, self.block_shape
        matrix = self.padded(tensor)
        return matrix.reshape(out, height, in_, width, *matrix.shape[2:])

    def sums(self, tensor: Tensor) -> Tensor:
        """Return the sum over each block of a tensor of the parameter's shape, `[out_blocks, in_blocks]`."""
        return self.fold(tensor).sum(self.inside)

    def spread(self, per_block: Tensor) -> Tensor:
        """Expand numbers per block, `[out_blocks, in_blocks]`, to a tensor that broadcasts to the parameter."""
        (out, in_), (height, width) = self.grid, self.block_shape
        full = per_block[:, None, :, None].expand(out, height, in_, width)
        full = full.reshape(self.parts, out * height // self.parts, in_ * width)
        full = full[:, : self.size_of_matrix[0] // self.parts, : self.size_of_matrix[1]].reshape(self.size_of_matrix)
        full = full.unflatten(0, (self.parts, -1)) if self._stacked else full.T if self.transposed else full
        return full.reshape(*full.shape, *[1] * self._axes)


def pad(tensor: Tensor, shape: tuple[int, ...], parts: int = 1) -> Tensor:
    """Pad each part of a tensor with zeros at the end, so that its first axes get this shape."""
    if tuple(tensor.shape[: len(shape)]) == shape:
        return tensor
    split = tensor.unflatten(0, (parts, -1))
    target = (shape[0] // parts, *shape[1:])
    added = [(0, size - old) for size, old in zip(target, split.shape[1:], strict=False)]
    added += [(0, 0)] * (tensor.dim() - len(shape))
    return F.pad(split, [n for pair in reversed(added) for n in pair]).flatten(0, 1)


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
