"""Which part of a block-sparse weight a process holds, where several processes hold one weight together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layout import BlockLayout


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows, or some columns, of the blocks of a weight: those that this process stores.

    Args:
        grid: (out_blocks, in_blocks) of the whole weight.
        axis: 0 where rows of blocks are cut, 1 where columns are.
        lines: int64, the rows (columns) of blocks of the whole weight that are held here, rising. The module's own
            layout has as many, in this order.
        group: the processes that hold the whole weight together, a `torch.distributed.ProcessGroup`.

    >>> import numpy as np, blocksparse as bs
    >>> from blocksparse.nn.part import Part
    >>> part = Part((4, 2), 0, np.array([1, 3]), None)
    >>> part.places(bs.BlockLayout([[1, 0], [1, 1]], block_size=8))
    (array([1, 3, 3]), array([0, 0, 1]))
    """

    grid: tuple[int, int]
    axis: int
    lines: np.ndarray
    group: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        return self  # a group cannot be copied

    def places(self, layout: BlockLayout) -> tuple[np.ndarray, np.ndarray]:
        """The rows and columns in the whole grid of the blocks of this part's layout, `[nnz]` each."""
        rows, cols = layout.row_of_block, layout.col_of_block.astype(np.int64)
        return (self.lines[rows], cols) if self.axis == 0 else (rows, self.lines[cols])

    def keys(self, keys: np.ndarray, columns: int) -> np.ndarray:
        """The numbers row * columns + column of places in this part, as those in the whole grid."""
        lines = list(np.divmod(keys, columns))
        lines[self.axis] = self.lines[lines[self.axis]]
        whole: np.ndarray = lines[0] * self.grid[1] + lines[1]
        return whole

    def lines_here(self, lines: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Of rows and columns of the whole grid, rising, those that are in this part, as it numbers them."""
        here = np.flatnonzero(np.isin(self.lines, lines[self.axis]))
        return (here, lines[1]) if self.axis == 0 else (lines[0], here)
