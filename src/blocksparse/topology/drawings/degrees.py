"""Histograms of the degrees of a layout, compared with a random layout of the same density."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...layout import BlockLayout, import_scipy_sparse
from ..degrees import degrees
from .style import COLORS, figure_and_axes, save

MAX_BINS = 40
LOG_FROM = 8  # maximum / median degree above which both axes are logarithmic


def degree_histogram(layout: BlockLayout, path: str | Path, title: str) -> None:
    """Draw a PNG of the degrees of outputs and inputs, and those of a random layout.

    Args:
        layout: a layout of any shape.
        path: file to write.
        title: title of the picture.

    Raises:
        BlockSparseError: matplotlib or scipy is not installed, or the file cannot be written.
    """
    import_scipy_sparse()  # raises an error that says how to install scipy
    from scipy.stats import binom

    figure, axes = figure_and_axes((9.0, 3.6), columns=2, sharey=True)
    both = [counts.numpy() for counts in degrees(layout)]
    hubs = max(counts.max() / max(np.median(counts), 1) for counts in both) > LOG_FROM
    for axis, counts, others, name, color in zip(
        axes, both, layout.grid[::-1], ("outputs", "inputs"), COLORS, strict=False
    ):
        edges = bins(counts, log=hubs)
        heights = np.histogram(counts, edges)[0]
        axis.bar(edges[:-1], heights, np.diff(edges), align="edge", color=color, edgecolor="white", lw=0.4)
        chance = binom.cdf(np.ceil(edges) - 1, others, layout.density)
        axis.stairs(counts.size * np.diff(chance), edges, color="0.25", lw=1.2, ls="--", label="a random layout")
        if hubs:
            axis.set(xscale="log", yscale="log", ylim=(0.5, None))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_major_formatter("{x:g}")
        axis.axvline(counts.mean(), color="0.5", lw=1, ls=":", label=f"mean {counts.mean():.3g}")
        axis.set_xlabel(f"blocks of {'a row' if name == 'outputs' else 'a column'}")
        axis.set_title(
            f"{counts.size:,} blocks of {name}, degrees {counts.min()} to {counts.max()}", loc="left", size=10
        )
        axis.legend(frameon=False, fontsize=9)
    axes[0].set_ylabel("rows or columns")
    figure.suptitle(f"{title}, density {layout.density:.3g}", x=0.01, ha="left", size=11)
    save(figure, path)


def bins(counts: np.ndarray, log: bool = False) -> np.ndarray:
    """Return the edges of a histogram's bars: one per degree, or wider ones if there are many degrees.

    >>> bins(np.array([2, 3, 3, 5]))
    array([1.5, 2.5, 3.5, 4.5, 5.5])
    """
    low, high = int(counts.min()), int(counts.max())
    if log:
        return np.unique(np.round(np.geomspace(max(low, 1), high + 1, 13))) - 0.5
    width = -(-(high - low + 1) // MAX_BINS)
    return np.arange(low, high + width + 1, width) - 0.5
