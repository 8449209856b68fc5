"""The matrix product of OpenAI's blocksparse (2017), on torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checked import boolean, is_int, shape_of
from ..convert import block_coordinates
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops import linear_transposed

__all__ = ["BlocksparseMatMul"]


class BlocksparseMatMul:
    """The product with a block-sparse matrix, `y = bsmm(x, w)`, with the interface of OpenAI's blocksparse (2017).

    Args:
        layout: 0/1 matrix `[in_blocks, out_blocks]` (int or bool; array, tensor or nested lists), 1 where a block is
            stored. Inputs come first, unlike in a mask of `BlockLayout`.
        block_size: an int, or a pair (inputs, outputs). Default: 32.
        feature_axis: 1 (default) for `x [..., in]`, which is faster; 0 for `x [in, batch]`, which is transposed for the
            call.
        z_order: whether the blocks of `w` and the gates are in z-order, as the 2017 library saved them. If False, the
            default, they are in row-major order of `layout`: by input, then by output.

    Attributes:
        layout: the `BlockLayout` of the matrix `[in, out]`.
        w_shape: (nnz, block, block), the shape of the weights.

    The defaults differ from the last 2017 code (1.13.1), where `BlocksparseMatMul(layout)` means
    `BlocksparseMatMul(layout, feature_axis=0, z_order=True)`; its README documents axis 1. If x is square, the wrong
    axis raises no error but gives a wrong result.

    Block k of `w` maps inputs to outputs, `y[:, out_k] += x[:, in_k] @ w[k]`; `block_coord` returns the position of
    each block. In row-major order `w` is the `values` of `bsmm.layout`. The same map with `blocksparse.linear` is
    `bsmm(x, w) == linear(x, w.mT[bsmm.layout.transpose_order], bsmm.layout.T)`. Row-major weights are not copied. With
    `z_order=True` each call sorts a copy; `row_major` sorts the weights once.

    Raises:
        BlockSparseError: the layout is not a 2-D 0/1 matrix, the block size is not positive, or the axis or `z_order`
            is another value.

    Example:
        >>> import numpy as np, torch
        >>> from blocksparse.matmul import BlocksparseMatMul
        >>> sparsity = np.array([[1, 0, 1], [0, 1, 1]])
        >>> bsmm = BlocksparseMatMul(sparsity, block_size=32)
        >>> w = torch.randn(bsmm.w_shape)
        >>> bsmm(torch.randn(64, 2 * 32), w).shape
        torch.Size([64, 96])

    Notes:
        The z-order (Morton order) sorts blocks by the interleaved bits of their two indices, highest bits first, in
        each pair the output's bit before the input's.

    Source: Gray, Radford, Kingma, GPU Kernels for Block-Sparse Weights (2017); github.com/openai/blocksparse.
    """

    def __init__(
        self, layout: Any, block_size: int | tuple[int, int] = 32, feature_axis: int = 1, z_order: bool = False
    ):
        if not is_int(feature_axis) or feature_axis not in (0, 1):
            raise BlockSparseError.expected("feature_axis", "0 or 1", repr(feature_axis))
        self.layout = BlockLayout(layout, block_size)
        self.feature_axis = feature_axis
        self.z_order = boolean("z_order", z_order)
        # Block k of w is block order[k] of the layout.
        self._order = _z_order(self.layout) if z_order else None
        self._inverse = None if self._order is None else self._order.argsort()

    @property
    def w_shape(self) -> tuple[int, int, int]:
        """The shape of the weight: (nnz, block, block)."""
        return self.layout.values_shape

    def i_shape(self, batch: int) -> tuple[int, int]:
        """Return the shape of x for a batch: (batch, in), or (in, batch) for feature_axis 0."""
        return self._shape(batch, self.layout.shape[0])

    def o_shape(self, batch: int) -> tuple[int, int]:
        """Return the shape of y for a batch: (batch, out), or (out, batch) for feature_axis 0."""
        return self._shape(batch, self.layout.shape[1])

    def _shape(self, batch: int, features: int) -> tuple[int, int]:
        return (batch, features) if self.feature_axis == 1 else (features, batch)

    def block_coord(self, block: int) -> tuple[int, int]:
        """Return (input block, output block) of the stored block number `block`."""
        if not is_int(block) or not 0 <= block < self.layout.nnz:
            raise BlockSparseError.expected("block", f"an int from 0 to {self.layout.nnz - 1}", repr(block))
        at = block if self._order is None else int(self._order[block])
        return int(self.layout.row_of_block[at]), int(self.layout.col_of_block[at])

    def row_major(self, blocks: Tensor) -> Tensor:
        """Sort weights or gates in the row-major order of `layout`, the order of `bs.to_dense` and `z_order=False`.

        Args:
            blocks: `w` of shape `w_shape`, or gates `[nnz]`.

        Returns:
            A sorted copy with `z_order=True`; `blocks` itself with `z_order=False`.

        Raises:
            BlockSparseError: `blocks` is not a tensor, or has another number of blocks.

        Example:
            >>> bsmm = BlocksparseMatMul([[1, 1], [1, 1]], block_size=2, z_order=True)
            >>> [bsmm.block_coord(k) for k in range(4)]
            [(0, 0), (1, 0), (0, 1), (1, 1)]
            >>> bsmm.row_major(torch.arange(4))
            tensor([0, 2, 1, 3])
        """
        if not isinstance(blocks, Tensor) or blocks.shape[:1] != (self.layout.nnz,):
            raise BlockSparseError.expected("blocks", f"a tensor [{self.layout.nnz}, ...]", shape_of(blocks))
        return blocks if self._inverse is None else blocks[self._inverse.to(blocks.device)]

    def __call__(self, x: Tensor, w: Tensor, gate: Tensor | None = None) -> Tensor:
        """Compute y = x W.

        Args:
            x: `[..., in]`, or `[in, batch]` for feature_axis 0.
            w: `w_shape`; dtype and device as x.
            gate: `[nnz]`, a factor for each block, in the order of `w`, or None; see `blocksparse.linear`.

        Returns:
            `[..., out]`, or `[out, batch]` for feature_axis 0.

        Raises:
            BlockSparseError: sizes do not fit, or dtypes or devices are mixed.
        """
        if self.z_order:
            w, gate = self.row_major(w), None if gate is None else self.row_major(gate)
        if self.feature_axis == 1:
            return linear_transposed(x, w, self.layout, gate)
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[0] != self.layout.shape[0]:
            raise BlockSparseError.expected("x", f"[{self.layout.shape[0]}, batch] for feature_axis=0", shape_of(x))
        return linear_transposed(x.T, w, self.layout, gate).T

    def identity_init(self, scale: float = 1.0, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """Return weights `w_shape` with `scale` times the identity in each stored block of the diagonal, 0 in others.

        As in 2017, the diagonal of a matrix that is not square wraps around: with fewer inputs than outputs every input
        is copied to several outputs.

        >>> bsmm = BlocksparseMatMul([[1, 1, 1, 0]], block_size=2)
        >>> bsmm(torch.tensor([[1.0, 2.0]]), bsmm.identity_init())
        tensor([[1., 2., 1., 2., 1., 2., 0., 0.]])
        """
        w = torch.zeros(self.w_shape, dtype=dtype, device=device)
        inputs, outputs = block_coordinates(self.layout, w.device)
        in_blocks, out_blocks = self.layout.grid
        on_diagonal = inputs % out_blocks == outputs % in_blocks
        w[on_diagonal] = scale * torch.eye(*self.layout.block_shape, dtype=dtype, device=device)
        return w if self._order is None else w[self._order.to(w.device)]

    def __repr__(self) -> str:
        inputs, outputs = self.layout.shape
        order = ", z_order=True" if self.z_order else ""
        return (
            f"BlocksparseMatMul({inputs} -> {outputs}, block_size={self.layout.block_shape}, nnz={self.layout.nnz}, "
            f"density={self.layout.density:.4g}, feature_axis={self.feature_axis}{order})"
        )


def _z_order(layout: BlockLayout) -> Tensor:
    """Return the blocks of a layout, as indices in row-major order, sorted by the interleaved bits of their places."""
    inputs, outputs = (_every_second_bit(index) for index in (layout.row_of_block, layout.col_of_block))
    return torch.from_numpy(np.argsort(inputs | outputs << 1))


def _every_second_bit(index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Move bit i of each index to bit 2 i."""
    index = index.astype(np.int64)
    spread = np.zeros_like(index)
    for bit in range(int(index.max(initial=0)).bit_length()):
        spread |= (index & 1 << bit) << bit
    return spread
