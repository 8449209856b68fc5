"""Helpers of all pictures: figures that need no display, colours, and errors for files that cannot be written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BlockSparseError

# Distinguishable by the colour-blind: Okabe and Ito, Color Universal Design (2008).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def figure_and_axes(size: tuple[float, float], columns: int = 1, **grid: Any) -> tuple[Any, Any]:
    """A matplotlib figure that needs no display, with one pair of axes, or an array of them side by side.

    Args:
        size: width and height in inches.
        columns: of axes.
        grid: more for `Figure.subplots`, as `width_ratios`.

    Raises:
        BlockSparseError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _missing(error) from error
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, columns, **grid)
    for one in [axes] if columns == 1 else axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def label_points(axes: Any, labels: Iterable[tuple[float, float, str, str]], size: float = 8) -> None:
    """Puts texts next to points, moved up where they would overlap each other or points. For axes whose limits are set.

    Args:
        axes: of matplotlib.
        labels: x, y, text and colour of each; those beyond the limits are left out.
        size: of the texts, in points.
    """
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()  # which settles where the axes are
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
    """Writes a figure as a PNG.

    Raises:
        BlockSparseError: it could not be written.
    """
    try:
        figure.savefig(path, format="png", dpi=dpi)
    except OSError as error:
        raise BlockSparseError.expected("out", "a PNG file to write", f"{path} ({error.strerror})") from error


def image_writer(path: str | Path) -> Callable[[np.ndarray], None]:
    """Returns a writer of uint8 `[height, width, 3]` as a PNG, after checking now that the file can be written.

    Raises:
        BlockSparseError: matplotlib is not installed, there is no such folder; in the call, it could not be written.
    """
    try:
        from matplotlib.image import imsave
    except ImportError as error:
        raise _missing(error) from error
    path = Path(path)
    if not path.parent.is_dir() or path.is_dir():
        raise BlockSparseError.expected("out", "a PNG file to write, in a folder that is there", path)

    def write(pixels: np.ndarray) -> None:
        try:
            imsave(path, pixels, format="png")
        except OSError as error:
            raise BlockSparseError.expected("out", "a PNG file to write", f"{path} ({error.strerror})") from error

    return write


def _missing(error: ImportError) -> BlockSparseError:
    return BlockSparseError(f"pictures need matplotlib ({error}): pip install 'blocksparse-torch[lab]'")
