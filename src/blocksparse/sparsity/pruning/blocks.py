"""The blocks of a dense weight: its numbers by block, and numbers per block spread over it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...surgery.prunable import Prunable, parts_of
from .magnitude import norms_of


class Blocks:
    """How a parameter of a dense module falls into blocks; the parameter itself is not kept.

    >>> import torch
    >>> from blocksparse.surgery.prunable import prunable
    >>> from blocksparse.sparsity.pruning.blocks import Blocks
    >>> layer = torch.nn.Linear(3, 2)
    >>> blocks = Blocks(prunable(layer, block_size=2)[0])
    >>> blocks.grid, blocks.spread(torch.tensor([[1.0, 2.0]]))
    ((1, 2), tensor([[1., 1., 2.],
            [1., 1., 2.]]))
    >>> blocks.sums(torch.ones(2, 3))       # the second block is half padding
    tensor([[4., 2.]])
    """

    def __init__(self, weight: Prunable):
        matrix, parameter = weight.matrix(), getattr(weight.module, weight.parameter)
        self.grid, self.block_shape = weight.grid, weight.block_shape
        self._parts = parts_of(weight.module, weight.parameter)
        self._rows, self._columns = matrix.shape[:2]
        self._axes = matrix.dim() - 2
        # Some modules keep [in, out].
        self._turned = (matrix.shape, matrix.stride()) != (parameter.shape, parameter.stride())
        self.taps = matrix.shape[2:].numel()
        self.inside = (1, 3, *range(4, 4 + self._axes))  # the axes of `fold` that are within a block

    @property
    def size(self) -> int:
        """Numbers that each stored block has, padding included."""
        return self.block_shape[0] * self.block_shape[1] * self.taps

    def fold(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as `[out_blocks, rows, in_blocks, columns, *kernel]`, padded with zeros."""
        (out, in_), (height, width) = self.grid, self.block_shape
        matrix = tensor.transpose(0, 1) if self._turned else tensor
        more = out * height // self._parts - self._rows // self._parts, in_ * width - self._columns
        matrix = matrix.unflatten(0, (self._parts, -1))
        if any(more):
            matrix = F.pad(matrix, [0, 0] * self._axes + [0, more[1], 0, more[0]])
        return matrix.reshape(out, height, in_, width, *matrix.shape[3:])

    def sums(self, tensor: Tensor) -> Tensor:
        """The sum over each block of a tensor of the parameter's shape, `[out_blocks, in_blocks]`."""
        return self.fold(tensor).sum(self.inside)

    def norms(self, tensor: Tensor, norm: str = "l2") -> Tensor:
        """The magnitude of each block, `[out_blocks, in_blocks]`, "l2", "mean" or "max", without gradients."""
        return norms_of(self.fold(tensor), norm, self.inside)

    def spread(self, per_block: Tensor) -> Tensor:
        """`[out_blocks, in_blocks]` as a tensor that broadcasts to the parameter: each number in all of its block."""
        (out, in_), (height, width) = self.grid, self.block_shape
        full = per_block[:, None, :, None].expand(out, height, in_, width)
        full = full.reshape(self._parts, out * height // self._parts, in_ * width)
        full = full[:, : self._rows // self._parts, : self._columns].reshape(self._rows, self._columns)
        full = full.T if self._turned else full
        return full.reshape(*full.shape, *[1] * self._axes)
