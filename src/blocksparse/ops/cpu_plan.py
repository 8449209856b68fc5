"""How the linear products of a layout are cut into tasks: pure, made once per layout, no values in it.

Costs are counted in multiply-adds per token. A task is what one thread takes at a time. Cutting never changes the
order of any sum, so results do not depend on it, nor on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BlockSparseError
from ..layout import BlockLayout
from . import cpu_core

# At 48 tokens about 10 microseconds of a fast core: long compared with taking a task, short compared with a layer.
TASK_COST = 16_384
# Rows are cut between outputs at multiples of this, the height of an AMX tile and two of AVX-512.
OUTPUT_STEP = 16
# Rows of low blocks stay with their neighbours, up to this many outputs: 16 bits each are a cache line of a token.
LINE_OUTPUTS = 32


@dataclass(frozen=True)
class RowPlan:
    """The tasks of y = x W^T (or, from the transposed layout, of y = x W).

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
        """The plan as the compiled core takes it."""
        return cpu_core.core().RowTasks(
            features=self.shape, block=self.block_shape, transposed=self.transposed, start=self.start, col=self.col,
            position=self.block, row=self.row, begin=self.begin, end=self.end, task_start=self.task_start,
        )  # fmt: skip


@dataclass(frozen=True)
class BlockPlan:
    """The tasks of the sampled product: task t computes the blocks `[task_start[t], task_start[t + 1])`."""

    row: np.ndarray  # int32 [nnz]
    col: np.ndarray  # int32 [nnz]
    task_start: np.ndarray  # int64 [tasks + 1]


def row_plan(layout: BlockLayout, transpose: bool) -> RowPlan:
    """The plan of x W^T, or of x W with `transpose`.

    >>> import blocksparse as bs
    >>> hub = bs.BlockLayout([[True] * 64, [True] + [False] * 63], block_size=32)
    >>> row_plan(hub, transpose=False).row  # the long row in two pieces, then the short one
    array([0, 0, 1], dtype=int32)
    """
    return layout.derived(("linear rows", transpose), lambda: _row_plan(layout, transpose))


def check_int32(layout: BlockLayout) -> None:
    """Raises a BlockSparseError unless int32 numbers the block rows and columns, and the rows within a block."""
    if max(*layout.grid, *layout.block_shape) >= 2**31:
        raise BlockSparseError.expected(
            "layout", "below 2^31 rows and columns of blocks, and below 2^31 features per block", repr(layout)
        )


def _row_plan(layout: BlockLayout, transpose: bool) -> RowPlan:
    check_int32(layout)
    block = np.arange(layout.nnz, dtype=np.int64)
    if transpose:
        layout, block = layout.T, layout.transpose_order
    start = layout.row_start.astype(np.int64)
    height, width = layout.block_shape
    cost = np.diff(start) * height * width

    # A row above the cost of a task is cut into up to one piece per register tile of outputs.
    tiles = -(-height // OUTPUT_STEP)
    pieces = np.clip(-(-cost // TASK_COST), 1, tiles)
    row = np.repeat(np.arange(layout.grid[0]), pieces)
    nth = np.arange(row.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = nth * tiles // pieces[row] * OUTPUT_STEP
    end = np.minimum((nth + 1) * tiles // pieces[row] * OUTPUT_STEP, height)

    # An empty row costs about as much as one block does: its outputs are written too.
    piece_cost = np.maximum(np.diff(start)[row], 1) * (end - begin) * width
    together = _rows_together(height, cost.mean()) if row.size else 1
    first = np.arange(0, row.size, together)
    cost = np.add.reduceat(piece_cost, first) if row.size else piece_cost
    order = np.argsort(-cost, kind="stable")
    size = np.minimum(first + together, row.size)[order] - first[order]
    end_of = np.cumsum(size)
    task_start = np.append(0, end_of)[_group(cost[order])]
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


def _rows_together(height: int, cost: float) -> int:
    """How many rows of this mean cost make whole cache lines of outputs, or a part of them where that is too much for
    one task."""
    rows = max(LINE_OUTPUTS // height, 1) if height <= OUTPUT_STEP else 1  # rows that are cut stay alone
    while rows > 1 and rows * cost > 2 * TASK_COST:
        rows //= 2
    return rows


def block_plan(layout: BlockLayout) -> BlockPlan:
    """The plan of the sampled product (the gradient of the values)."""

    def build() -> BlockPlan:
        check_int32(layout)
        cost = np.full(layout.nnz, layout.block_shape[0] * layout.block_shape[1])
        return BlockPlan(
            row=layout.row_of_block.astype(np.int32),
            col=layout.col_of_block.astype(np.int32, copy=False),
            task_start=_group(cost),
        )

    return layout.derived("linear blocks", build)


def column_plan(layout: BlockLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A layout of single numbers by its columns: where each starts; the row and the position of each number in it.

    All that its products need besides the layout itself: 8 bytes for each number, 16 where int32 does not reach.
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


def _group(cost: np.ndarray) -> np.ndarray:
    """Consecutive items into tasks of about TASK_COST: where each task starts, and the end."""
    before = np.cumsum(cost) - cost
    first = np.flatnonzero(np.diff(before // TASK_COST, prepend=-1))
    return np.append(first, len(cost)).astype(np.int64)
