"""`blocksparse compare --topology`: layouts of runs, their measures and distances."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from blocksparse.errors import BlockSparseError

from .layout import measures, sources
from .terminal import say, table, write

if TYPE_CHECKING:
    from blocksparse.layout import BlockLayout
    from blocksparse.topology import Summary


def compare_topology(runs: list[Path], out: Path | None, json_file: Path | None, html: Path | None) -> None:
    """Print both tables; write a picture, the numbers and a page if requested."""
    from blocksparse import topology
    from blocksparse.topology import drawings

    from ..recipes import layouts
    from .layout_page import Distances, Shown, render

    nets = [layouts.read(run) for run in runs]
    layers = {f"{net.name}, {name}": layer.layout for net in nets for name, layer in net.layers.items()}
    layers = {
        name: layout for name, layout in layers.items() if layout.grid != (1, 1)
    }  # layouts with one block are trivial
    if not layers:
        raise BlockSparseError.expected("runs", "one with block-sparse weights", "only dense ones")
    summaries = {name: topology.summary(layout, sources=sources(layout)) for name, layout in layers.items()}
    distances, reasons = layouts.distances(nets)
    names = [net.name for net in nets]
    console = Console()
    console.print(_measures(layers, summaries))
    console.print()
    console.print(_distances(names, distances))
    for reason in reasons:
        say(console, f"not compared: {reason}", "dim")
    if json_file is not None:
        content = {
            "what": "layouts of training runs",
            "runs": names,
            "nnstd": distances,
            "not_compared": reasons,
            "layers": {name: one.as_dict() for name, one in summaries.items()},
        }
        write(console, "json", json_file, content)
    if html is not None:
        shown = [Shown(name, layout, measures(layout)) for name, layout in layers.items()]
        apart = Distances(names, distances, "; ".join(reasons))
        write(console, "html", html, render("Layouts of training runs", ", ".join(names), shown, apart))
    if out is not None:
        comparable = _comparable(distances)
        matrix = np.array([[distances[i][j] for j in comparable] for i in comparable], dtype=float).reshape(
            len(comparable), len(comparable)
        )
        drawings.distance_map(matrix, [names[i] for i in comparable], out, "Distances of training runs")
        say(console, f"wrote {out}")


def _comparable(distances: list[list[float | None]]) -> list[int]:
    """Return the runs that can be compared with all runs kept before them."""
    comparable: list[int] = []
    for i, row in enumerate(distances):
        if all(row[j] is not None for j in [*comparable, i]):
            comparable.append(i)
    return comparable


def _measures(layers: Mapping[str, BlockLayout], summaries: Mapping[str, Summary]) -> Table:
    """Build the table of each layout's measures."""
    made = table(("run, layer", "out x in", "density", "parts", "path", "mixes", "clustering", "hub load"))
    for name, layout in layers.items():
        one = summaries[name]
        numbers = (
            f"{layout.shape[0]} x {layout.shape[1]}",
            f"{layout.density:.3g}",
            f"{one.components}",
            "-" if one.path_length is None else f"{one.path_length:.2f}",
            "-" if one.steps_to_mix is None else f"{one.steps_to_mix}",
            f"{one.clustering:.3g}",
            f"{one.hub_load:.3g}",
        )
        made.add_row(name, *numbers)
    return made


def _distances(names: list[str], distances: list[list[float | None]]) -> Table:
    """Build the table of distances between runs."""
    shown = [["-" if value is None else f"{value:.3f}" for value in row] for row in distances]
    made = table(("NNSTD", *names), [(name, *row) for name, row in zip(names, shown, strict=True)])
    for column in made.columns:
        column.no_wrap = False  # names may be long
    return made
