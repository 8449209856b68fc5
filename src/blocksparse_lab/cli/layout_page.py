"""The page of `blocksparse layout --html`: one file with layouts to explore, their measures and distances.

The script `templates/layout.js` is embedded: the page loads nothing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blocksparse.layout import BlockLayout
from blocksparse.patterns.small_worlds import torus
from blocksparse.topology.degrees import degrees
from blocksparse.topology.drawings.degrees import bins
from blocksparse.topology.drawings.matrix import coarse

from . import page

# Most blocks that a browser draws quickly; larger layouts get cells of several blocks.
LARGEST, BLOCKS = 20_000, 400_000


@dataclass(frozen=True)
class Shown:
    """A layout on the page.

    Args:
        name: its title.
        layout: of any shape and size.
        measures: names and values; all layouts have the same names.
    """

    name: str
    layout: BlockLayout
    measures: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Distances:
    """Pairwise distances of nets.

    Args:
        names: of the nets.
        matrix: NNSTD, `[nets][nets]`; None for pairs that cannot be compared.
        note: why not, or "".
    """

    names: Sequence[str]
    matrix: Sequence[Sequence[float | None]]
    note: str = ""


def render(title: str, text: str, shown: Sequence[Shown], distances: Distances | None = None) -> str:
    """Render the whole page.

    Args:
        title: of the page.
        text: a sentence below the title.
        shown: one or more layouts.
        distances: between nets, if any.
    """
    from markupsafe import Markup

    # "<" in a name would end the element.
    packed = json.dumps([_packed(one) for one in shown], separators=(",", ":")).replace("<", "\\u003c")
    # Some measures are missing for some layouts: a net without paths has no mean path length.
    measures = {name: [dict(one.measures).get(name, "") for one in shown] for one in shown for name, _ in one.measures}
    return page.render(
        "layout.html",
        title=title,
        text=text,
        shown=[{"name": one.name, "degrees": _degrees(one.layout)} for one in shown],
        names=[one.name for one in shown],
        measures=list(measures.items()),
        distances=distances,
        packed=Markup(packed),
    )


def _packed(one: Shown) -> dict[str, Any]:
    """Return a layout as the page's script reads it."""
    layout = one.layout
    step = -(-max(layout.grid) // LARGEST)
    if layout.nnz > BLOCKS:  # cells of several blocks
        step = max(step, -(-max(layout.grid) // 512))
    rows, cols, counts, cells = coarse(layout, step)
    start = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=cells[0]))])
    square = layout.grid[0] == layout.grid[1]
    first = "torus" if "2d" in one.name else "hubs" if "barabasi" in one.name else "ring"
    return {
        "name": one.name,
        "shape": layout.shape,
        "grid": layout.grid,
        "block": layout.block_shape,
        "blocks": layout.nnz,
        "step": step,
        "cells": cells,
        "start": _base64(start),
        "cols": _base64(cols),
        "counts": _base64(counts) if step > 1 else None,
        "torus": torus(layout.grid[0]) if square else None,
        "positions_first": first if square else None,
    }


def _base64(numbers: np.ndarray) -> str:
    """Encode the size of a number, 2 or 4 bytes, and then all numbers."""
    size = 2 if numbers.max(initial=0) < 2**16 else 4
    return f"{size}{base64.b64encode(numbers.astype(f'<u{size}').tobytes()).decode()}"


def _degrees(layout: BlockLayout) -> Any:
    """Return histograms of the degrees of rows and columns."""
    figure, axes = page.axes_for_page((9.4, 2.8), columns=2)
    for one, counts, name in zip(axes, degrees(layout), ("row", "column"), strict=True):
        edges = bins(counts.numpy())
        one.bar(edges[:-1], np.histogram(counts.numpy(), edges)[0], np.diff(edges), align="edge", color=page.SPARSE)
        one.xaxis.get_major_locator().set_params(integer=True)
        one.set(xlabel=f"blocks of a {name}", ylabel=f"{name}s")
    return page.image(figure, "histograms of the blocks of a row and of a column")
