"""The rows or columns that one process stores of a weight which several processes hold together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layout import BlockLayout


@dataclass(frozen=True, eq=False)
class TensorParallelPart:
    """The rows, or the columns, of blocks of a weight that this process stores.

    Args:
        grid: (out_blocks, in_blocks) of the whole weight.
        axis: 0 if the weight is split by rows of blocks, 1 if by columns.
        lines: int64, ascending: the rows (columns) of blocks of the whole weight that this process stores. Line i of
            the module's own layout is line `lines[i]` of the whole weight.
        group: the `torch.distributed.ProcessGroup` whose processes hold the whole weight together.

    >>> import numpy as np, blocksparse as bs
    >>> from blocksparse.nn.tensor_parallel_part import TensorParallelPart
    >>> part = TensorParallelPart((4, 2), 0, np.array([1, 3]), None)
    >>> part.global_indices(bs.BlockLayout([[1, 0], [1, 1]], block_size=8))
    (array([1, 3, 3]), array([0, 0, 1]))
    """

    grid: tuple[int, int]
    axis: int
    lines: np.ndarray
    group: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelPart:
        return self  # a group cannot be copied

    def global_indices(self, layout: BlockLayout) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows and columns, in the whole grid, of the blocks of this part's layout, `[nnz]` each."""
        rows, cols = layout.row_of_block, layout.col_of_block.astype(np.int64)
        return (self.lines[rows], cols) if self.axis == 0 else (rows, self.lines[cols])

    def global_keys(self, keys: np.ndarray, columns: int) -> np.ndarray:
        """Convert block numbers, row * columns + column, of this part to block numbers of the whole grid."""
        lines = list(np.divmod(keys, columns))
        lines[self.axis] = self.lines[lines[self.axis]]
        whole: np.ndarray = lines[0] * self.grid[1] + lines[1]
        return whole

    def local_lines(self, lines: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Select from rows and columns of the whole grid, both ascending, those in this part, by its own numbers."""
        stored = np.flatnonzero(np.isin(self.lines, lines[self.axis]))
        return (stored, lines[1]) if self.axis == 0 else (lines[0], stored)
