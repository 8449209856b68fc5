"""Regular layouts: dense, diagonal, banded, butterfly.

A `shape` is (out_features, in_features), a multiple of the block. No pattern but `dense` makes a dense mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..checked import checked_indices, integer, is_int, number
from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout
from .sizes import Block, Shape, checked_sizes, generator


def dense(shape: Shape, block_size: Block = 32) -> BlockLayout:
    """Return the layout that stores every block.

    Args:
        shape: (out_features, in_features), multiples of the block.
        block_size: an int or (rows, columns), in features.

    Raises:
        BlockSparseError: the shape is not a multiple of the block.

    >>> import blocksparse as bs
    >>> bs.patterns.dense((64, 128), block_size=32)
    BlockLayout(shape=(64, 128), block_size=(32, 32), nnz=8, density=1)
    """
    grid, block = checked_sizes(shape, block_size)
    return BlockLayout(np.ones(grid, dtype=bool), block)


def block_diagonal(shape: Shape, block_size: Block = 32) -> BlockLayout:
    """Return the blocks on the diagonal, which a rectangular grid stretches along its longer side.

    Every row and column of blocks is used, those of the longer side once. This is `banded` with bandwidth 0.

    Args:
        shape, block_size: as for `dense`.

    Raises:
        BlockSparseError: the shape is not a multiple of the block.

    >>> import blocksparse as bs
    >>> bs.patterns.block_diagonal((2, 5), block_size=1).mask().int()
    tensor([[1, 1, 1, 0, 0],
            [0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    return banded(shape, block_size, bandwidth=0)


def shuffled_block_diagonal(shape: Shape, block_size: Block = 32, groups: int | None = None) -> BlockLayout:
    """Return groups of outputs with interleaved inputs: a channel shuffle, then a grouped product.

    Group g of the outputs, adjacent blocks, has the input blocks g, g + groups, g + 2 groups, ... A few such layers in
    a row connect every output to every input, which groups alone never do. No channel moves in memory.

    Args:
        shape, block_size: as for `dense`.
        groups: the number of groups, a divisor of both sides of the grid. Default: the smallest divisor whose square
            is at least the number of blocks of the shorter side, so that two layers connect all.

    Raises:
        BlockSparseError: the shape is not a multiple of the block, or `groups` does not divide the grid.

    >>> import blocksparse as bs
    >>> bs.patterns.shuffled_block_diagonal((4, 4), block_size=1, groups=2).mask().int()
    tensor([[1, 0, 1, 0],
            [1, 0, 1, 0],
            [0, 1, 0, 1],
            [0, 1, 0, 1]], dtype=torch.int32)

    Source: the block-sparse PixelCNN++ of Gray, Radford, Kingma (2017); Zhang et al., ShuffleNet (2017).
    """
    grid, block = checked_sizes(shape, block_size)
    common = math.gcd(*grid)
    if groups is None:
        groups = next(g for g in range(1, common + 1) if common % g == 0 and (g * g >= min(grid) or g == common))
    groups = integer("groups", groups, 1)
    if common % groups:
        raise BlockSparseError.expected("groups", f"a divisor of both sides of the grid {grid}", groups)
    rows = np.repeat(np.arange(grid[0]), grid[1] // groups)
    cols = np.tile(np.arange(grid[1] // groups), grid[0]) * groups + rows // (grid[0] // groups)
    return BlockLayout.from_indices(rows, cols, grid, block)


def banded(shape: Shape, block_size: Block = 32, bandwidth: int = 1) -> BlockLayout:
    """Return the blocks (i, j) with |i - j| <= bandwidth.

    A rectangular grid has the band of the square grid of its shorter side, stretched along the longer side.

    Args:
        shape, block_size: as for `dense`.
        bandwidth: the number of diagonals on each side of the main one, in blocks of the shorter side.

    Raises:
        BlockSparseError: the shape is not a multiple of the block, or the bandwidth is negative.

    >>> import blocksparse as bs
    >>> bs.patterns.banded((4, 4), block_size=1, bandwidth=1).mask().int()
    tensor([[1, 1, 0, 0],
            [1, 1, 1, 0],
            [0, 1, 1, 1],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    grid, block = checked_sizes(shape, block_size)
    n = min(grid)
    width = min(integer("bandwidth", bandwidth, 0), n - 1)
    i, step = np.divmod(np.arange(n * (2 * width + 1)), 2 * width + 1)
    j = i + step - width
    inside = (j >= 0) & (j < n)
    return BlockLayout.from_indices(*_stretch(i[inside], j[inside], grid), grid, block)


def diagonals(
    shape: Shape, block_size: Block = 32, density: float = 0.1, seed: int = 0, *, offsets: Sequence[int] | None = None
) -> BlockLayout:
    """Return diagonals of blocks that wrap around the shorter side, at random offsets.

    Diagonal d has the blocks (i, (i + d) mod columns) of each row i, or ((j + d) mod rows, j) of each column j if there
    are more columns than rows. So all lines of a side have equally many blocks, or nearly.

    Args:
        shape, block_size: as for `dense`.
        density: the fraction of the diagonals, of which there are as many as lines of the shorter side; at least one is
            stored.
        seed: seed of the offsets, an int, 0 or more.
        offsets: the diagonals, different ints from 0 to below the lines of the shorter side, instead of the two.

    Raises:
        BlockSparseError: the shape is not a multiple of the block, or an argument is out of range.

    >>> import blocksparse as bs
    >>> bs.patterns.diagonals((4, 3), block_size=1, offsets=[1]).mask().int()
    tensor([[0, 1, 0],
            [0, 0, 1],
            [1, 0, 0],
            [0, 1, 0]], dtype=torch.int32)

    Source: Tyagi et al., Dynamic sparse training of diagonally sparse networks (2025): DynaDiag, which learns the
    offsets.
    """
    grid, block = checked_sizes(shape, block_size)
    short, long, random = min(grid), max(grid), generator(seed)
    if offsets is None:
        count = max(1, round(number("density", density, 0, 1) * short))
        chosen = random.choice(short, count, replace=False)
    else:
        chosen = checked_indices("offsets", offsets, short)
        if np.unique(chosen).size < chosen.size or not chosen.size:
            raise BlockSparseError.expected("offsets", "different ints, one or more", list(offsets))
    along = np.tile(np.arange(long), chosen.size)
    across = (along + np.repeat(chosen, long)) % short
    rows, cols = (along, across) if grid[0] >= grid[1] else (across, along)
    return BlockLayout.from_indices(rows, cols, grid, block)


def permuted(
    layout: BlockLayout, seed: int = 0, *, rows: Sequence[int] | None = None, columns: Sequence[int] | None = None
) -> BlockLayout:
    """Return a layout whose rows or columns of blocks are in another order; by default, columns in a random one.

    A permuted pattern costs what the plain one does, and connects other features: no activation is permuted.

    Args:
        layout: any layout, such as `block_diagonal` or `diagonals`.
        seed: seed of the order of the columns if neither is given, an int, 0 or more.
        rows: a permutation of the rows of blocks, for example a learned one: row i becomes row `rows[i]`.
        columns: a permutation of the columns of blocks, likewise.

    Raises:
        BlockSparseError: no layout; rows or columns that are no permutation; a seed below 0.

    >>> import blocksparse as bs
    >>> layout = bs.patterns.block_diagonal((3, 3), block_size=1)
    >>> bs.patterns.permuted(layout, columns=[2, 0, 1]).mask().int()
    tensor([[0, 0, 1],
            [1, 0, 0],
            [0, 1, 0]], dtype=torch.int32)

    Source: Tyagi et al., Efficient dynamic structured sparse training with learned shuffles (2025): PA-DST, which also
    learns the permutation.
    """
    check_layout(layout)
    random = generator(seed)
    if rows is None and columns is None:
        columns = random.permutation(layout.grid[1]).tolist()
    lines: list[np.ndarray] = []
    places = (layout.row_of_block, layout.col_of_block)
    for name, order, size, old in zip(("rows", "columns"), (rows, columns), layout.grid, places, strict=True):
        new = np.arange(size) if order is None else checked_indices(name, order, size)
        if new.size != size or np.unique(new).size != size:
            raise BlockSparseError.expected(name, f"a permutation of 0 to {size - 1}", f"{new.size} ints")
        lines.append(new[old])
    return BlockLayout.from_indices(lines[0], lines[1], layout.grid, layout.block_shape)


def butterfly(shape: Shape | int, block_size: Block = 32) -> BlockLayout:
    """Return the flat block butterfly: row i has the columns i and i XOR 2^s, about log2(n) + 1 blocks per row.

    If the number n of blocks is not a power of two, columns beyond it are left out. A rectangular grid has the
    butterfly of its shorter side, stretched along the longer side.

    Args:
        shape: (out_features, in_features), or one int for both; multiples of the block.
        block_size: an int or (rows, columns), in features.

    Raises:
        BlockSparseError: the shape is not a multiple of the block.

    >>> import blocksparse as bs
    >>> bs.patterns.butterfly(4, block_size=1).mask().int()
    tensor([[1, 1, 1, 0],
            [1, 1, 0, 1],
            [1, 0, 1, 1],
            [0, 1, 1, 1]], dtype=torch.int32)

    Source: Dao et al., Pixelated Butterfly (2021).
    """
    grid, block = checked_sizes((shape, shape) if is_int(shape) else shape, block_size)
    n = min(grid)
    strides = np.array([0] + [1 << s for s in range((n - 1).bit_length())])
    i = np.repeat(np.arange(n), len(strides))
    j = i ^ np.tile(strides, n)
    return BlockLayout.from_indices(*_stretch(i[j < n], j[j < n], grid), grid, block)


def _stretch(i: np.ndarray, j: np.ndarray, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Stretch the blocks (i, j) of the square grid of the shorter side along the longer side of `grid`."""
    if grid[0] > grid[1]:
        return _stretch(j, i, grid[::-1])[::-1]
    # Line s of the shorter side becomes the lines l of the longer side with l * short // long == s.
    starts = -(-np.arange(grid[0] + 1) * grid[1] // grid[0])
    width = np.diff(starts)[j]
    within = np.arange(width.sum()) - np.repeat(np.cumsum(width) - width, width)
    return np.repeat(i, width), np.repeat(starts[j], width) + within
