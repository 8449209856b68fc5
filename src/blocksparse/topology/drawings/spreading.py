"""An animation of activity that spreads from one block, in each step from inputs to all connected outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BlockSparseError
from ...layout import BlockLayout
from ...patterns.small_worlds import torus
from ..mixing import steps_from
from .style import COLORS, figure_and_axes

MAX_FRAMES = 40  # if there are more steps, every second, third, ... one is shown
MAX_SIDE = 300  # blocks


def spreading(layout: BlockLayout, path: str | Path, title: str, block: int | None = None) -> int:
    """Draw a GIF with a frame per step: the blocks that activity has reached, on their torus, and their number.

    Args:
        layout: a layout with a square grid, such as that of `patterns.watts_strogatz_2d`.
        path: file to write, `.gif`.
        title: title of the picture.
        block: index of the block in which activity starts; the one in the middle by default.

    Returns:
        The number of steps until no new block is reached.

    Raises:
        BlockSparseError: a grid that is not square or too large to draw; no such block; matplotlib or scipy is not
            installed, or the file cannot be written.
    """
    if Path(path).suffix.lower() != ".gif":  # the name decides the format
        raise BlockSparseError.expected("out", "a name that ends in .gif", str(path))
    height, width = torus(layout.grid[0])
    if width > MAX_SIDE:
        expected = f"blocks on a torus of at most {MAX_SIDE} to a side"
        raise BlockSparseError.expected("layout", expected, f"{layout.grid[0]:,} blocks, {height:,} x {width:,}")
    middle = height // 2 * width + width // 2
    steps = steps_from(layout, middle if block is None else block)
    last = int(steps.max())
    figure, axes = figure_and_axes((7.2, 3.9), columns=2, width_ratios=(1.25, 1))
    from matplotlib.animation import PillowWriter

    writer = PillowWriter(fps=2)
    try:
        with writer.saving(figure, str(path), dpi=100):
            every = -(-max(last, 1) // MAX_FRAMES)
            shown = [*range(0, last, every), last]
            # Repeating the last frame shows it longer.
            for now in [*shown, last, last, last, last]:
                _draw_frame(axes, steps.reshape(height, width), now, last)
                figure.suptitle(f"{title}\nafter {now} step{'' if now == 1 else 's'}", x=0.02, ha="left", size=10)
                writer.grab_frame()
    except OSError as error:
        raise BlockSparseError.expected("out", "a GIF file to write", f"{path} ({error.strerror})") from error
    return last


def _draw_frame(axes: Any, steps: np.ndarray, now: int, last: int) -> None:
    """Draw the blocks reached after `now` steps, and the curve of their number."""
    grid, curve = axes
    grid.clear()
    reached = (steps >= 0) & (steps <= now)
    image = np.ma.masked_where(~reached, steps)
    grid.set_facecolor("0.93")
    # In every frame the newest blocks are the lightest and the oldest are dark.
    grid.imshow(image, cmap="cividis", vmin=min(now - 4, 0), vmax=max(now, 1), interpolation="nearest")
    # The block in which activity started.
    y, x = np.argwhere(steps == 0)[0]
    grid.plot(x, y, "o", mfc="none", mec=COLORS[1], mew=1.5, ms=9)
    grid.set(xticks=[], yticks=[])
    grid.spines[:].set_visible(False)
    curve.clear()
    counts = np.cumsum(np.bincount(steps[steps >= 0], minlength=last + 1)) / steps.size
    curve.plot(range(last + 1), counts, color="0.85", lw=1.5)
    curve.plot(range(now + 1), counts[: now + 1], color=COLORS[0], lw=2, marker="o", ms=4)
    curve.set(xlim=(-0.2, max(last, 1) + 0.2), ylim=(0, 1.05), xlabel="steps", ylabel="fraction of blocks reached")
    curve.xaxis.get_major_locator().set_params(integer=True)
    curve.grid(color="0.92", lw=0.8)
    curve.set_axisbelow(True)
    # At the lower right, below the end of the curve.
    curve.text(0.97, 0.06, f"{int(reached.sum()):,} of {steps.size:,}", transform=curve.transAxes, ha="right", size=10)
