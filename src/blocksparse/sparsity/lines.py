"""Rows and columns of blocks (lines) that keep a block each, and the blocks that they keep for it."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

from ..surgery.blocks import Blocks
from ..surgery.weight_handle import WeightHandle

STEP = 1 << 12  # blocks that are looked at before those in lines with a block are left out

Lines = tuple[np.ndarray, np.ndarray]
"""Some rows and some columns of blocks, int64, rising."""
NO_LINES: Lines = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def lines_of(weight: Blocks | WeightHandle) -> Lines:
    """The rows and columns of blocks that are not padding throughout."""
    if isinstance(weight, Blocks):
        return np.unique(weight.block_of_line(0)), np.unique(weight.block_of_line(1))
    used, (rows, cols) = weight.used, weight.layout.grid
    if used is None:
        return np.arange(rows), np.arange(cols)
    return np.flatnonzero(used[0].view(rows, -1).any(1)), np.flatnonzero(used[1].view(cols, -1).any(1))


def coverable(lines: Lines, nnz: int) -> Lines:
    """The lines of which each can have one of `nnz` blocks: all rows or none, and all columns or none."""
    rows, cols = (side if side.size <= nnz else side[:0] for side in lines)
    return rows, cols


def empty_lines(lines: Lines, keys: np.ndarray, columns: int) -> Lines:
    """The lines without any of the blocks row * columns + column."""
    rows, cols = (side[~np.isin(side, used)] for side, used in zip(lines, np.divmod(keys, columns), strict=True))
    return rows, cols


def best_of_lines(rank: Tensor, lines: Lines) -> Tensor:
    """Marks the block of the highest rank in each of these lines, bool `[out_blocks, in_blocks]`.

    Args:
        rank: `[out_blocks, in_blocks]`, all different; -1 for blocks that are not there.
        lines: which.
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
    """Marks blocks of high ranks that use all of these lines, at most `limit` of them where that is possible.

    The best block of each line, or where these are too many, a maximum matching of rows and columns, and the best
    block of each line that it leaves out. Arguments are as of `best_of_lines`.
    """
    best = best_of_lines(rank, lines)
    if int(best.sum()) <= limit:
        return best
    among = np.ix_(*lines)
    every = np.full(rank.shape, -1, dtype=np.int64)
    every[among] = rank.cpu().numpy()[among]
    rows, cols = np.nonzero(every >= 0)
    mate = _matched(rows, cols, every[rows, cols], rank.shape)
    if lines[0].size + lines[1].size - np.count_nonzero(mate >= 0) > limit:
        _augment(mate, rows, cols, rank.shape)
    paired = np.flatnonzero(mate >= 0)
    left = np.setdiff1d(lines[0], paired), np.setdiff1d(lines[1], mate[paired])
    marks = best_of_lines(rank, left)
    marks[torch.from_numpy(paired).to(rank.device), torch.from_numpy(mate[paired]).to(rank.device)] = True
    return marks


def _matched(rows: np.ndarray, cols: np.ndarray, rank: np.ndarray, grid: torch.Size) -> np.ndarray:
    """The column of each row, -1 for none, when blocks are taken from the highest rank on, one for each line."""
    mate = np.full(grid[0], -1)
    used_rows, used_cols = bytearray(grid[0]), bytearray(grid[1])
    order = np.argsort(-rank)
    rows, cols = rows[order], cols[order]
    while rows.size:
        step = max(STEP, rows.size // 16)
        for row, col in zip(rows[:step].tolist(), cols[:step].tolist(), strict=True):
            if not (used_rows[row] or used_cols[col]):
                used_rows[row] = used_cols[col] = True
                mate[row] = col
        free = [np.frombuffer(used, dtype=np.uint8) == 0 for used in (used_rows, used_cols)]
        left = free[0][rows] & free[1][cols]
        rows, cols = rows[left], cols[left]
    return mate


def _augment(mate: np.ndarray, rows: np.ndarray, cols: np.ndarray, grid: torch.Size) -> None:
    """Makes a matching a maximum one, in place: by the shortest alternating path from each row without a column."""
    starts = np.searchsorted(rows, np.arange(grid[0] + 1))  # `rows` rise
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
                    _flip(mate, row_of, came_from, col)
                    queue.clear()
                    break
                queue.append(int(row_of[col]))


def _flip(mate: np.ndarray, row_of: np.ndarray, came_from: dict[int, int], col: int) -> None:
    while col >= 0:
        row = came_from[col]
        row_of[col] = row
        mate[row], col = col, int(mate[row])
