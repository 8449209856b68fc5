"""Plans of the linear products of a layout, which the core makes once per layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BlockSparseError
from ..layout import BlockLayout
from . import cpu_core

# Multiply-adds per token of a task, and outputs at whose multiples rows are cut, as in `csrc/linear/plan_driver.cpp`.
TASK_COST = 16_384
OUTPUT_STEP = 16


@dataclass(frozen=True)
class BlockPlan:
    """Tasks of the sampled product: task t computes the blocks `[task_start[t], task_start[t + 1])`."""

    row: np.ndarray  # int32 [nnz]
    col: np.ndarray  # int32 [nnz]
    task_start: np.ndarray  # int64 [tasks + 1]


def row_plan(layout: BlockLayout, transpose: bool) -> Any:
    """Return the plan of x W^T, or of x W with `transpose`, as an object of the core.

    Piece p computes the outputs `[begin[p], end[p])` of block row `row[p]`; task t is the pieces
    `[task_start[t], task_start[t + 1])`, the costliest first. The blocks of row r are `col[start[r] : start[r + 1]]`,
    and their places in the values are `position`.

    >>> import blocksparse as bs
    >>> hub = bs.BlockLayout([[True] * 64, [True] + [False] * 63], block_size=32)
    >>> row_plan(hub, transpose=False).row  # the long row in two pieces, then the short one
    array([0, 0, 1], dtype=int32)
    """
    # Every call needs it, and `derived` takes a tenth of the time of a small product.
    key = "linear tasks", transpose
    return layout._derived.get(key) or layout.derived(key, lambda: _plan_rows(layout, transpose))


def _plan_rows(layout: BlockLayout, transpose: bool) -> Any:
    check_int32(layout)
    return cpu_core.core().RowTasks(
        grid=layout.grid, block=layout.block_shape, transposed=transpose, start=layout.row_start,
        col=layout.col_of_block,
    )  # fmt: skip


def check_int32(layout: BlockLayout) -> None:
    """Check that int32 can count block rows and columns, and the rows within a block."""
    if max(*layout.grid, *layout.block_shape) >= 2**31:
        raise BlockSparseError.expected(
            "layout", "below 2^31 rows and columns of blocks, and below 2^31 features per block", repr(layout)
        )


def block_plan(layout: BlockLayout) -> BlockPlan:
    """Return the plan of the sampled product, which is the gradient of the values."""

    def build() -> BlockPlan:
        check_int32(layout)
        return BlockPlan(
            row=layout.row_of_block.astype(np.int32),
            col=layout.col_of_block.astype(np.int32, copy=False),
            task_start=cpu_core.core().plan_blocks(layout.nnz, layout.block_shape),
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
