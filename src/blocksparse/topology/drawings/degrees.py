"""How many blocks the rows and columns of a layout have, compared with a random layout of the same density."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...layout import BlockLayout, import_scipy_sparse
from ..degrees import degrees
from .style import COLORS, figure_and_axes, save

BINS = 40  # at most, for the bars to be told apart
HUBS = 8  # where the fullest has this many times the median's blocks, both axes are logarithmic


def degree_histogram(layout: BlockLayout, path: str | Path, title: str) -> None:
    """A PNG of the degrees of outputs and of inputs, and of what chance alone would give.

    Args:
        layout: of any shape.
        path: of the file.
        title: what it is.

    Raises:
        BlockSparseError: matplotlib or scipy is not installed, or the file cannot be written.
    """
    import_scipy_sparse()  # says how to get scipy
    from scipy.stats import binom

    figure, axes = figure_and_axes((9.0, 3.6), columns=2, sharey=True)
    found = [counts.numpy() for counts in degrees(layout)]
    hubs = max(counts.max() / max(np.median(counts), 1) for counts in found) > HUBS
    for one, counts, others, name, color in zip(
        axes, found, layout.grid[::-1], ("outputs", "inputs"), COLORS, strict=False
    ):
        edges = bins(counts, log=hubs)
        heights = np.histogram(counts, edges)[0]
        one.bar(edges[:-1], heights, np.diff(edges), align="edge", color=color, edgecolor="white", lw=0.4)
        chance = binom.cdf(np.ceil(edges) - 1, others, layout.density)
        one.stairs(counts.size * np.diff(chance), edges, color="0.25", lw=1.2, ls="--", label="a random layout")
        if hubs:
            one.set(xscale="log", yscale="log", ylim=(0.5, None))
            one.xaxis.set_major_formatter("{x:g}")
            one.yaxis.set_major_formatter("{x:g}")
        one.axvline(counts.mean(), color="0.5", lw=1, ls=":", label=f"mean {counts.mean():.3g}")
        one.set_xlabel(f"blocks of {'a row' if name == 'outputs' else 'a column'}")
        one.set_title(f"{counts.size:,} blocks of {name}, {counts.min()} to {counts.max()} ties", loc="left", size=10)
        one.legend(frameon=False, fontsize=9)
    axes[0].set_ylabel("rows or columns")
    figure.suptitle(f"{title}, density {layout.density:.3g}", x=0.01, ha="left", size=11)
    save(figure, path)


def bins(counts: np.ndarray, log: bool = False) -> np.ndarray:
    """The edges of a histogram's bars: one for each degree, or wider ones where there are many degrees.

    >>> bins(np.array([2, 3, 3, 5]))
    array([1.5, 2.5, 3.5, 4.5, 5.5])
    """
    low, high = int(counts.min()), int(counts.max())
    if log:
        return np.unique(np.round(np.geomspace(max(low, 1), high + 1, 13))) - 0.5
    width = -(-(high - low + 1) // BINS)
    return np.arange(low, high + width + 1, width) - 0.5
