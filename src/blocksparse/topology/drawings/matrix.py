"""Which blocks a layout stores, as a picture whose cells are blocks, or several blocks of a large grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...layout import BlockLayout
from .style import figure_and_axes, save

# A grid of more blocks than this to a side is drawn in cells of several blocks, as dark as they are full.
LARGEST = 512


def matrix(layout: BlockLayout, path: str | Path, title: str) -> None:
    """The mask as a PNG: a cell per block, or per several blocks of a large grid; the mask is never made whole.

    Args:
        layout: of any shape.
        path: of the file.
        title: what it is.

    Raises:
        BlockSparseError: matplotlib is not installed, or the file cannot be written.
    """
    height, width = layout.grid
    longest = max(height, width)
    figure, axes = figure_and_axes((max(5.5 * width / longest + 0.9, 3.6), max(5.5 * height / longest + 1.1, 2.4)))
    step = show(axes, layout, (width, height), origin=-0.5)  # the ticks in the middle of blocks
    axes.set(xlabel="inputs, in blocks", ylabel="outputs, in blocks")
    rows, cols = layout.shape
    note = f", {step} x {step} blocks to a cell" if step > 1 else ""
    # Of the figure, not of the axes: these can be far narrower than it.
    figure.suptitle(f"{title}, {rows} x {cols}\ndensity {layout.density:.3g}{note}", x=0.02, ha="left", size=10)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    # At least as large as it is: beyond that "nearest" leaves no block out and adds no grey.
    save(figure, path, dpi=max(150, 1.2 * min(longest, LARGEST) / 5.5))


def show(axes: Any, layout: BlockLayout, size: tuple[float, float], origin: float = 0) -> int:
    """Draws a layout into axes, `size` (width, height) large from `origin` on; returns the blocks to a cell's side."""
    image, step = cells(layout)
    # The last cells may reach beyond the grid.
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
    """How full each cell of `step` x `step` blocks is, as a shade from 0 to 1, and the step.

    >>> import blocksparse as bs
    >>> cells(bs.BlockLayout([[True, False], [True, True]], block_size=4))
    (array([[1., 0.],
           [1., 1.]]), 1)
    """
    step = -(-max(layout.grid) // LARGEST)
    rows, cols, counts, grid = coarse(layout, step)
    image = np.zeros(grid)
    # A cell with anything in it must be seen on a sparse grid: the scale starts well above white.
    image[rows, cols] = 0.5 + 0.5 * counts / counts.max() if counts.size else 0
    return image, step


def coarse(layout: BlockLayout, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]:
    """The cells of `step` x `step` blocks that are not empty, row by row.

    Returns:
        Their rows, their columns, and how many blocks each stores, int64 `[cells]`; and the grid of cells.

    >>> import blocksparse as bs
    >>> coarse(bs.patterns.banded((20, 20), block_size=4), 2)
    (array([0, 0, 1, 1, 1, 2, 2]), array([0, 1, 0, 1, 2, 1, 2]), array([4, 1, 1, 4, 1, 1, 1]), (3, 3))
    """
    height, width = (-(-size // step) for size in layout.grid)
    places = layout.row_of_block // step * width + layout.col_of_block.astype(np.int64) // step
    places, counts = np.unique(places, return_counts=True)
    return places // width, places % width, counts, (height, width)
