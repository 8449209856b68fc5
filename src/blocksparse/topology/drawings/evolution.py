"""A picture of the distances between networks: as a map, a tree and points in the plane."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BlockSparseError
from ..trajectory import embedding, linkage
from .style import COLORS, figure_and_axes, save

MAX_NAMED_LEAVES = 40  # more names would overlap


def distance_map(
    distances: np.ndarray, labels: Sequence[str], path: str | Path, title: str, groups: Sequence[str] | None = None
) -> None:
    """Draw a PNG of the sparse topology distances between networks.

    Args:
        distances: `[nets, nets]`, see `topology.distances`.
        labels: a short name for each network.
        path: file to write.
        title: title of the picture.
        groups: group of each network; a line joins the networks of a group in order. By default each is on its own.

    Raises:
        BlockSparseError: fewer than three networks; not one label for each; matplotlib or scipy is not installed; the
            file cannot be written.
    """
    count = len(distances)
    if count < 3:
        raise BlockSparseError.expected("nets", "three or more to draw", str(count))
    groups = list(labels if groups is None else groups)
    for name, given in (("labels", labels), ("groups", groups)):
        if len(given) != count:
            raise BlockSparseError.expected(name, f"{count}, one for each net", len(given))
    names = list(dict.fromkeys(groups))
    color = {name: COLORS[nth % len(COLORS)] for nth, name in enumerate(names)}
    figure, axes = figure_and_axes((12.6, 4.4), columns=3, width_ratios=(1.15, 1.1, 1))
    _map(figure, axes[0], distances, labels, groups)
    _tree(axes[1], distances, labels, [color[name] for name in groups])
    points = embedding(distances)
    for name in names:
        members = [i for i in range(count) if groups[i] == name]
        axes[2].plot(*points[members].T, "-o", color=color[name], lw=1.2, ms=4, label=name)
        if len(members) > 1:
            axes[2].plot(*points[members[0]], "o", mfc="white", mec=color[name], ms=7)
            for at in (members[0], members[-1]):
                style = {"xytext": (5, 5), "textcoords": "offset points"}
                axes[2].annotate(labels[at], points[at], size=8, color=color[name], **style)
    axes[2].set(xlabel="classical scaling, 1st axis", ylabel="2nd axis")
    axes[2].margins(0.14)
    axes[2].set_aspect("equal", adjustable="datalim")
    axes[2].grid(color="0.92", lw=0.8)
    axes[2].set_axisbelow(True)
    axes[2].set_title("distances in the plane", loc="left", size=10)
    axes[2].legend(frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", size=11)
    save(figure, path, dpi=110)


def _map(figure: Any, axes: Any, distances: np.ndarray, labels: Sequence[str], groups: Sequence[str]) -> None:
    """Draw the distances as an image with lines between groups."""
    image = axes.imshow(distances, cmap="viridis", vmin=0)
    figure.colorbar(image, ax=axes, shrink=0.8, label="NNSTD")
    starts = [i for i in range(len(groups)) if i == 0 or groups[i] != groups[i - 1]]
    for edge in starts[1:] if len(starts) < len(groups) else []:
        axes.axhline(edge - 0.5, color="white", lw=1)
        axes.axvline(edge - 0.5, color="white", lw=1)
    shown = [groups[i] for i in starts]
    ends = [*starts[1:], len(groups)]
    middles = [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]
    axes.set_yticks(middles, shown, fontsize=8)
    axes.set_xticks(middles, shown, fontsize=8, rotation=0 if len(shown) < 4 else 60)
    axes.set_title("distance of each pair", loc="left", size=10)


def _tree(axes: Any, distances: np.ndarray, labels: Sequence[str], colors: Sequence[str]) -> None:
    """Draw the tree of the networks, with names in the colors of their groups."""
    from scipy.cluster import hierarchy

    unnamed, tree = len(labels) > MAX_NAMED_LEAVES, linkage(distances)
    hierarchy.dendrogram(
        tree,
        ax=axes,
        labels=list(labels),
        no_labels=unnamed,
        color_threshold=0,
        above_threshold_color="0.35",
    )
    order = hierarchy.leaves_list(tree)
    for text, leaf in zip(axes.get_xticklabels(), order, strict=False):
        text.set(color=colors[leaf], rotation=90, fontsize=7)
    axes.set_ylabel("NNSTD, mean of the joined")
    axes.set_title("joined, the nearest first", loc="left", size=10)
