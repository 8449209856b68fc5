"""The page of `blocksparse layout --html`: one file with layouts to look into, their measures and distances.

Its script, `layout_page.js`, is ours and goes into the file: nothing is loaded, from this machine or another.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from blocksparse.layout import BlockLayout
from blocksparse.topology.degrees import degrees
from blocksparse.topology.drawings.degrees import bins
from blocksparse.topology.drawings.matrix import coarse
from blocksparse.topology.drawings.spreading import torus

from . import svg
from .page import STYLE

# The most blocks that a browser shows quickly; beyond, a cell stands for several blocks.
LARGEST, BLOCKS = 20_000, 400_000


@dataclass(frozen=True)
class Shown:
    """A layout on the page.

    Args:
        name: what it is, as the page writes it.
        layout: of any shape and size.
        measures: names and values, the same names for all.
    """

    name: str
    layout: BlockLayout
    measures: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Distances:
    """Pairwise distances of nets.

    Args:
        names: of the nets.
        matrix: NNSTD, `[nets][nets]`; None where two nets cannot be compared.
        note: why not, or nothing.
    """

    names: Sequence[str]
    matrix: Sequence[Sequence[float | None]]
    note: str = ""


def render(title: str, text: str, shown: Sequence[Shown], distances: Distances | None = None) -> str:
    """The whole page.

    Args:
        title: at its top.
        text: a sentence below it.
        shown: one layout or more.
        distances: of nets from each other, where there are some.
    """
    script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
    # "<" would end the element, whatever a layout is called.
    packed = json.dumps([_packed(one) for one in shown], separators=(",", ":")).replace("<", "\\u003c")
    options = "".join(f'<option value="{i}">{escape(one.name)}</option>' for i, one in enumerate(shown))
    degree = "".join(f'<div data-of="{i}"{" hidden" if i else ""}>{_degrees(one)}</div>' for i, one in enumerate(shown))
    apart = "" if distances is None else _distances(distances)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}{_STYLE}</style></head>
<body><main>
<header><h1>{escape(title)}</h1><p>{escape(text)}</p></header>
<section class="look">
<div class="bar">
<label>Layout <select id="which">{options}</select></label>
<span class="group"><button id="matrix" aria-pressed="true">Matrix</button><button id="graph">Graph</button></span>
<span class="group"><button id="closer" aria-label="zoom in">+</button><button id="farther"
 aria-label="zoom out">&minus;</button><button id="fit">Fit</button></span>
<select id="positions" aria-label="where nodes are placed"><option value="ring">on a ring</option>
<option value="torus">on a torus</option><option value="hubs">hubs inside</option>
<option value="columns">in columns</option></select>
<button id="spread">Spread from the middle</button>
</div>
<div class="stage"><canvas id="canvas" tabindex="0" role="img"></canvas><div id="tip" hidden></div></div>
<p id="status" role="status" aria-live="polite"></p>
</section>
<section><h2>Measures</h2><div class="scroll">{_measures(shown)}</div></section>
<section><h2>Degrees</h2><p>How many blocks each block of outputs (row) and of inputs (column) has.</p>
{degree}</section>
{apart}
<noscript><p class="note">The matrix and the graph need JavaScript.</p></noscript>
</main>
<script type="application/json" id="layouts">{packed}</script>
<script>{script}</script>
</body></html>
"""


def _packed(one: Shown) -> dict[str, Any]:
    layout = one.layout
    step = -(-max(layout.grid) // LARGEST)
    if layout.nnz > BLOCKS:  # so few cells that all of them may be full
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
    """The bytes of each, 2 or 4, and then all."""
    size = 2 if numbers.max(initial=0) < 2**16 else 4
    return f"{size}{base64.b64encode(numbers.astype(f'<u{size}').tobytes()).decode()}"


def _measures(shown: Sequence[Shown]) -> str:
    head = "".join(f"<th>{escape(one.name)}</th>" for one in shown) if len(shown) > 1 else ""
    top = f"<thead><tr><th></th>{head}</tr></thead>" if head else ""
    # Not all have all: a net without paths has no mean path length.
    names = list(dict.fromkeys(name for one in shown for name, _ in one.measures))
    values = [dict(one.measures) for one in shown]
    body = "".join(
        f"<tr><th>{escape(name)}</th>" + "".join(f"<td>{escape(of.get(name, ''))}</td>" for of in values) + "</tr>"
        for name in names
    )
    return f"<table>{top}<tbody>{body}</tbody></table>"


def _degrees(one: Shown) -> str:
    figures = []
    for counts, name in zip(degrees(one.layout), ("row", "column"), strict=True):
        edges = bins(counts.numpy())
        heights = np.histogram(counts.numpy(), edges)[0]
        bars = svg.bars(edges.tolist(), heights.tolist(), f"blocks of a {name}", f"{name}s", "sparse")
        figures.append(f"<figure>{bars}</figure>")
    return f'<div class="pair">{"".join(figures)}</div>'


def _distances(found: Distances) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in found.names)
    rows = ""
    for name, row in zip(found.names, found.matrix, strict=True):
        cells = "".join(
            f'<td style="--far:{value:.2f}">{value:.3f}</td>' if value is not None else "<td>-</td>" for value in row
        )
        rows += f"<tr><th>{escape(name)}</th>{cells}</tr>"
    note = f'<p class="note">{escape(found.note)}</p>' if found.note else ""
    return (
        "<section><h2>Distances</h2><p>NNSTD of the nets: 0 where the connections are the same, 1 where none are. "
        f'Neurons are matched first.</p><div class="scroll"><table class="far"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}</section>"
    )


_STYLE = """
.look { margin-top: 24px; }
.bar { display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: center; margin-bottom: 10px; }
.bar label { color: var(--soft); font-size: 14px; }
button, select { font: inherit; font-size: 14px; color: var(--ink); background: var(--tint);
  border: 1px solid var(--line); border-radius: 7px; padding: 5px 12px; max-width: 100%; }
button { cursor: pointer; }
button:hover:enabled, select:hover { border-color: var(--soft); }
button:disabled { color: var(--soft); cursor: not-allowed; opacity: .6; }
button[aria-pressed="true"] { background: var(--sparse); border-color: var(--sparse); color: var(--paper); }
:is(button, select, canvas):focus-visible { outline: 2px solid var(--dense); outline-offset: 2px; }
.group { display: inline-flex; }
.group button { border-radius: 0; margin-left: -1px; }
.group button:first-child { border-radius: 7px 0 0 7px; margin-left: 0; }
.group button:last-child { border-radius: 0 7px 7px 0; }
.stage { position: relative; height: min(72vh, 640px, 100vw); border: 1px solid var(--line); border-radius: 10px;
  overflow: hidden; }
canvas { width: 100%; height: 100%; display: block; touch-action: none; cursor: crosshair; }
#tip { position: absolute; pointer-events: none; background: var(--ink); color: var(--paper); border-radius: 7px;
  padding: 6px 10px; font-size: 13px; line-height: 1.4; white-space: pre-line; max-width: 380px; }
#status { color: var(--soft); font-size: 14px; min-height: 1.6em; margin: 6px 0 0; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
.scroll td { white-space: normal; min-width: 6em; }
.far td { text-align: right; background: color-mix(in srgb, var(--sparse) calc(var(--far, 0) * 45%), transparent); }
.far th, .far td { padding: 6px 14px; }
[hidden] { display: none !important; }
"""
