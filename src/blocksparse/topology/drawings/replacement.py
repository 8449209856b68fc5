"""A picture of sparse replacements of a dense layer at equal compute: one wide layer, or several deep ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..graph import matrix_of
from ..summary import summary
from .matrix import show
from .style import COLORS, figure_and_axes, save

MAX_DRAWN_LAYERS = 6

# In inches: the largest picture, the width of texts, the gap between pictures, and the margins above and below.
MAX_PICTURE, TEXT_WIDTH, GAP, ABOVE, BELOW = 3.6, 2.45, 0.45, 0.4, 0.75


@dataclass(frozen=True)
class Replacement:
    """A dense layer and sparse layers of the same cost; see `of`."""

    features: int
    """Features of the dense layer and of each deep one."""
    wide: BlockLayout
    deep: tuple[BlockLayout, ...]

    @classmethod
    def of(cls, build: Callable[[int, int], BlockLayout], features: int) -> Replacement:
        """Find the dense layer with the same number of weights as a wide layout, and deep layers of the same cost.

        Args:
            build: function of (features, seed) that returns a layout.
            features: features of the wide layout.

        Raises:
            BlockSparseError: a layout that is not square, or stores no or all blocks; errors of `build`.

        >>> import blocksparse as bs
        >>> from blocksparse.topology.drawings import Replacement
        >>> def ring(features, seed):
        ...     return bs.patterns.watts_strogatz(features, block_size=16, neighbors=8, seed=seed)
        >>> found = Replacement.of(ring, 2304)
        >>> found.features, len(found.deep), found.dense_weights, found.wide_weights, found.deep_weights
        (576, 4, 331776, 331776, 331776)
        """
        wide = build(features, 0)
        if wide.grid[0] != wide.grid[1] or wide.density == 1 or not wide.nnz:
            raise BlockSparseError.expected("layout", "a square one that stores some of its blocks", repr(wide))
        block = wide.block_shape[0]
        narrow = round(math.sqrt(wide.nnz)) * block
        layers = max(round(wide.nnz / build(narrow, 0).nnz), 1)
        return cls(narrow, wide, tuple(build(narrow, seed) for seed in range(layers)))

    @property
    def dense_weights(self) -> int:
        """Weights of the dense layer."""
        return self.features**2

    @property
    def wide_weights(self) -> int:
        """Weights of the wide layer."""
        return math.prod(self.wide.values_shape)

    @property
    def deep_weights(self) -> int:
        """Weights of all deep layers."""
        return sum(math.prod(layout.values_shape) for layout in self.deep)


def replacement(of: Replacement, path: str | Path, title: str) -> None:
    """Draw a PNG of the three to scale, with their numbers of weights and how far inputs reach.

    Args:
        of: the layers to draw.
        path: file to write.
        title: name of the pattern.

    Raises:
        BlockSparseError: matplotlib or scipy is not installed, or the file cannot be written.
    """
    deep = of.deep[:MAX_DRAWN_LAYERS]
    # Deep layers are drawn in several rows, so that they fill about the area of the wide one.
    columns = math.ceil(math.sqrt(len(deep)))
    rows = math.ceil(len(deep) / columns)
    # All lengths are in inches.
    scale = min(MAX_PICTURE / of.wide.shape[0], MAX_PICTURE / (max(columns, rows) * of.features * 1.3))
    side, wide = of.features * scale, of.wide.shape[0] * scale
    step = side + 0.3
    texts = _texts(of)
    sides = (side, wide, columns * step - 0.3)
    widths = [max(side, TEXT_WIDTH) for side in sides]
    tallest = max(wide, rows * step - 0.3)
    width, height = sum(widths) + 2 * GAP, tallest + ABOVE + BELOW
    figure, axes = figure_and_axes((width + 0.3, height + 0.45))
    axes.set(xlim=(0, width), ylim=(tallest + BELOW, -ABOVE), aspect="equal")
    axes.axis("off")
    left = 0.0
    for (name, lines), room in zip(texts, widths, strict=True):
        axes.text(left, -0.12, name, size=11, weight="bold", va="bottom", color="0.1")
        axes.text(left, tallest + 0.12, "\n".join(lines), size=9.5, va="top", color="0.25", linespacing=1.45)
        left += room + GAP
    _draw_weight(axes, None, 0, 0, side)
    _draw_weight(axes, of.wide, widths[0] + GAP, 0, wide)
    for i, layout in enumerate(deep):
        down, right = divmod(i, columns)
        x, y = left - widths[2] - GAP + right * step, down * step
        _draw_weight(axes, layout, x, y, side)
        if right:
            style = {"arrowstyle": "->", "color": "0.3", "lw": 1.3, "shrinkA": 2, "shrinkB": 2}
            axes.annotate("", (x, y + side / 2), (x - 0.3, y + side / 2), arrowprops=style)
    figure.suptitle(f"A dense layer, and two of {title} at equal multiply-adds", x=0.02, ha="left", size=12)
    save(figure, path)


def _draw_weight(axes: Any, layout: BlockLayout | None, x: float, y: float, side: float) -> None:
    """Draw a layout, or a full square if None, at a position with this side."""
    from matplotlib.patches import Rectangle

    if layout is None:
        axes.add_patch(Rectangle((x, y), side, side, color=COLORS[1], lw=0))
        return
    inset = axes.inset_axes([x, y, side, side], transform=axes.transData)
    show(inset, layout, layout.grid[::-1])
    inset.set(xticks=[], yticks=[], aspect="auto")


def _texts(comparison: Replacement) -> list[tuple[str, list[str]]]:
    """Return name and description of the three."""
    found = summary(comparison.wide)
    mixes = "some inputs never reach some outputs" if found.steps_to_mix is None else f"mixes in {found.steps_to_mix}"
    length = "" if found.path_length is None else f"mean path {found.path_length:.2f}, "
    layers = len(comparison.deep)
    more = f", {MAX_DRAWN_LAYERS} drawn" if layers > MAX_DRAWN_LAYERS else ""
    return [
        (
            "dense",
            [
                f"{comparison.features:,} features",
                f"{comparison.dense_weights:,} weights",
                "all inputs reach all outputs",
            ],
        ),
        (
            f"sparse and wide, {comparison.wide.shape[0] / comparison.features:.3g} times",
            [
                f"{comparison.wide.shape[0]:,} features, density {comparison.wide.density:.3g}",
                f"{comparison.wide_weights:,} weights{_percent_difference(comparison.wide_weights, comparison)}",
                f"{length}{mixes} steps" if found.steps_to_mix else f"{length}{mixes}",
            ],
        ),
        (
            f"sparse and deep, {layers} layer{'s' if layers > 1 else ''}{more}",
            [
                f"{comparison.features:,} features, density {comparison.deep[0].density:.3g}",
                f"{comparison.deep_weights:,} weights{_percent_difference(comparison.deep_weights, comparison)}",
                f"{100 * reach(comparison.deep):.3g} % of inputs and outputs meet",
            ],
        ),
    ]


def _percent_difference(weights: int, comparison: Replacement) -> str:
    """Return how many percent more weights this is than the dense layer's, as text."""
    more = weights / comparison.dense_weights - 1
    return "" if abs(more) < 0.005 else f" ({more:+.0%})"


def reach(layouts: Sequence[BlockLayout]) -> float:
    """Return the fraction of pairs of an input of the first layer and an output of the last that are connected.

    Args:
        layouts: layouts of layers that feed each other, the first one first.

    >>> import blocksparse as bs
    >>> shift = bs.BlockLayout([[1, 1, 0], [0, 1, 1], [1, 0, 1]], block_size=4)
    >>> round(reach([shift]), 3), reach([shift, shift])
    (0.667, 1.0)
    """
    reached = None
    for layout in layouts:
        reached = matrix_of(layout) if reached is None else matrix_of(layout) @ reached
        reached.data[:] = 1  # connected or not, not the number of paths
    return 0.0 if reached is None else reached.nnz / math.prod(reached.shape)
