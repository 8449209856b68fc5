"""What takes the place of a dense layer at equal compute: one layer sparse and wide, or several sparse and deep."""

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

DRAWN = 6  # layers of the deep one, at most

# In inches: of the widest picture, of the room that words need, between the three, and above and below them.
LARGEST, WORDS, APART, ABOVE, BELOW = 3.6, 2.45, 0.45, 0.4, 0.75


@dataclass(frozen=True)
class Replacement:
    """A dense layer of `features` and what can take its place; see `of`."""

    features: int
    """Of the dense layer, and of each deep one."""
    wide: BlockLayout
    deep: tuple[BlockLayout, ...]

    @classmethod
    def of(cls, build: Callable[[int, int], BlockLayout], features: int) -> Replacement:
        """Makes the dense layer with as many weights as a wide layout, and the deep sparse layers of the same cost.

        Args:
            build: makes the layout for a number of features and a seed.
            features: of the wide one.

        Raises:
            BlockSparseError: a layout that is not square, or one that is full already; as `build`.

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
        return self.features**2

    @property
    def wide_weights(self) -> int:
        return math.prod(self.wide.values_shape)

    @property
    def deep_weights(self) -> int:
        return sum(math.prod(layout.values_shape) for layout in self.deep)


def replacement(of: Replacement, path: str | Path, title: str) -> None:
    """A PNG of the three to scale, with their weights and how far what goes in reaches.

    Args:
        of: what to draw.
        path: of the file.
        title: the name of the pattern.

    Raises:
        BlockSparseError: matplotlib or scipy is not installed, or the file cannot be written.
    """
    deep = of.deep[:DRAWN]
    # The deep ones in rows, so that they take about the room of the wide one.
    columns = math.ceil(math.sqrt(len(deep)))
    rows = math.ceil(len(deep) / columns)
    # All in inches: words and pictures share the room.
    scale = min(LARGEST / of.wide.shape[0], LARGEST / (max(columns, rows) * of.features * 1.3))
    side, wide = of.features * scale, of.wide.shape[0] * scale
    step = side + 0.3
    words = _words(of)
    sides = (side, wide, columns * step - 0.3)
    widths = [max(room, WORDS) for room in sides]
    tallest = max(wide, rows * step - 0.3)
    width, height = sum(widths) + 2 * APART, tallest + ABOVE + BELOW
    figure, axes = figure_and_axes((width + 0.3, height + 0.45))
    axes.set(xlim=(0, width), ylim=(tallest + BELOW, -ABOVE), aspect="equal")
    axes.axis("off")
    left = 0.0
    for (name, lines), room in zip(words, widths, strict=True):
        axes.text(left, -0.12, name, size=11, weight="bold", va="bottom", color="0.1")
        axes.text(left, tallest + 0.12, "\n".join(lines), size=9.5, va="top", color="0.25", linespacing=1.45)
        left += room + APART
    _weight(axes, None, 0, 0, side)
    _weight(axes, of.wide, widths[0] + APART, 0, wide)
    for i, layout in enumerate(deep):
        down, right = divmod(i, columns)
        x, y = left - widths[2] - APART + right * step, down * step
        _weight(axes, layout, x, y, side)
        if right:
            style = {"arrowstyle": "->", "color": "0.3", "lw": 1.3, "shrinkA": 2, "shrinkB": 2}
            axes.annotate("", (x, y + side / 2), (x - 0.3, y + side / 2), arrowprops=style)
    figure.suptitle(f"A dense layer, and two of {title} at equal multiply-adds", x=0.02, ha="left", size=12)
    save(figure, path)


def _weight(axes: Any, layout: BlockLayout | None, x: float, y: float, side: float) -> None:
    from matplotlib.patches import Rectangle

    if layout is None:
        axes.add_patch(Rectangle((x, y), side, side, color=COLORS[1], lw=0))
        return
    inset = axes.inset_axes([x, y, side, side], transform=axes.transData)
    show(inset, layout, layout.grid[::-1])
    inset.set(xticks=[], yticks=[], aspect="auto")


def _words(of: Replacement) -> list[tuple[str, list[str]]]:
    found = summary(of.wide)
    mixes = "some inputs never reach some outputs" if found.steps_to_mix is None else f"mixes in {found.steps_to_mix}"
    length = "" if found.path_length is None else f"mean path {found.path_length:.2f}, "
    layers = len(of.deep)
    more = f", {DRAWN} drawn" if layers > DRAWN else ""
    return [
        (
            "dense",
            [f"{of.features:,} features", f"{of.dense_weights:,} weights", "all inputs reach all outputs"],
        ),
        (
            f"sparse and wide, {of.wide.shape[0] / of.features:.3g} times",
            [
                f"{of.wide.shape[0]:,} features, density {of.wide.density:.3g}",
                f"{of.wide_weights:,} weights{_beside(of.wide_weights, of)}",
                f"{length}{mixes} steps" if found.steps_to_mix else f"{length}{mixes}",
            ],
        ),
        (
            f"sparse and deep, {layers} layer{'s' if layers > 1 else ''}{more}",
            [
                f"{of.features:,} features, density {of.deep[0].density:.3g}",
                f"{of.deep_weights:,} weights{_beside(of.deep_weights, of)}",
                f"{100 * reach(of.deep):.3g} % of inputs and outputs meet",
            ],
        ),
    ]


def _beside(weights: int, of: Replacement) -> str:
    more = weights / of.dense_weights - 1
    return "" if abs(more) < 0.005 else f" ({more:+.0%})"


def reach(layouts: Sequence[BlockLayout]) -> float:
    """Of all pairs of a first layer's inputs and a last layer's outputs, the part that is connected.

    Args:
        layouts: of layers that feed each other, the first one first.

    >>> import blocksparse as bs
    >>> shift = bs.BlockLayout([[1, 1, 0], [0, 1, 1], [1, 0, 1]], block_size=4)
    >>> round(reach([shift]), 3), reach([shift, shift])
    (0.667, 1.0)
    """
    reached = None
    for layout in layouts:
        reached = matrix_of(layout) if reached is None else matrix_of(layout) @ reached
        reached.data[:] = 1  # whether, not in how many ways
    return 0.0 if reached is None else reached.nnz / math.prod(reached.shape)
