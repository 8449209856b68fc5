"""Layouts as pytrees, whose indices are operands, so that another pattern needs no other compiled program."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.export
import numpy as np

from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout
from ..state_indices import layout_of_indices

__all__ = ["Layout", "check_indices", "check_jax_layout", "check_replacement", "layout"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["row_start", "col"],
    meta_fields=["grid", "block_shape"],
)
@dataclass(frozen=True, eq=False)
class Layout:
    """The positions of a weight's blocks as a pytree: two int32 arrays, and static sizes.

    Functions under `jax.jit` accept it as an argument. A layout of the same sizes and number of blocks uses the same
    compiled program.

    Args:
        row_start: `[out_blocks + 1]`, where each block row starts in `col`.
        col: `[nnz]`, the block column of each stored block, ascending in each row.
        grid: (out_blocks, in_blocks).
        block_shape: (rows, columns) of a block.
    """

    row_start: jax.Array
    col: jax.Array
    grid: tuple[int, int]
    block_shape: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the weight."""
        return self.grid[0] * self.block_shape[0], self.grid[1] * self.block_shape[1]

    @property
    def nnz(self) -> int:
        """The number of stored blocks."""
        return int(self.col.shape[-1])

    @property
    def values_shape(self) -> tuple[int, int, int]:
        """(nnz, block_out, block_in)."""
        return (self.nnz, *self.block_shape)

    @property
    def density(self) -> float:
        """Stored blocks / all blocks of the grid."""
        return self.nnz / (self.grid[0] * self.grid[1])

    def row_of_block(self) -> jax.Array:
        """Return the block row of each stored block, int32 `[nnz]`."""
        return _rows(self.row_start, self.nnz)

    def block_layout(self) -> BlockLayout:
        """Return the `BlockLayout` of these indices, outside of jit.

        Raises:
            BlockSparseError: the indices are traced, or not those of a layout.

        >>> import blocksparse as bs, blocksparse.jax as bsj
        >>> pattern = bs.patterns.random((64, 64), block_size=16, density=0.5, seed=0)
        >>> bsj.layout(pattern).block_layout() == pattern
        True
        """
        if isinstance(self.row_start, jax.core.Tracer) or isinstance(self.col, jax.core.Tracer):
            raise BlockSparseError("block_layout() reads the indices, which jit traces: call it outside of jit.")
        return layout_of_indices(np.asarray(self.row_start), np.asarray(self.col), self.grid, self.block_shape)

    def __repr__(self) -> str:
        if not hasattr(self.col, "shape"):  # a tree of other leaves, for example axes of vmap or None
            return f"Layout(shape={self.shape}, block_size={self.block_shape}, {self.row_start!r}, {self.col!r})"
        return f"Layout(shape={self.shape}, block_size={self.block_shape}, nnz={self.nnz}, density={self.density:.4g})"


# So that jax.export can serialize functions with layouts among their arguments.
jax.export.register_pytree_node_serialization(
    Layout,
    serialized_name="blocksparse.jax.Layout",
    serialize_auxdata=lambda sizes: json.dumps(sizes).encode(),
    deserialize_auxdata=lambda data: tuple(map(tuple, json.loads(data))),
)


@partial(jax.jit, static_argnames="nnz")
def _rows(row_start: jax.Array, nnz: int) -> jax.Array:
    steps = jax.numpy.zeros(nnz + 1, jax.numpy.int32).at[row_start[1:]].add(1)
    return jax.numpy.cumsum(steps)[:nnz]


def layout(layout: BlockLayout) -> Layout:
    """Return a layout as a pytree for the functions of `blocksparse.jax`.

    Args:
        layout: a `BlockLayout`, for example of `bs.patterns`.

    Raises:
        BlockSparseError: the argument is no `BlockLayout`, or int32 cannot count its blocks.

    >>> import blocksparse as bs, blocksparse.jax as bsj
    >>> bsj.layout(bs.patterns.random((64, 128), block_size=32, density=0.5, seed=0))
    Layout(shape=(64, 128), block_size=(32, 32), nnz=4, density=0.5)
    """
    check_layout(layout)
    if max(*layout.grid, *layout.block_shape, layout.nnz) >= 2**31:
        raise BlockSparseError.expected("layout", "below 2^31 blocks, block rows and block columns", repr(layout))
    row_start, col = (jax.numpy.asarray(index, "int32") for index in (layout.row_start, layout.col_of_block))
    return Layout(row_start, col, layout.grid, layout.block_shape)


def check_jax_layout(layout: Any) -> None:
    """Raise a BlockSparseError unless `layout` is a `Layout`."""
    if isinstance(layout, BlockLayout):
        raise BlockSparseError.expected("layout", "a pytree: write blocksparse.jax.layout(layout)", repr(layout))
    if not isinstance(layout, Layout):
        raise BlockSparseError.expected("layout", "a blocksparse.jax.Layout", type(layout).__name__)


def check_indices(layout: Layout) -> None:
    """Raise a BlockSparseError unless the indices are those of a layout; jit hides traced ones."""
    if not any(isinstance(index, jax.core.Tracer) for index in (layout.row_start, layout.col)):
        layout.block_layout()


def check_replacement(layout: Any, values: Any, old: Layout) -> None:
    """Raise a BlockSparseError unless a layer with the layout `old` can have this layout and these values."""
    check_jax_layout(layout)
    if (layout.grid, layout.block_shape) != (old.grid, old.block_shape):
        expected = f"shape {old.shape} in blocks of {old.block_shape}, as the layer has"
        raise BlockSparseError.expected("layout", expected, repr(layout))
    shape = getattr(values, "shape", None)
    if shape is None or tuple(shape[-3:]) != layout.values_shape:
        raise BlockSparseError.expected("values", f"shape {layout.values_shape} for {layout!r}", shape)
