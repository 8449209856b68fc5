"""The plan of the attention kernels of a GPU, in pure numpy: tables of the layouts, and tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from ...layout import BlockLayout
from ..gpu.runtime import check_fits, check_layout_fits
from ..gpu.tiles import Gpu, Tile, power_of_two

# Bytes of shared memory for barriers and changes of layouts.
MARGIN = 4096
# Rows of a program that fill tensor cores which read shared memory.
FULL_ROWS = 64
# Most rows of a program whose sums fit in registers, by the bytes of a number and the features: in the passes forward,
# dq and dkv.
PASSES = ("forward", "dq", "dkv")
MOST_ROWS = {
    (2, 64): (128, 64, 64), (2, 128): (128, 64, 64), (2, 256): (64, 32, 32),
    (4, 64): (64, 32, 32), (4, 128): (16, 16, 16), (4, 256): (16, 16, 16),
}  # fmt: skip


class Tables(NamedTuple):
    """The blocks of some layouts row by row, for kernels, which walk over one row: int32.

    start: `[layouts, rows + 1]`, the first entry of each row.
    order: `[layouts, rows]`, the rows with most blocks first, so that no program is left alone with one at the end.
    col: `[entries]`, the columns of the blocks.
    """

    start: np.ndarray
    order: np.ndarray
    col: np.ndarray


def tables(layouts: Sequence[BlockLayout], transpose: bool) -> Tables:
    """Return the tables of layouts with one grid, or of the transposed ones.

    With a causal window, the last queries and the first keys have most visible blocks. They come first among rows of
    equal length.

    >>> import blocksparse as bs
    >>> layout = bs.BlockLayout([[1, 1, 0], [0, 1, 0], [1, 1, 0]], block_size=16)
    >>> tables([layout], transpose=False)
    Tables(start=array([[0, 2, 3, 5]], dtype=int32), order=array([[2, 0, 1]], dtype=int32), col=array([0, 1, 1, 0, 1], \
dtype=int32))
    >>> tables([layout], transpose=True).order
    array([[1, 0, 2]], dtype=int32)
    """
    for layout in layouts:
        check_layout_fits(layout)
    check_fits("layout", "blocks in all heads", sum(layout.nnz for layout in layouts))
    of_rows = [layout.T if transpose else layout for layout in layouts]
    ends = np.cumsum([layout.nnz for layout in layouts])
    start = np.stack([rows.row_start + end - rows.nnz for rows, end in zip(of_rows, ends, strict=True)])
    length = np.diff(start)
    if transpose:
        order = np.argsort(-length, axis=1, kind="stable")
    else:
        order = length.shape[1] - 1 - np.argsort(-length[:, ::-1], axis=1, kind="stable")
    col = np.concatenate([rows.col_of_block for rows in of_rows])
    return Tables(*(np.ascontiguousarray(array, dtype=np.int32) for array in (start, order, col)))


def heads_of_tile(tile: Tile, height: int, sharing: int) -> int:
    """Return how many of the heads that share keys and a layout are in a tile of queries."""
    return math.gcd(tile.block_m // min(rows_of_block(height), tile.block_m), sharing)


def rows_of_block(side: int) -> int:
    """Return the rows of a tile that a block needs; tensor cores have 16 at least."""
    return max(power_of_two(side), 16)


def rule(pass_: str, dtype: torch.dtype, side: int, sharing: int, features: int, gpu: Gpu) -> Tile:
    """Return the tile of a pass: rows of the program, features, and lanes per step. No tile has been measured yet.

    Args:
        pass_: "forward", "dq" or "dkv".
        side: queries or keys of a block, whichever are the rows.
        sharing: heads that share keys and a layout; a program with less than `FULL_ROWS` rows has several of them.
        features: the larger one of d and d_v, a power of two.
    """
    narrow, size = dtype.itemsize == 2, max(features, 64)
    most = MOST_ROWS[dtype.itemsize, size][PASSES.index(pass_)]
    rows = min(rows_of_block(side), most)
    if pass_ != "dkv" and rows == rows_of_block(side):
        while rows < min(most, FULL_ROWS) and sharing % 2 == 0:
            rows, sharing = 2 * rows, sharing // 2
    sums = rows * features * (2 if pass_ == "dkv" else 1)
    warps = 8 if sums > 8192 or size == 256 or (size == 128 and not narrow) else 4
    if narrow and pass_ != "dkv" and rows < FULL_ROWS and size == 64:
        warps = 2  # the maximum of a row crosses fewer warps
    lanes = (32 if size == 256 or warps == 2 else 64) if narrow else (16 if size == 256 else 32)
    tile = Tile(rows, features, lanes, warps, stages=2 if gpu.kind.startswith("gfx") else 3)
    return fit(tile, dtype, gpu)


def fit(tile: Tile, dtype: torch.dtype, gpu: Gpu) -> Tile:
    """Return the tile with fewer lanes, then without a pipeline, so that it fits the shared memory of a program."""
    while shared_memory(tile, dtype, gpu) > gpu.shared_memory and max(tile.block_k // 16, tile.stages) > 1:
        tile = replace(tile, block_k=tile.block_k // 2) if tile.block_k > 16 else replace(tile, stages=1)
    return tile


def shared_memory(tile: Tile, dtype: torch.dtype, gpu: Gpu) -> int:
    """Return an estimate of the bytes of shared memory of a program: its rows, its steps and their scores."""
    buffers = 1 if gpu.kind.startswith("gfx") else tile.stages // 2 + 1  # loads depend on a load of an index
    pairs = tile.block_m + buffers * tile.block_k
    return (2 * pairs * tile.block_n + tile.block_m * tile.block_k) * dtype.itemsize + MARGIN
