"""The plan of the gated pair on a GPU, in pure numpy, computed once per pair of layouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...layout import BlockLayout


@dataclass(frozen=True)
class GatedPlan:
    """One task per row of both weights, longest first.

    `tasks` is int32 `[tasks, 5]`: the row, the first entry that both weights have, the first of the gate alone, the
    first of the up-projection alone, and the end. Entry e multiplies the inputs of block `col[e]` with block
    `block[0, e]` of the gate's values and block `block[1, e]` of the other values; 0 stands for a missing block.
    """

    tasks: np.ndarray
    col: np.ndarray  # int32 [entries]
    block: np.ndarray  # int32 [2, entries]


def gated_plan(gate: BlockLayout, up: BlockLayout) -> GatedPlan:
    """Sort the blocks of each row into those of both layouts, of the gate alone, and of the other alone.

    >>> import blocksparse as bs
    >>> gate = bs.BlockLayout([[1, 1, 0, 1], [0, 0, 1, 0]], block_size=32)
    >>> up = bs.BlockLayout([[1, 1, 1, 0], [0, 0, 0, 0]], block_size=32)
    >>> plan = gated_plan(gate, up)
    >>> plan.tasks  # row 0: both have entries [0, 2), the gate [2, 3), the other [3, 4)
    array([[0, 0, 2, 3, 4],
           [1, 4, 4, 5, 5]], dtype=int32)
    >>> plan.col
    array([0, 1, 3, 2, 2], dtype=int32)
    >>> plan.block
    array([[0, 1, 2, 0, 3],
           [0, 1, 0, 2, 0]], dtype=int32)
    """
    rows, cols = gate.grid
    place = [each.row_of_block.astype(np.int64) * cols + each.col_of_block for each in (gate, up)]
    every = np.union1d(*place)
    has, block = [], []
    for own in place:
        nth = np.searchsorted(own, every)
        there = nth < len(own)
        there[there] = own[nth[there]] == every[there]
        has.append(there)
        block.append(np.where(there, nth, 0))
    row, kind = every // cols, np.where(has[0], np.where(has[1], 0, 1), 2)
    order = np.lexsort((every, kind, row))
    counts = np.bincount(3 * row + kind, minlength=3 * rows)
    ends = np.concatenate([[0], np.cumsum(counts)])
    tasks = np.stack([np.arange(rows), *(ends[nth : nth + 3 * rows : 3] for nth in range(4))], axis=1)
    tasks = tasks[np.argsort(tasks[:, 1] - tasks[:, 4], kind="stable")]
    return GatedPlan(*(array.astype(np.int32) for array in (tasks, (every % cols)[order], np.stack(block)[:, order])))
