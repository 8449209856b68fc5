"""The index arrays of a layout: row starts, rows and columns of its blocks."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from . import compiled_core
from .checked import checked_indices, checked_pairs
from .errors import BlockSparseError
from .optional_torch import has_torch, torch

# With this many blocks or rows, copies and caches are avoided. Work goes through them in chunks of this size.
LARGE = 1 << 20


def index_dtype(nnz: int, cols: int) -> type[np.signedinteger]:
    """Return int32 if it holds all positions of blocks and all columns, else int64."""
    return np.int32 if max(nnz, cols) < 2**31 else np.int64


def compress(keys: np.ndarray, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Compute the row starts and the column of each block from its key, with little extra memory.

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


class Replacement(NamedTuple):
    """A change of a layout: the blocks that it loses and those that it gets."""

    drop: np.ndarray
    """Whether each block goes, bool `[nnz]`."""
    added: np.ndarray
    """The keys of the added blocks, row * in_blocks + column, int64, rising."""

    def without_returning(self, keys: np.ndarray) -> Replacement:
        """Return the change without blocks that would go and come back: they stay. `keys` are those of the layout."""
        drop = self.drop & ~np.isin(keys, self.added)
        return Replacement(drop, np.setdiff1d(self.added, keys, assume_unique=True))


def checked_replacement(keys: np.ndarray, drop: Any, rows: Any, cols: Any, grid: tuple[int, int]) -> Replacement:
    """Return a change of the layout with these keys, after the checks of `BlockLayout.replaced`."""
    positions = checked_indices("drop", drop, keys.size)
    rows, cols = checked_pairs(rows, cols, grid)
    is_dropped = np.zeros(keys.size, dtype=bool)
    is_dropped[positions] = True
    if np.count_nonzero(is_dropped) != positions.size:
        raise BlockSparseError.expected("drop", "each position once", "a position more than once")
    added = rows * grid[1] + cols
    if (added[1:] < added[:-1]).any():
        added.sort()
    check_unique(added, grid)
    if keys.size:
        places = np.minimum(np.searchsorted(keys, added), keys.size - 1)
        present = (keys[places] == added) & ~is_dropped[places]
        if present.any():
            got = f"block {divmod(int(added[np.argmax(present)]), grid[1])}"
            raise BlockSparseError.expected("rows and cols", "blocks that the layout does not have", got)
    return Replacement(is_dropped, added)


def kept_keys(layout: Any, drop: np.ndarray) -> np.ndarray:
    """Return the keys of the blocks that are not dropped, int64, rising; `drop` is a mask `[nnz]`."""
    nnz = layout.nnz - np.count_nonzero(drop)
    if (core := _core_for(layout, nnz)) is None:
        return layout.keys_of_blocks()[~drop]
    keys = np.empty(nnz, np.int64)
    core.kept_keys(start=layout.row_start, col=layout.col_of_block, columns=layout.grid[1], drop=drop, keys=keys)
    return keys


def replaced_indices(layout: Any, change: Replacement) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the indices of a layout after a change, as `compress` does, and the source of each block.

    The source is the old position of a block, or -1 if it was added, int64 `[nnz]`.
    """
    drop, added = change
    nnz, (rows, columns) = layout.nnz + added.size - np.count_nonzero(drop), layout.grid
    if (core := _core_for(layout, nnz)) is None:
        keys = kept_keys(layout, drop)
        places = np.searchsorted(keys, added)
        lines, col = compress(np.insert(keys, places, added), layout.grid)
        return lines, col, np.insert(np.flatnonzero(~drop), places, -1)
    lines, col, source = np.empty(rows + 1, np.int32), np.empty(nnz, np.int32), np.empty(nnz, np.int64)
    core.replace_blocks(
        start=layout.row_start, col=layout.col_of_block, columns=columns, drop=drop, added=added, to_start=lines,
        to_col=col, source=source,
    )  # fmt: skip
    return lines, col, source


def _core_for(layout: Any, nnz: int) -> ModuleType | None:
    """Return the compiled core if it serves a layout and the same one with `nnz` blocks, else None."""
    core = compiled_core.load()[0]
    counts = layout.nnz, nnz
    is_hyper = any(is_hypersparse(count, layout.grid) for count in counts)
    return None if is_hyper or index_dtype(max(counts), layout.grid[1]) != np.int32 else core


def free_keys(taken: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the keys that have these ranks among those that are not taken. All rise, int64.

    >>> free_keys(np.array([1, 2, 5]), np.array([0, 1, 3]))
    array([0, 3, 6])
    """
    if (core := compiled_core.load()[0]) is None:
        # taken[i] - i free keys come before taken[i].
        return ranks + np.searchsorted(taken - np.arange(taken.size), ranks, side="right")
    keys = np.empty_like(ranks)
    core.free_keys(taken=taken, ranks=ranks, keys=keys)
    return keys


def check_unique(keys: np.ndarray, grid: tuple[int, int]) -> None:
    """Raise a BlockSparseError if a key occurs twice in the sorted `keys`."""
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


def part_of_layout(layout: Any, top: int, bottom: int, left: int, right: int) -> Any:
    """Return the layout of the rows from top to bottom and the columns from left to right, in blocks."""
    if not has_torch or not torch.compiler.is_dynamo_compiling():
        return _part_of_layout(layout, top, bottom, left, right)
    _cache_part_while_tracing(layout, top, bottom, left, right)
    return layout.derived(("part", top, bottom, left, right), lambda: None)


def _part_of_layout(layout: Any, top: int, bottom: int, left: int, right: int) -> Any:
    row, col = layout.row_of_block, layout.col_of_block
    inside = (row >= top) & (row < bottom) & (col >= left) & (col < right)
    keys = (row[inside] - top) * (right - left) + (col[inside] - left)
    return layout._from_keys(keys, (bottom - top, right - left), layout.block_shape)


def _cache_part_while_tracing(layout: Any, *place: int) -> bool:
    """Make the part when torch.compile traces, so that the graph finds it in the layout."""
    layout.derived(("part", *place), lambda: _part_of_layout(layout, *place))
    return True


# Dynamo calls this function, because it cannot trace numpy's steps.
_cache_part_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]
