"""A picture of the blocks that a layout stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...layout import BlockLayout
from .style import figure_and_axes, save

# Larger grids are drawn in cells of several blocks, whose shade shows how full they are.
MAX_CELLS = 512


def matrix(layout: BlockLayout, path: str | Path, title: str) -> None:
    """Draw the mask as a PNG, with a cell per block, or per several blocks of a large grid.

    Args:
        layout: a layout of any shape.
        path: file to write.
        title: title of the picture.

    Raises:
        BlockSparseError: matplotlib is not installed, or the file cannot be written.
    """
    height, width = layout.grid
    longest = max(height, width)
    figure, axes = figure_and_axes((max(5.5 * width / longest + 0.9, 3.6), max(5.5 * height / longest + 1.1, 2.4)))
    step = show(axes, layout, (width, height), origin=-0.5)  # ticks are in the middle of blocks
    axes.set(xlabel="inputs, in blocks", ylabel="outputs, in blocks")
    rows, cols = layout.shape
    note = f", {step} x {step} blocks to a cell" if step > 1 else ""
    # A title of the figure, since the axes may be much narrower.
    figure.suptitle(f"{title}, {rows} x {cols}\ndensity {layout.density:.3g}{note}", x=0.02, ha="left", size=10)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    # At least a pixel per cell, so that "nearest" omits no block and blends none.
    save(figure, path, dpi=max(150, 1.2 * min(longest, MAX_CELLS) / 5.5))


def show(axes: Any, layout: BlockLayout, size: tuple[float, float], origin: float = 0) -> int:
    """Draw a layout into axes, `size` (width, height) large from `origin`; return the blocks per side of a cell."""
    image, step = cells(layout)
    # The last cells may extend beyond the grid.
    width, height = (
        origin + length * count * step / blocks
        for length, count, blocks in zip(size, image.shape[::-1], layout.grid[::-1], strict=True)
    )
    axes.imshow(image, cmap="Blues", vmin=0, vmax=1, extent=(origin, width, height, origin), interpolation="nearest")
    axes.set(xlim=(origin, origin + size[0]), ylim=(origin + size[1], origin))
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color("0.7")
    return step


def cells(layout: BlockLayout) -> tuple[np.ndarray, int]:
    """Return a shade from 0 to 1 for each cell of `step` x `step` blocks, and the step.

    >>> import blocksparse as bs
    >>> cells(bs.BlockLayout([[True, False], [True, True]], block_size=4))
    (array([[1., 0.],
           [1., 1.]]), 1)
    """
    step = -(-max(layout.grid) // MAX_CELLS)
    rows, cols, counts, grid = coarse(layout, step)
    image = np.zeros(grid)
    # Shades of cells with blocks start at 0.5, so that they are visible on a sparse grid.
    image[rows, cols] = 0.5 + 0.5 * counts / counts.max() if counts.size else 0
    return image, step


def coarse(layout: BlockLayout, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]:
    """Return the cells of `step` x `step` blocks that are not empty, row by row.

    Returns:
        Rows, columns and numbers of stored blocks of the cells, int64 `[cells]`, and the grid of cells.

    >>> import blocksparse as bs
    >>> coarse(bs.patterns.banded((20, 20), block_size=4), 2)
    (array([0, 0, 1, 1, 1, 2, 2]), array([0, 1, 0, 1, 2, 1, 2]), array([4, 1, 1, 4, 1, 1, 1]), (3, 3))
    """
    height, width = (-(-size // step) for size in layout.grid)
    keys = layout.row_of_block // step * width + layout.col_of_block.astype(np.int64) // step
    keys, counts = np.unique(keys, return_counts=True)
    return keys // width, keys % width, counts, (height, width)
