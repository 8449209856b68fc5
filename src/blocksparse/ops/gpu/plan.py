"""Plans of the programs of a GPU, computed once per layout in pure numpy, testable without a GPU.

A task is the work of one program. Tasks are sorted longest first, so that no program is left alone with a long row at
the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...layout import BlockLayout

# Rows are paired only within chunks of this size, which bounds time and memory.
PAIRING_CHUNK = 1024


@dataclass(frozen=True)
class LinearPlan:
    """The tasks of y = x W^T, or of y = x W for the transposed layout.

    `tasks` is int32 `[tasks, 4]`: a row, its first entry, the end of its entries, and the slot for the sums if this is
    a part of the row, else -1. It is `[tasks, 5]` if tasks have a second row (-1: none), which is summed at the same
    time. Entry e multiplies the inputs of block `col[e]` with block `block[e]` of the values, or with `block[e, 0]` for
    the first row and `block[e, 1]` for the second (-1: that row lacks the block). Slot s holds a part of row `slots[s,
    0]`; if s is the row's first slot, `slots[s, 1]` is the end of its slots, else `slots[s, 1]` is -1.
    """

    tasks: np.ndarray
    col: np.ndarray  # int32 [entries]
    block: np.ndarray | None  # int32 [entries] or [entries, 2]; None if entry e uses block e
    slots: np.ndarray  # int32 [slots, 2]


def linear_plan(layout: BlockLayout, transpose: bool, longest: int | None = None) -> LinearPlan:
    """Return one task per row, or several of about equal length for a row of more than `longest` entries.

    >>> import blocksparse as bs
    >>> hub = bs.BlockLayout([[True] * 4, [True, False, False, False]], block_size=32)
    >>> plan = linear_plan(hub, transpose=False, longest=3)
    >>> plan.tasks  # the long row in two parts, then the short one
    array([[ 0,  0,  2,  0],
           [ 0,  2,  4,  1],
           [ 1,  4,  5, -1]], dtype=int32)
    >>> plan.slots  # row 0 is the sum of slots 0 and 1
    array([[ 0,  2],
           [ 0, -1]], dtype=int32)
    """
    rows, block = (layout.T, layout.transpose_order.astype(np.int32)) if transpose else (layout, None)
    start = rows.row_start.astype(np.int64)
    length = np.diff(start)
    parts = np.ones_like(length) if longest is None else np.maximum(-(-length // longest), 1)
    row = np.repeat(np.arange(len(length)), parts)
    nth = np.arange(row.size) - np.repeat(np.cumsum(parts) - parts, parts)
    first = start[row] + nth * length[row] // parts[row]
    end = start[row] + (nth + 1) * length[row] // parts[row]

    in_parts = parts[row] > 1
    slot = np.where(in_parts, np.cumsum(in_parts) - 1, -1)
    end_of_row = np.where(nth == 0, slot + parts[row], -1)
    slots = np.stack([row, end_of_row], axis=1)[in_parts]

    order = np.argsort(first - end, kind="stable")
    tasks = np.stack([row, first, end, slot], axis=1)[order]
    return LinearPlan(_int32(tasks), _int32(rows.col_of_block), block, _int32(slots))


def pair_plan(layout: BlockLayout, transpose: bool) -> LinearPlan:
    """Return tasks of two rows each, matched to share many inputs, which are then loaded once for both.

    >>> import blocksparse as bs
    >>> twins = bs.BlockLayout([[1, 1, 0, 1], [0, 0, 1, 0], [1, 1, 1, 0]], block_size=32)
    >>> plan = pair_plan(twins, transpose=False)
    >>> plan.tasks  # the entries of rows 0 and 2, then those of row 1
    array([[ 0,  0,  4, -1,  2],
           [ 1,  4,  5, -1, -1]], dtype=int32)
    >>> plan.col
    array([0, 1, 2, 3, 2], dtype=int32)
    >>> plan.block
    array([[ 0,  4],
           [ 1,  5],
           [-1,  6],
           [ 2, -1],
           [ 3, -1]], dtype=int32)
    """
    rows = layout.T if transpose else layout
    pairs = np.array(matching(rows))
    task, row_in_pair = np.empty((2, rows.grid[0] + 1), dtype=np.int64)  # one more, for row -1
    task[pairs] = np.arange(len(pairs))[:, None]
    row_in_pair[pairs] = 0, 1
    row = rows.row_of_block
    joined, entry = np.unique(task[row] * rows.grid[1] + rows.col_of_block, return_inverse=True)
    block = np.full((len(joined), 2), -1)
    block[entry, row_in_pair[row]] = layout.transpose_order if transpose else np.arange(layout.nnz)
    start = np.searchsorted(joined, np.arange(len(pairs) + 1) * rows.grid[1])
    order = np.argsort(start[:-1] - start[1:], kind="stable")
    tasks = np.column_stack([pairs[:, 0], start[:-1], start[1:], np.full(len(pairs), -1), pairs[:, 1]])[order]
    return LinearPlan(_int32(tasks), _int32(joined % rows.grid[1]), _int32(block), np.empty((0, 2), dtype=np.int32))


def matching(rows: BlockLayout) -> list[tuple[int, int]]:
    """Return pairs of rows, made greedily from those that share most blocks of inputs; -1 is no partner.

    >>> import blocksparse as bs
    >>> matching(bs.BlockLayout([[1, 1, 0, 1], [0, 0, 1, 0], [1, 1, 1, 0]], block_size=32))
    [(0, 2), (1, -1)]
    """
    pairs = []
    for begin in range(0, rows.grid[0], PAIRING_CHUNK):
        end = min(begin + PAIRING_CHUNK, rows.grid[0])
        shared = _shared(rows, begin, end)
        upper = np.triu_indices(end - begin, 1)
        order = np.argsort(-shared[upper], kind="stable")
        free, left = np.ones(end - begin, dtype=bool), end - begin
        for i, j in zip(upper[0][order].tolist(), upper[1][order].tolist(), strict=True):
            if free[i] and free[j]:
                free[i] = free[j] = False
                pairs.append((begin + i, begin + j))
                left -= 2
                if left < 2:
                    break
        pairs += [(begin + int(i), -1) for i in np.flatnonzero(free)]
    return pairs


def _shared(rows: BlockLayout, begin: int, end: int) -> np.ndarray:
    """Return how many blocks of inputs each two of these rows share, `[rows, rows]`."""
    blocks = slice(*rows.row_start[[begin, end]])
    used, col = np.unique(rows.col_of_block[blocks], return_inverse=True)
    member = np.zeros((end - begin, len(used)), dtype=np.float32)
    member[rows.row_of_block[blocks] - begin, col] = 1
    return member @ member.T


def share(plan: LinearPlan) -> float:
    """Return the fraction of input loads that two rows at a time save, from 0 to 0.5."""
    blocks = len(plan.col) if plan.block is None else int((plan.block >= 0).sum())
    return 1 - len(plan.col) / max(blocks, 1) if blocks else 0.0


def most_shared(layout: BlockLayout, transpose: bool) -> float:
    """Return an upper bound of `share`, for which each row is paired with its best partner; much faster."""
    rows = layout.T if transpose else layout
    best = 0.0
    for begin in range(0, rows.grid[0], PAIRING_CHUNK):
        shared = _shared(rows, begin, min(begin + PAIRING_CHUNK, rows.grid[0]))
        np.fill_diagonal(shared, 0)
        best += float(shared.max(axis=1).sum()) / 2
    return best / max(rows.nnz, 1)


def wgrad_tasks(layout: BlockLayout, block_k: int, taps: int = 1) -> np.ndarray:
    """Return the tasks of the sampled product, int32 `[tasks, 4]`: a row, its first entry, the end, the first lane.

    In a convolution, an entry has its lanes once per tap.

    >>> import blocksparse as bs
    >>> layout = bs.BlockLayout([[True, True, True], [False, True, False]], block_size=32)
    >>> wgrad_tasks(layout, block_k=64)  # two blocks at a time
    array([[ 0,  0,  3,  0],
           [ 0,  0,  3, 64],
           [ 1,  3,  4,  0]], dtype=int32)
    """
    start = layout.row_start.astype(np.int64)
    width = 1 << (layout.block_shape[1] - 1).bit_length()
    count = -(-np.diff(start) * width * taps // block_k)
    row = np.repeat(np.arange(layout.grid[0]), count)
    nth = np.arange(row.size) - np.repeat(np.cumsum(count) - count, count)
    return _int32(np.stack([row, start[row], start[row + 1], nth * block_k], axis=1))


def _int32(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=np.int32)
