"""What all pictures share: figures that need no display, colours, and files that cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import BlockSparseError

# Told apart by the colour-blind as well: Okabe and Ito, Color Universal Design (2008).
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
        raise BlockSparseError(f"pictures need matplotlib ({error}): pip install 'blocksparse-torch[plots]'") from error
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, columns, **grid)
    for one in [axes] if columns == 1 else axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: str | Path, dpi: float = 150) -> None:
    """Writes a figure as a PNG.

    Raises:
        BlockSparseError: it could not be written.
    """
    try:
        figure.savefig(path, format="png", dpi=dpi)
    except OSError as error:
        raise BlockSparseError.expected("out", "a PNG file to write", f"{path} ({error.strerror})") from error
