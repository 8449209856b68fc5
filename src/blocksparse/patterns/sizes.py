"""Checks of the arguments that all patterns share: shapes, blocks and seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..checked import checked_block, checked_grid, integer, is_int
from ..errors import BlockSparseError

Block = int | tuple[int, int]
Shape = tuple[int, int]


def checked_sizes(shape: Any, block_size: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the grid (out_blocks, in_blocks) and the block of a shape, which must be a multiple of the block."""
    block = checked_block(block_size)
    if not isinstance(shape, tuple | list) or len(shape) != 2 or not all(is_int(size) and size > 0 for size in shape):
        raise BlockSparseError.expected("shape", "a pair of positive ints (out_features, in_features)", repr(shape))
    if shape[0] % block[0] or shape[1] % block[1]:
        raise BlockSparseError.expected("shape", f"multiples of the block {block}", tuple(shape))
    return checked_grid((int(shape[0]) // block[0], int(shape[1]) // block[1])), block


def checked_square(features: Any, block_size: Any) -> tuple[int, tuple[int, int]]:
    """Return the number of blocks per side of a square weight, and the block, which must be square too."""
    block = checked_block(block_size)
    if block[0] != block[1]:
        raise BlockSparseError.expected("block_size", "a square block, since the layout is that of a graph", block)
    features = integer("features", features, 1)
    if features % block[0]:
        raise BlockSparseError.expected("features", f"a multiple of the block, {block[0]}", features)
    n = features // block[0]
    checked_grid((n, n))
    return n, block


def generator(seed: Any) -> np.random.Generator:
    """Make numpy's generator from a seed, which must be an int of 0 or more."""
    return np.random.default_rng(integer("seed", seed, 0))
