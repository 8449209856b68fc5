"""The index arrays of a layout: row starts, rows and columns of its blocks."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from .errors import BlockSparseError
from .optional_torch import torch

# With this many blocks or rows, copies and caches are avoided. Work goes through them in chunks of this size.
LARGE = 1 << 20


def index_dtype(nnz: int, cols: int) -> type[np.signedinteger]:
    """Return int32 if it holds all positions of blocks and all columns, else int64."""
    return np.int32 if max(nnz, cols) < 2**31 else np.int64


def compress(keys: np.ndarray, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Compute the row starts and the column of each block from ascending block numbers, with little extra memory.

    For a hypersparse grid the first array is the row of each block instead.
    """
    index = index_dtype(len(keys), grid[1])
    if is_hypersparse(len(keys), grid):
        rows, col = np.divmod(keys, grid[1])
        return rows, col.astype(index)
    crow, col = np.zeros(grid[0] + 1, dtype=index), np.empty(len(keys), dtype=index)
    for first in range(0, len(keys), LARGE):
        chunk = keys[first : first + LARGE]
        rows = chunk // grid[1]  # faster than divmod
        col[first : first + LARGE] = chunk - rows * grid[1]
        crow[rows[0] + 1 : rows[-1] + 2] += np.bincount(rows - rows[0]).astype(index)
    return np.cumsum(crow, dtype=index, out=crow), col


def is_hypersparse(nnz: int, grid: tuple[int, int]) -> bool:
    """Return whether most of very many rows are empty, so that the rows of blocks need less memory than row starts."""
    return grid[0] >= LARGE and 2 * nnz < grid[0]


def copy_to_tensor(array: np.ndarray) -> torch.Tensor:
    """Copy an array that kernels read into a tensor for ops, so that writing to the tensor cannot mislead a kernel."""
    # An inference tensor could not be saved for a backward pass.
    with torch.inference_mode(False):
        return torch.from_numpy(array.copy())


def copy_to_read_only(array: np.ndarray) -> np.ndarray:
    """Copy an array into the memory of a bytes object, which Python cannot write to."""
    return np.frombuffer(array.tobytes(), dtype=array.dtype)


def rows_from_starts(crow: np.ndarray, blocks: int, out_blocks: int) -> np.ndarray:
    """Compute the row of each block from row starts, or raise a BlockSparseError if these are invalid."""
    if crow.shape != (out_blocks + 1,):
        raise BlockSparseError.expected("crow_indices", f"[{out_blocks + 1}] for {out_blocks} rows", list(crow.shape))
    bounded = crow[0] == 0 and crow[-1] == blocks and crow.min() >= 0 and crow.max() <= blocks
    # The bounds are checked first, because differences of larger values could overflow.
    counts: np.ndarray | None = np.diff(crow.astype(np.int64, copy=False)) if bounded else None
    if counts is None or (counts < 0).any():
        raise BlockSparseError.expected("crow_indices", f"row starts that ascend from 0 to {blocks} blocks", crow)
    return np.repeat(np.arange(out_blocks), counts)


def other_positions(positions: np.ndarray, count: int) -> np.ndarray:
    """Return the positions below `count` except some; assigning to them is faster than to a bool mask."""
    is_other = np.ones(count, dtype=bool)
    is_other[positions] = False
    return np.flatnonzero(is_other)


def merge(old: np.ndarray, added: np.ndarray, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of added and of old blocks in the layout of both; raise a BlockSparseError if they overlap.

    Args:
        old, added: block numbers, ascending.
        grid: of the layout, for the error.
    """
    at = np.searchsorted(old, added)
    present = old[np.minimum(at, old.size - 1)] == added if old.size else np.zeros(0, dtype=bool)
    if present.any():
        got = f"block {divmod(int(added[np.argmax(present)]), grid[1])}"
        raise BlockSparseError.expected("rows and cols", "blocks that the layout does not have", got)
    at += np.arange(at.size)
    return at, other_positions(at, old.size + added.size)


def check_unique(keys: np.ndarray, grid: tuple[int, int]) -> None:
    """Raise a BlockSparseError if a block number occurs twice in the sorted `keys`."""
    same = keys[1:] == keys[:-1]
    if same.any():
        block = divmod(int(keys[np.argmax(same)]), grid[1])
        raise BlockSparseError.expected("rows and cols", "each block once", f"block {block} more than once")


class PicklableRef(weakref.ref[Any]):
    """A weak reference that index tensors can carry through pickle and `torch.save`, after which it is empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_layout, ()


def _no_layout() -> None:
    return None
