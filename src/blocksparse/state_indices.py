"""Layouts from index vectors of files and state dicts, which a running mean may have averaged and rounded."""

from __future__ import annotations

from typing import Any

import numpy as np

from .checked import checked_array, checked_ints
from .errors import BlockSparseError
from .indices import rows_from_starts
from .layout import BlockLayout

# A running mean in float32 with a decay of at most 0.99999 stays within this fraction of an index.
MAX_DRIFT = 1 / 32


def layout_of_indices(crow: Any, col: Any, grid: tuple[int, int], block: tuple[int, int]) -> BlockLayout:
    """Make a layout from index vectors of values in their order, for example from a file.

    Raises:
        BlockSparseError: the vectors are not ints, the row starts do not ascend from 0 to the number of blocks, or the
            columns are out of range or not ascending in each row.
    """
    starts, cols = checked_ints("crow_indices", crow), checked_ints("col_indices", col)
    layout = BlockLayout.from_indices(rows_from_starts(starts, cols.size, grid[0]), cols, grid, block)
    if not np.array_equal(layout.col_of_block, cols):
        raise BlockSparseError.expected("col_indices", "ascending columns in each row", cols)
    return layout


def layout_from_state(crow: Any, col: Any, current: BlockLayout) -> BlockLayout:
    """Return the layout of index vectors from a state dict; `current` if they are an average of its own indices.

    Raises:
        BlockSparseError: as `layout_of_indices`, and for an average of several layouts.
    """
    try:
        return layout_of_indices(crow, col, current.grid, current.block_shape)
    except BlockSparseError:
        crow = checked_array("crow_indices", "a vector of ints", crow)
        col = checked_array("col_indices", "a vector of ints", col)
        if has_indices(current, crow, col):
            return current
        if crow.dtype.kind == col.dtype.kind == "f":
            expected = f"ints, or a mean of states whose layout is {current!r}"
            got = "a mean of other layouts (blocksparse.sparsity.sync_ema keeps those of a model and its mean the same)"
            raise BlockSparseError.expected("crow_indices and col_indices", expected, got) from None
        raise


def has_indices(layout: BlockLayout, crow: np.ndarray, col: np.ndarray) -> bool:
    """Return whether arrays, or each of a batch `[..., n]`, are the layout's indices or a rounded mean of them."""
    pairs = [(crow, layout.row_start), (col, layout.col_of_block)]
    if crow.dtype.kind != col.dtype.kind or any(array.shape[-1:] != own.shape for array, own in pairs):
        return False
    arrays = np.concatenate([array.ravel() for array, _ in pairs])
    own = np.concatenate([np.broadcast_to(own, array.shape).ravel() for array, own in pairs])
    return bool((arrays == own).all()) or is_rounded_mean(arrays, own)


def is_rounded_mean(array: np.ndarray, indices: np.ndarray) -> bool:
    """Return whether `array` can be a running mean of the unchanged `indices`, apart from rounding.

    Running means include buffers. In float32, decay * i + (1 - decay) * i can differ from i, and an int buffer
    truncates what is below i to i - 1. Each update adds to the drift, in proportion to i, until the pull of 1 - decay
    stops it.

    Rounding treats i and 2 i in the same way. So among the indices with one odd factor either all fall or none does,
    and powers of two, whose means are exact, do not fall. A mean with the indices of another layout breaks this rule.

    Args:
        array: the numbers in a buffer, in the shape of `indices`.
        indices: ints, 0 or more.

    >>> indices = np.array([0, 3, 4, 6, 6, 7])
    >>> is_rounded_mean(np.array([0, 2, 4, 5, 5, 7]), indices), is_rounded_mean(np.array([0, 2, 4, 6, 5, 7]), indices)
    (True, False)
    """
    if array.dtype.kind not in "iuf":
        return False
    indices = indices.astype(np.int64, copy=False)
    power = np.maximum(indices & -indices, 1)  # the largest power of two in each
    odd = indices // power
    # Above, float32 has no digits behind the point: means are also rounded up and follow no rule.
    small = indices < 2**22
    if array.dtype.kind == "f":
        near = np.abs(array - indices) <= indices * MAX_DRIFT
        scaled = array / power
    else:
        fall = indices - array.astype(np.int64, copy=False)
        most = (odd > 1) * (1 + (indices * MAX_DRIFT).astype(np.int64))
        near = (fall <= most) & (fall >= np.where(small, 0, -most))
        scaled = fall > 0
    if not near.all():
        return False
    odd, scaled = odd[small], scaled[small]
    order = np.argsort(odd, kind="stable")
    same_factor, differs = np.diff(odd[order]) == 0, np.diff(scaled[order]) != 0
    return not (same_factor & differs).any()
