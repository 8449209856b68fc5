"""Lines, that is rows and columns of blocks, that each keep a block, and the choice of these blocks."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

from ..surgery.blocks import Blocks
from ..surgery.weight_handle import WeightHandle

MATCHING_CHUNK = 1 << 12  # blocks that the greedy matching tries before it drops those in matched lines

Lines = tuple[np.ndarray, np.ndarray]
"""Indices of some rows and of some columns of blocks, int64, rising."""
NO_LINES: Lines = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def lines_of(weight: Blocks | WeightHandle) -> Lines:
    """Return all lines of a weight except those that are entirely padding."""
    if isinstance(weight, Blocks):
        return np.unique(weight.block_of_line(0)), np.unique(weight.block_of_line(1))
    used, (rows, cols) = weight.used, weight.layout.grid
    if used is None:
        return np.arange(rows), np.arange(cols)
    return np.flatnonzero(used[0].view(rows, -1).any(1)), np.flatnonzero(used[1].view(cols, -1).any(1))


def coverable(lines: Lines, nnz: int) -> Lines:
    """Return the rows if `nnz` blocks suffice for one in each, else no rows; and likewise the columns."""
    rows, cols = (side if side.size <= nnz else side[:0] for side in lines)
    return rows, cols


def empty_lines(lines: Lines, keys: np.ndarray, columns: int) -> Lines:
    """Return the lines that contain none of the blocks `keys`, given as row * columns + column."""
    rows, cols = (side[~np.isin(side, used)] for side, used in zip(lines, np.divmod(keys, columns), strict=True))
    return rows, cols


def best_of_lines(rank: Tensor, lines: Lines) -> Tensor:
    """Return a mask of the block with the highest rank in each of these lines, bool `[out_blocks, in_blocks]`.

    Args:
        rank: `[out_blocks, in_blocks]`, all different; -1 for absent blocks.
        lines: lines to look at.
    """
    marks = torch.zeros_like(rank, dtype=torch.bool)
    for axis, side in enumerate(lines):
        if side.size:
            best = torch.zeros_like(marks).scatter_(1 - axis, rank.argmax(1 - axis, keepdim=True), True)
            if side.size < rank.shape[axis]:
                others = np.delete(np.arange(rank.shape[axis]), side)
                best.index_fill_(axis, torch.from_numpy(others).to(best.device), False)
            marks |= best
    return marks & (rank >= 0)


def cover(rank: Tensor, lines: Lines, limit: int) -> Tensor:
    """Return a mask of blocks with high ranks that cover all of these lines, with at most `limit` blocks if possible.

    These are the best block of each line. If they are too many, they are a maximum matching of rows and columns and the
    best block of each line that is not matched. See `best_of_lines` for `rank` and `lines`.
    """
    best = best_of_lines(rank, lines)
    if int(best.sum()) <= limit:
        return best
    inside = np.ix_(*lines)
    masked = np.full(rank.shape, -1, dtype=np.int64)
    masked[inside] = rank.cpu().numpy()[inside]
    rows, cols = np.nonzero(masked >= 0)
    mate = _greedy_matching(rows, cols, masked[rows, cols], rank.shape)
    if lines[0].size + lines[1].size - np.count_nonzero(mate >= 0) > limit:
        _augment_matching(mate, rows, cols, rank.shape)
    matched = np.flatnonzero(mate >= 0)
    unmatched = np.setdiff1d(lines[0], matched), np.setdiff1d(lines[1], mate[matched])
    marks = best_of_lines(rank, unmatched)
    marks[torch.from_numpy(matched).to(rank.device), torch.from_numpy(mate[matched]).to(rank.device)] = True
    return marks


def _greedy_matching(rows: np.ndarray, cols: np.ndarray, rank: np.ndarray, grid: torch.Size) -> np.ndarray:
    """Match rows with columns, blocks with the highest rank first; return the column of each row, -1 for none."""
    mate = np.full(grid[0], -1)
    used_rows, used_cols = bytearray(grid[0]), bytearray(grid[1])
    order = np.argsort(-rank)
    rows, cols = rows[order], cols[order]
    while rows.size:
        step = max(MATCHING_CHUNK, rows.size // 16)
        for row, col in zip(rows[:step].tolist(), cols[:step].tolist(), strict=True):
            if not (used_rows[row] or used_cols[col]):
                used_rows[row] = used_cols[col] = True
                mate[row] = col
        free_rows, free_cols = (np.frombuffer(used, dtype=np.uint8) == 0 for used in (used_rows, used_cols))
        free = free_rows[rows] & free_cols[cols]
        rows, cols = rows[free], cols[free]
    return mate


def _augment_matching(mate: np.ndarray, rows: np.ndarray, cols: np.ndarray, grid: torch.Size) -> None:
    """Make a matching maximum, in place, by the shortest augmenting path from each row without a column.

    `rows` and `cols` are the blocks that may be used, sorted by row.
    """
    starts = np.searchsorted(rows, np.arange(grid[0] + 1))
    row_of = np.full(grid[1], -1)
    row_of[mate[mate >= 0]] = np.flatnonzero(mate >= 0)
    for start in np.flatnonzero((mate < 0) & (np.diff(starts) > 0)):
        came_from: dict[int, int] = {}
        queue = deque([int(start)])
        while queue:
            row = queue.popleft()
            for col in cols[starts[row] : starts[row + 1]].tolist():
                if col in came_from:
                    continue
                came_from[col] = row
                if row_of[col] < 0:
                    _flip_path(mate, row_of, came_from, col)
                    queue.clear()
                    break
                queue.append(int(row_of[col]))


def _flip_path(mate: np.ndarray, row_of: np.ndarray, came_from: dict[int, int], col: int) -> None:
    """Exchange matched and unmatched blocks along the augmenting path that ends in a column."""
    while col >= 0:
        row = came_from[col]
        row_of[col] = row
        mate[row], col = col, int(mate[row])
