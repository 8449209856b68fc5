"""Makes and checks the index arrays of a layout."""

from __future__ import annotations

import numpy as np
import torch

from .errors import BlockSparseError

# From this many blocks or rows on, avoid copies and caches; also the number of them worked on at a time.
LARGE = 1 << 20
# A running mean in float32 whose decay is .99999 or less stays within this fraction of an index.
MOST_DRIFT = 32


def index_type(nnz: int, cols: int) -> type[np.signedinteger]:
    """Returns the int type that holds all positions of blocks, and all columns."""
    return np.int32 if max(nnz, cols) < 2**31 else np.int64


def compressed(keys: np.ndarray, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns where each row starts and the column of each block, from rising block numbers, with little extra memory.

    Where most of very many rows are empty, the row of each block comes in place of the starts.
    """
    index = index_type(len(keys), grid[1])
    if few(len(keys), grid):
        rows, col = np.divmod(keys, grid[1])
        return rows, col.astype(index)
    crow, col = np.zeros(grid[0] + 1, dtype=index), np.empty(len(keys), dtype=index)
    for first in range(0, len(keys), LARGE):
        rows, col[first : first + LARGE] = np.divmod(keys[first : first + LARGE], grid[1])
        crow[rows[0] + 1 : rows[-1] + 2] += np.bincount(rows - rows[0]).astype(index)
    return np.cumsum(crow, dtype=index, out=crow), col


def few(nnz: int, grid: tuple[int, int]) -> bool:
    """Whether the block rows take less memory than the row starts: very many rows, most of them empty."""
    return grid[0] >= LARGE and 2 * nnz < grid[0]


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """The tensor that ops get for an array that kernels read: a copy, so that writing to it leads no kernel astray."""
    # No inference tensor, wherever the layout is made: these could not be saved for a backward pass.
    with torch.inference_mode(False):
        return torch.from_numpy(array.copy())


def read_only(array: np.ndarray) -> np.ndarray:
    """A copy in memory that Python cannot write to: that of a bytes object."""
    return np.frombuffer(array.tobytes(), dtype=array.dtype)


def rows_of(crow: np.ndarray, blocks: int, out_blocks: int) -> np.ndarray:
    """The block row of each stored block, from where each row starts, which may come from anywhere."""
    if crow.shape != (out_blocks + 1,):
        raise BlockSparseError.expected("crow_indices", f"[{out_blocks + 1}] for {out_blocks} rows", list(crow.shape))
    bounded = crow[0] == 0 and crow[-1] == blocks and crow.min() >= 0 and crow.max() <= blocks
    # Checked first, as differences of other values could overflow.
    counts: np.ndarray | None = np.diff(crow.astype(np.int64, copy=False)) if bounded else None
    if counts is None or (counts < 0).any():
        raise BlockSparseError.expected("crow_indices", f"a rise from 0 to {blocks}, the blocks", crow)
    return np.repeat(np.arange(out_blocks), counts)


def is_rounded_mean(held: np.ndarray, indices: np.ndarray) -> bool:
    """Whether these are weighted means of the indices with themselves, apart from rounding.

    Running means cover buffers too. In float32 decay * i + (1 - decay) * i can differ from i, and an int buffer cuts
    off what is below i to i - 1. Each further mean moves on, in proportion to i, until the pull of 1 - decay holds it.

    Rounding treats i and 2 i alike. So of all indices with one odd factor either every one falls or none does, and the
    powers of two, which are means without an error, do not. A mean with the indices of another layout breaks this rule.

    Args:
        held: what a buffer holds, of the shape of `indices`.
        indices: ints, 0 or more.

    >>> indices = np.array([0, 3, 4, 6, 6, 7])
    >>> is_rounded_mean(np.array([0, 2, 4, 5, 5, 7]), indices), is_rounded_mean(np.array([0, 2, 4, 6, 5, 7]), indices)
    (True, False)
    """
    if held.dtype.kind not in "iuf":
        return False
    indices = indices.astype(np.int64, copy=False)
    two = np.maximum(indices & -indices, 1)  # the largest power of two in each
    odd = indices // two
    # Above, float32 has no digits behind the point: means are rounded up as well, and follow no rule.
    small = indices < 2**22
    if held.dtype.kind == "f":
        near = np.abs(held - indices) <= indices / MOST_DRIFT
        scaled = held / two
    else:
        fall = indices - held.astype(np.int64, copy=False)
        most = (odd > 1) * (1 + indices // MOST_DRIFT)
        near = (fall <= most) & (fall >= np.where(small, 0, -most))
        scaled = fall > 0
    if not near.all():
        return False
    odd, scaled = odd[small], scaled[small]
    order = np.argsort(odd, kind="stable")
    alike, differs = np.diff(odd[order]) == 0, np.diff(scaled[order]) != 0
    return not (alike & differs).any()


def refuse_twice(keys: np.ndarray, grid: tuple[int, int]) -> None:
    """Raises a BlockSparseError unless the sorted block numbers are all different."""
    same = keys[1:] == keys[:-1]
    if same.any():
        block = divmod(int(keys[np.argmax(same)]), grid[1])
        raise BlockSparseError.expected("rows and cols", "each block once", f"block {block} more than once")
