"""Plans that cut the linear products of a layout into tasks for threads, computed once per layout.

Costs are multiply-adds per token. A thread takes one task at a time. Cutting never changes the order of any sum, so
results depend neither on the plan nor on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BlockSparseError
from ..layout import BlockLayout
from . import cpu_core

# 10 microseconds of a fast core at 48 tokens: long compared with fetching a task, short compared with a layer.
TASK_COST = 16_384
# Rows are cut at multiples of this number of outputs: the height of one AMX tile and of two AVX-512 tiles.
OUTPUT_STEP = 16
# Rows of small blocks share a task up to this number of outputs, which in 16 bits are a cache line of a token.
LINE_OUTPUTS = 32


@dataclass(frozen=True)
class RowPlan:
    """Tasks of y = x W^T, or of y = x W for the transposed layout.

    Piece p computes the outputs `[begin[p], end[p])` of block row `row[p]`; task t is the pieces
    `[task_start[t], task_start[t + 1])`, the costliest first.
    """

    shape: tuple[int, int]  # (outputs, inputs) of this product
    block_shape: tuple[int, int]
    transposed: bool
    start: np.ndarray  # int64 [rows + 1], where each row's blocks start in `col` and `block`
    col: np.ndarray  # int32 [nnz], the block of inputs
    block: np.ndarray  # int64 [nnz], the position in `values`
    row: np.ndarray  # int32 [pieces]
    begin: np.ndarray  # int32 [pieces]
    end: np.ndarray  # int32 [pieces]
    task_start: np.ndarray  # int64 [tasks + 1]

    def tasks(self) -> Any:
        """Return the plan as an object of the compiled core."""
        return cpu_core.core().RowTasks(
            features=self.shape, block=self.block_shape, transposed=self.transposed, start=self.start, col=self.col,
            position=self.block, row=self.row, begin=self.begin, end=self.end, task_start=self.task_start,
        )  # fmt: skip


@dataclass(frozen=True)
class BlockPlan:
    """Tasks of the sampled product: task t computes the blocks `[task_start[t], task_start[t + 1])`."""

    row: np.ndarray  # int32 [nnz]
    col: np.ndarray  # int32 [nnz]
    task_start: np.ndarray  # int64 [tasks + 1]


def row_plan(layout: BlockLayout, transpose: bool) -> RowPlan:
    """Return the plan of x W^T, or of x W with `transpose`.

    >>> import blocksparse as bs
    >>> hub = bs.BlockLayout([[True] * 64, [True] + [False] * 63], block_size=32)
    >>> row_plan(hub, transpose=False).row  # the long row in two pieces, then the short one
    array([0, 0, 1], dtype=int32)
    """
    return layout.derived(("linear rows", transpose), lambda: _row_plan(layout, transpose))


def check_int32(layout: BlockLayout) -> None:
    """Check that int32 can count block rows and columns, and the rows within a block."""
    if max(*layout.grid, *layout.block_shape) >= 2**31:
        raise BlockSparseError.expected(
            "layout", "below 2^31 rows and columns of blocks, and below 2^31 features per block", repr(layout)
        )


def _row_plan(layout: BlockLayout, transpose: bool) -> RowPlan:
    """Return the tasks of a layout: long rows in pieces, neighbouring small rows together, sorted by cost."""
    check_int32(layout)
    block = np.arange(layout.nnz, dtype=np.int64)
    if transpose:
        layout, block = layout.T, layout.transpose_order
    start = layout.row_start.astype(np.int64)
    height, width = layout.block_shape
    cost = np.diff(start) * height * width

    # A row that costs more than a task is cut into pieces of one register tile of outputs or more.
    tiles = -(-height // OUTPUT_STEP)
    pieces = np.clip(-(-cost // TASK_COST), 1, tiles)
    row = np.repeat(np.arange(layout.grid[0]), pieces)
    nth = np.arange(row.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = nth * tiles // pieces[row] * OUTPUT_STEP
    end = np.minimum((nth + 1) * tiles // pieces[row] * OUTPUT_STEP, height)

    # An empty row costs about as much as one block: its outputs are written too.
    piece_cost = np.maximum(np.diff(start)[row], 1) * (end - begin) * width
    together = _rows_per_task(height, cost.mean()) if row.size else 1
    first = np.arange(0, row.size, together)
    cost = np.add.reduceat(piece_cost, first) if row.size else piece_cost
    order = np.argsort(-cost, kind="stable")
    size = np.minimum(first + together, row.size)[order] - first[order]
    end_of = np.cumsum(size)
    task_start = np.append(0, end_of)[_task_starts(cost[order])]
    order = np.repeat(first[order] - (end_of - size), size) + np.arange(row.size)
    return RowPlan(
        shape=layout.shape,
        block_shape=layout.block_shape,
        transposed=transpose,
        start=start,
        col=layout.col_of_block.astype(np.int32, copy=False),
        block=block,
        row=row[order].astype(np.int32),
        begin=begin[order].astype(np.int32),
        end=end[order].astype(np.int32),
        task_start=task_start,
    )


def _rows_per_task(height: int, cost: float) -> int:
    """Return how many rows of this mean cost share a task: enough for whole cache lines of outputs, if not too many."""
    rows = max(LINE_OUTPUTS // height, 1) if height <= OUTPUT_STEP else 1  # a row that is cut shares no task
    while rows > 1 and rows * cost > 2 * TASK_COST:
        rows //= 2
    return rows


def block_plan(layout: BlockLayout) -> BlockPlan:
    """Return the plan of the sampled product, which is the gradient of the values."""

    def build() -> BlockPlan:
        check_int32(layout)
        cost = np.full(layout.nnz, layout.block_shape[0] * layout.block_shape[1])
        return BlockPlan(
            row=layout.row_of_block.astype(np.int32),
            col=layout.col_of_block.astype(np.int32, copy=False),
            task_start=_task_starts(cost),
        )

    return layout.derived("linear blocks", build)


def column_plan(layout: BlockLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a layout of 1x1 blocks by columns: the start of each column, and row and position of each number.

    The products need nothing else besides the layout: 8 bytes per number, or 16 if int32 is too small.
    """

    def build() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        index = np.int32 if max(layout.nnz, layout.grid[0]) < 2**31 else np.int64
        start = np.empty(layout.grid[1] + 1, dtype=index)
        row, position = np.empty(layout.nnz, dtype=index), np.empty(layout.nnz, dtype=index)
        cpu_core.core().csr_transposed(
            start=layout.row_start, col=layout.col_of_block, to_start=start, to_row=row, to_position=position
        )
        return start, row, position

    return layout.derived("linear columns", build)


def _task_starts(cost: np.ndarray) -> np.ndarray:
    """Group consecutive items into tasks of about TASK_COST; return the start of each task, and the end."""
    before = np.cumsum(cost) - cost
    first = np.flatnonzero(np.diff(before // TASK_COST, prepend=-1))
    return np.append(first, len(cost)).astype(np.int64)
