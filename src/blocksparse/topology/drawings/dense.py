"""A picture of a dense weight next to a block-sparse one with the same number of weights."""

from __future__ import annotations

import math
from pathlib import Path

from ... import patterns
from ...errors import BlockSparseError
from ...layout import BlockLayout
from .matrix import show
from .style import figure_and_axes, save


def dense_against_sparse(layout: BlockLayout, path: str | Path, title: str) -> None:
    """Draw a PNG of a layout and of a dense weight with the same number of weights, both to scale.

    Args:
        layout: a layout of any shape, with at least one block.
        path: file to write.
        title: name of the layout.

    Raises:
        BlockSparseError: a layout without blocks, matplotlib is not installed, or the file cannot be written.
    """
    weights = math.prod(layout.values_shape)
    if not weights:
        raise BlockSparseError.expected("layout", "one that stores a block", repr(layout))
    side = max(round(math.sqrt(weights)), 1)
    rows, cols = layout.shape
    # At least an eighth of the other's width, so that it is visible.
    ratios = [max(side, cols / 8), cols]
    tallest = max(rows, side)
    height = min(max(8.4 * tallest / sum(ratios), 2.0), 7.0)
    figure, axes = figure_and_axes((9.0, height + 0.9), columns=2, width_ratios=ratios)
    from matplotlib.patches import Rectangle

    for axis, drawn, shape in (
        (axes[0], patterns.dense((1, 1), 1), (side, side)),
        (axes[1], layout, (rows, cols)),
    ):
        show(axis, drawn, shape[::-1])
        axis.set_ylim(tallest, 0)
        axis.set_anchor("NW")
        axis.spines[["top", "right", "bottom", "left"]].set_visible(False)
        axis.set(xticks=[], yticks=[])
    axes[1].add_patch(Rectangle((0, 0), cols, rows, fill=False, edgecolor="0.6", lw=0.8, clip_on=False))
    axes[0].set_title(f"dense\n{side:,} x {side:,}", loc="left", size=10)
    axes[1].set_title(f"{title}, density {layout.density:.3g}\n{rows:,} x {cols:,}", loc="left", size=10)
    note = f"To scale, in features. Weights, and multiply-adds per product: {side * side:,} and {weights:,}."
    figure.supxlabel(note, size=9, color="0.35", x=0.01, ha="left")
    save(figure, path)
