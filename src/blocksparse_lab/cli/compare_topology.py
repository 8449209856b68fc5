"""`blocksparse compare --topology`: the layouts of runs, their measures, and how far they are from each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from blocksparse.errors import BlockSparseError

from .layout import measures, sources, write

if TYPE_CHECKING:
    from blocksparse.layout import BlockLayout
    from blocksparse.topology import Summary


def compare_topology(runs: list[Path], out: Path | None, json_file: Path | None, html: Path | None) -> None:
    """Prints both tables; writes a picture, the numbers and a page if requested."""
    from blocksparse import topology
    from blocksparse.topology import drawings

    from ..recipes import layouts
    from .layout_page import Distances, Shown, render

    nets = [layouts.read(run) for run in runs]
    layers = {f"{net.name}, {name}": layer.layout for net in nets for name, layer in net.layers.items()}
    if not layers:
        raise BlockSparseError.expected("runs", "one with block-sparse weights", "only dense ones")
    found = {name: topology.summary(layout, sources=sources(layout)) for name, layout in layers.items()}
    distances, reasons = layouts.distances(nets)
    names = [net.name for net in nets]
    console = Console()
    console.print(_measures(layers, found))
    console.print()
    console.print(_distances(names, distances))
    for reason in reasons:
        console.print(f"not compared: {reason}", style="dim", markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        content = {
            "what": "layouts of training runs",
            "runs": names,
            "nnstd": distances,
            "not_compared": reasons,
            "layers": {name: one.as_dict() for name, one in found.items()},
        }
        write("json", json_file, json.dumps(content, indent=1) + "\n")
        console.print(f"wrote {json_file}", highlight=False, soft_wrap=True)
    if html is not None:
        shown = [Shown(name, layout, measures(layout)) for name, layout in layers.items()]
        apart = Distances(names, distances, "; ".join(reasons))
        write("html", html, render("Layouts of training runs", ", ".join(names), shown, apart))
        console.print(f"wrote {html}", highlight=False, soft_wrap=True)
    if out is not None:
        kept = _comparable(distances)
        matrix = np.array([[distances[i][j] for j in kept] for i in kept], dtype=float).reshape(len(kept), len(kept))
        drawings.distance_map(matrix, [names[i] for i in kept], out, "Distances of training runs")
        console.print(f"wrote {out}", highlight=False, soft_wrap=True)


def _comparable(distances: list[list[float | None]]) -> list[int]:
    """The runs that can be compared with all those kept before them."""
    kept: list[int] = []
    for i, row in enumerate(distances):
        if all(row[j] is not None for j in [*kept, i]):
            kept.append(i)
    return kept


def _measures(layers: Mapping[str, BlockLayout], found: Mapping[str, Summary]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    table.add_column("run, layer", overflow="fold")
    for name in ("out x in", "density", "parts", "path", "mixes", "clustering", "hub load"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, layout in layers.items():
        one = found[name]
        path = "-" if one.path_length is None else f"{one.path_length:.2f}"
        mixes = "-" if one.steps_to_mix is None else str(one.steps_to_mix)
        shape = f"{layout.shape[0]} x {layout.shape[1]}"
        last = f"{one.clustering:.3g}", f"{one.hub_load:.3g}"
        table.add_row(name, shape, f"{layout.density:.3g}", str(one.components), path, mixes, *last)
    return table


def _distances(names: list[str], distances: list[list[float | None]]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    table.add_column("NNSTD")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for name, row in zip(names, distances, strict=True):
        table.add_row(name, *("-" if value is None else f"{value:.3f}" for value in row))
    return table
