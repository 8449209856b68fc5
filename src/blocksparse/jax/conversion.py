"""Conversion between dense weights and the values of a layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..errors import BlockSparseError
from .layouts import Layout, check_indices, check_jax_layout
from .products import check_values, checked_array

__all__ = ["from_dense", "to_dense"]


def from_dense(weight: jax.Array, layout: Layout) -> jax.Array:
    """Return the values of the layout's blocks from a dense weight; other elements are dropped. Differentiable.

    Args:
        weight: `[out_features, in_features]`.
        layout: a layout with that shape.

    Returns:
        `[nnz, block_out, block_in]`, with the weight's dtype.

    Raises:
        BlockSparseError: the weight has another shape than the layout, or indices that are not traced are invalid.

    >>> import jax.numpy as jnp, blocksparse as bs, blocksparse.jax as bsj
    >>> layout = bsj.layout(bs.BlockLayout([[True, False], [True, True]], block_size=2))
    >>> bsj.from_dense(jnp.arange(16.0).reshape(4, 4), layout)[1]
    Array([[ 8.,  9.],
           [12., 13.]], dtype=float32)
    """
    check_jax_layout(layout)
    check_indices(layout)
    weight = checked_array("weight", weight)
    if weight.shape != layout.shape:
        raise BlockSparseError.expected("weight", f"shape {layout.shape} for {layout!r}", tuple(weight.shape))
    (rows, cols), (block_out, block_in) = layout.grid, layout.block_shape
    blocks = weight.reshape(rows, block_out, cols, block_in)
    return blocks[layout.row_of_block(), :, layout.col]


def to_dense(values: jax.Array, layout: Layout) -> jax.Array:
    """Return the dense weight `[out_features, in_features]`, 0 outside the layout. Differentiable.

    Args:
        values: `[nnz, block_out, block_in]`.
        layout: the positions of the values' blocks.

    Raises:
        BlockSparseError: the values have another shape than the layout's, or indices that are not traced are invalid.

    >>> import jax.numpy as jnp, blocksparse as bs, blocksparse.jax as bsj
    >>> layout = bsj.layout(bs.BlockLayout([[True, False], [False, True]], block_size=(1, 2)))
    >>> bsj.to_dense(jnp.array([[[1., 2.]], [[3., 4.]]]), layout)
    Array([[1., 2., 0., 0.],
           [0., 0., 3., 4.]], dtype=float32)
    """
    check_jax_layout(layout)
    values = check_values(values, layout)
    check_indices(layout)
    (rows, cols), (block_out, block_in) = layout.grid, layout.block_shape
    weight = jnp.zeros((rows, block_out, cols, block_in), values.dtype)
    return weight.at[layout.row_of_block(), :, layout.col].set(values).reshape(layout.shape)
