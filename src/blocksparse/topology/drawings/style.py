"""Helpers of all pictures: figures without a display, colors, labels and files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BlockSparseError

# Distinguishable with color blindness: Okabe and Ito, Color Universal Design (2008).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def figure_and_axes(size: tuple[float, float], columns: int = 1, **grid: Any) -> tuple[Any, Any]:
    """Return a matplotlib figure that needs no display, and its axes, or an array of several side by side.

    Args:
        size: width and height in inches.
        columns: number of axes, 1 by default.
        grid: further arguments of `Figure.subplots`, such as `width_ratios`.

    Raises:
        BlockSparseError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _missing_matplotlib(error) from error
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, columns, **grid)
    for each in [axes] if columns == 1 else axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def label_points(axes: Any, labels: Iterable[tuple[float, float, str, str]], size: float = 8) -> None:
    """Write texts next to points, moved up if they would overlap each other or points.

    Args:
        axes: matplotlib axes whose limits are set.
        labels: x, y, text and color of each point; points outside the limits get no text.
        size: font size in points, 8 by default.
    """
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()  # computes the position of the axes
    point = axes.figure.dpi / 72
    labels = sorted(labels, key=lambda label: label[1])
    marks = [axes.transData.transform((x, y)) for x, y, *_ in labels]
    taken = [Bbox.from_bounds(x - 4 * point, y - 4 * point, 8 * point, 8 * point) for x, y in marks]
    for x, y, text, color in labels:
        across, up = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
        if not (0 <= across <= 1 and 0 <= up <= 1):
            continue
        aside, align = (7, "left") if across < 0.8 else (-7, "right")
        place = {"xytext": (aside, 0), "textcoords": "offset points", "va": "center", "ha": align}
        note = axes.annotate(text, (x, y), color=color, size=size, **place)
        box = before = note.get_window_extent()
        for other in taken:
            if box.overlaps(other):
                box = box.translated(0, other.y1 - box.y0 + 1)
        note.set_position((aside, (box.y0 - before.y0) / point))
        taken = sorted([*taken, box], key=lambda one: one.y0)


def save(figure: Any, path: str | Path, dpi: float = 150) -> None:
    """Write a figure as a PNG.

    Raises:
        BlockSparseError: the file cannot be written.
    """
    try:
        figure.savefig(path, format="png", dpi=dpi)
    except OSError as error:
        raise BlockSparseError.expected("out", "a PNG file to write", f"{path} ({error.strerror})") from error


def image_writer(path: str | Path) -> Callable[[np.ndarray], None]:
    """Return a function that writes uint8 pixels `[height, width, 3]` as a PNG, after checks of the path.

    Raises:
        BlockSparseError: matplotlib is not installed, or there is no such folder; in the call, the file cannot be
            written.
    """
    try:
        from matplotlib.image import imsave
    except ImportError as error:
        raise _missing_matplotlib(error) from error
    path = Path(path)
    if not path.parent.is_dir() or path.is_dir():
        raise BlockSparseError.expected("out", "a PNG file to write, in an existing folder", path)

    def write(pixels: np.ndarray) -> None:
        try:
            imsave(path, pixels, format="png")
        except OSError as error:
            raise BlockSparseError.expected("out", "a PNG file to write", f"{path} ({error.strerror})") from error

    return write


def _missing_matplotlib(error: ImportError) -> BlockSparseError:
    """Return the error that says how to install matplotlib."""
    return BlockSparseError(f"pictures need matplotlib ({error}): pip install matplotlib")
