"""The interface of the 2017 library, on torch tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checked import is_int, shape_of
from .convert import block_coordinates
from .errors import BlockSparseError
from .layout import BlockLayout
from .ops import linear_transposed

__all__ = ["BlocksparseMatMul"]


class BlocksparseMatMul:
    """The product with a block-sparse matrix as OpenAI's blocksparse had it: `y = bsmm(x, w)`.

    Args:
        layout: 0/1 matrix `[in_blocks, out_blocks]` (int or bool; array, tensor or nested lists), 1 where a block is
            stored. Note the order: inputs first, where a mask of `BlockLayout` has outputs first.
        block_size: an int, or a pair (inputs, outputs).
        feature_axis: 1 for `x [..., in]`, the fast one; 0 for `x [in, batch]`, which is transposed for the call.

    Attributes:
        layout: the `BlockLayout` of the matrix `[in, out]`.
        w_shape: (nnz, block, block), the shape of the weights.

    Block k of `w` maps inputs to outputs, `y[:, out_k] += x[:, in_k] @ w[k]`, and the blocks are in row-major order of
    `layout`: by input, then by output (2017's `z_order=False`; `block_coord` tells each one's place). So `w` is the
    `values` of `bsmm.layout`, the transpose of what `blocksparse.linear` takes for the same map:
    `bsmm(x, w) == linear(x, w.mT[bsmm.layout.transpose_order], bsmm.layout.T)`. Nothing is copied for it here.

    Raises:
        BlockSparseError: a layout that is not a 2-D 0/1 matrix, a block size that is not positive, another axis.

    Example:
        >>> import numpy as np, torch
        >>> from blocksparse.matmul import BlocksparseMatMul
        >>> sparsity = np.array([[1, 0, 1], [0, 1, 1]])
        >>> bsmm = BlocksparseMatMul(sparsity, block_size=32)
        >>> w = torch.randn(bsmm.w_shape)
        >>> bsmm(torch.randn(64, 2 * 32), w).shape
        torch.Size([64, 96])

    Source: Gray, Radford, Kingma, GPU Kernels for Block-Sparse Weights (2017); github.com/openai/blocksparse.
    """

    def __init__(self, layout: Any, block_size: int | tuple[int, int] = 32, feature_axis: int = 1):
        if not is_int(feature_axis) or feature_axis not in (0, 1):
            raise BlockSparseError.expected("feature_axis", "0 or 1", repr(feature_axis))
        self.layout = BlockLayout(layout, block_size)
        self.feature_axis = feature_axis

    @property
    def w_shape(self) -> tuple[int, int, int]:
        """The shape of the weight: (nnz, block, block)."""
        return self.layout.values_shape

    def i_shape(self, batch: int) -> tuple[int, int]:
        """The shape of x for a batch: (batch, in), or (in, batch) for feature_axis 0."""
        return self._shape(batch, self.layout.shape[0])

    def o_shape(self, batch: int) -> tuple[int, int]:
        """The shape of y for a batch: (batch, out), or (out, batch) for feature_axis 0."""
        return self._shape(batch, self.layout.shape[1])

    def _shape(self, batch: int, features: int) -> tuple[int, int]:
        return (batch, features) if self.feature_axis == 1 else (features, batch)

    def block_coord(self, block: int) -> tuple[int, int]:
        """(input block, output block) of one stored block."""
        if not is_int(block) or not 0 <= block < self.layout.nnz:
            raise BlockSparseError.expected("block", f"an int from 0 to {self.layout.nnz - 1}", repr(block))
        return int(self.layout.row_of_block[block]), int(self.layout.col_of_block[block])

    def __call__(self, x: Tensor, w: Tensor, gate: Tensor | None = None) -> Tensor:
        """y = x W.

        Args:
            x: `[..., in]`, or `[in, batch]` for feature_axis 0.
            w: of shape `w_shape`; dtype and device as x.
            gate: `[nnz]`, what each block is multiplied with, or None; see `blocksparse.linear`.

        Returns:
            `[..., out]`, or `[out, batch]` for feature_axis 0.

        Raises:
            BlockSparseError: sizes that do not fit, mixed dtypes or devices.
        """
        if self.feature_axis == 1:
            return linear_transposed(x, w, self.layout, gate)
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[0] != self.layout.shape[0]:
            raise BlockSparseError.expected("x", f"[{self.layout.shape[0]}, batch] for feature_axis=0", shape_of(x))
        return linear_transposed(x.T, w, self.layout, gate).T

    def identity_init(self, scale: float = 1.0, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """Weights `w_shape` with `scale` times the identity in each stored block of the diagonal, 0 elsewhere.

        In a matrix that is not square the diagonal goes on from the other end, as in 2017: with fewer inputs than
        outputs every input is copied to several outputs.

        >>> bsmm = BlocksparseMatMul([[1, 1, 1, 0]], block_size=2)
        >>> bsmm(torch.tensor([[1.0, 2.0]]), bsmm.identity_init())
        tensor([[1., 2., 1., 2., 1., 2., 0., 0.]])
        """
        w = torch.zeros(self.w_shape, dtype=dtype, device=device)
        inputs, outputs = block_coordinates(self.layout, w.device)
        in_blocks, out_blocks = self.layout.grid
        on_diagonal = inputs % out_blocks == outputs % in_blocks
        w[on_diagonal] = scale * torch.eye(*self.layout.block_shape, dtype=dtype, device=device)
        return w

    def __repr__(self) -> str:
        inputs, outputs = self.layout.shape
        return (
            f"BlocksparseMatMul({inputs} -> {outputs}, block_size={self.layout.block_shape}, nnz={self.layout.nnz}, "
            f"density={self.layout.density:.4g}, feature_axis={self.feature_axis})"
        )
