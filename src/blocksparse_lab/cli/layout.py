"""`blocksparse layout`: draw and measure a pattern, or propose patterns for a budget."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from blocksparse.errors import BlockSparseError

from ..option import option
from .options import Given, parse_count, with_options
from .terminal import say, write

if TYPE_CHECKING:
    from blocksparse.layout import BlockLayout
    from blocksparse.topology.proposals import Proposals

PATTERNS = (
    "dense",
    "random",
    "constant_fan_in",
    "block_diagonal",
    "diagonals",
    "banded",
    "butterfly",
    "erdos_renyi",
    "watts_strogatz",
    "watts_strogatz_2d",
    "barabasi_albert",
)
DESIGN = "design"
EVOLUTION = "evolution"
PICTURES = ("matrix", "dense", "degrees", "spreading", "replacement")

# Larger graphs search paths from this many nodes only, so that drawing stays quick.
EXACT, SAMPLED = 8_000, 500


@dataclass(frozen=True)
class Options:
    """Options of patterns; each pattern accepts some."""

    density: float | None = option(None, "Fraction of the blocks that are stored.")
    neighbors: int | None = option(None, "Small world: neighbors of each node.")
    rewire: float | None = option(None, "Small world: fraction of rewired edges.")
    m: int | None = option(None, "Barabasi-Albert: edges of each new node.")
    epsilon: float | None = option(None, "Erdos-Renyi: scale of the density.")
    bandwidth: int | None = option(None, "Banded pattern: bandwidth in blocks.")
    seed: int | None = option(None, "Random seed.")


@dataclass(frozen=True)
class Budget:
    """Options of a design."""

    params: str | None = option(None, f"{DESIGN}: number of weights, such as 800k or 2.5M.")
    objective: str | None = option(None, f"{DESIGN}: rank by mixing, path, clustering, balance or time.")


@with_options
def layout(
    *,
    pattern: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(PATTERNS)}; or {DESIGN}, which proposes patterns; or {EVOLUTION}, which draws "
            "how sparse training changes layouts."
        ),
    ],
    features: Annotated[int | None, typer.Option(help="Features in and out.")] = None,
    shape: Annotated[str | None, typer.Option(help="OUT,IN instead, for patterns that may be rectangular.")] = None,
    block_size: Annotated[int, typer.Option(help="Rows and columns of a block.")] = 32,
    given: Annotated[dict[str, Any], Given(Options)],
    budget: Annotated[dict[str, Any], Given(Budget)],
    out: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    picture: Annotated[
        str | None,
        typer.Option(
            help=f"Content of --out, one of {', '.join(PICTURES)}: the matrix; the same next to a dense one; degrees; "
            "activity spreading from the middle (a GIF); sparse layers with the compute of a dense one."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to explore it: one file, for any browser.")] = None,
) -> None:
    """Draw a pattern, print its shape, density, degrees and graph measures, or design one for a budget."""
    if picture is not None and picture not in PICTURES:
        raise BlockSparseError.expected("--picture", f"one of {', '.join(PICTURES)}", repr(picture))
    if picture is not None and out is None:
        raise BlockSparseError.expected(f"--picture {picture}", "--out FILE, where it goes", "none")
    console = Console()
    if pattern == EVOLUTION:
        if out is None or html is not None or features is not None or shape is not None or picture or given or budget:
            raise BlockSparseError.expected(EVOLUTION, "--out FILE.png and nothing else", "other options or no file")
        evolution(console, out)
        return
    if pattern == DESIGN:
        proposals = propose(features, block_size, given, **budget)
        say(console, proposals.table(console.width))
        named = [(one.name, one.layout) for one in proposals]
        title = f"Layouts for {budget['params']} weights, {features} features"
    else:
        if budget:
            raise BlockSparseError.expected(f"--{next(iter(budget))}", f"the pattern {DESIGN}", pattern)
        title = f"{pattern}({', '.join(f'{key}={value}' for key, value in given.items())})" if given else pattern
        named = [(title, build(pattern, features, shape, block_size, given))]
        console.print(_table(pattern, named[0][1]))
    if out is not None:
        _draw(picture or "matrix", pattern, given, out, *named[0])
        say(console, f"wrote {out}")
    if html is not None:
        from .layout_page import Shown, render

        shown = [Shown(name, made, measures(made)) for name, made in named]
        text = "A layout says which blocks of a weight are stored; it is a graph, too."
        write(console, "html", html, render(title, text, shown))


def evolution(console: Console, out: Path) -> None:
    """Train sparse nets and draw how their connections diverge."""
    from blocksparse.topology.drawings import distance_map

    from ..recipes.evolution import evolve

    evolution = evolve()
    errors = ", ".join(f"{error:.1f} %" for error in evolution.errors)
    labels = [str(label) for label in evolution.trajectory.labels]
    title = f"Connections of nets in sparse evolutionary training, epochs 0 to {labels[-1]}; runs 1 and 2 begin equal"
    distance_map(evolution.trajectory.distances(), labels, out, title, evolution.runs)
    console.print(f"errors on digits that were held out: {errors}", highlight=False)
    say(console, f"wrote {out}")


def propose(
    features: int | None, block_size: int, options: dict[str, Any], params: str | None = None, objective: str = "mixing"
) -> Proposals:
    """Call `bs.topology.design` with the options of the command line."""
    from blocksparse import topology

    for name in options:
        if name != "seed":
            raise BlockSparseError.expected(f"--{name}", f"none: {DESIGN} chooses it", DESIGN)
    if features is None or params is None:
        both = {"--features": features, "--params": params}
        got = " ".join(f"{name} {value}" for name, value in both.items() if value is not None)
        raise BlockSparseError.expected(DESIGN, "--features N --params N", got or "neither")
    return topology.design(features, parse_count(params), block_size, objective, **options)


def build(
    pattern: str, features: int | None, shape: str | None, block_size: int, options: dict[str, Any]
) -> BlockLayout:
    """Build the layout of a named pattern from the options that it accepts.

    >>> build("block_diagonal", 128, None, 32, {})
    BlockLayout(shape=(128, 128), block_size=(32, 32), nnz=4, density=0.25)
    """
    from blocksparse import patterns

    if pattern not in PATTERNS:
        every = ", ".join([*PATTERNS, DESIGN, EVOLUTION])
        raise BlockSparseError.expected("pattern", f"one of {every}", repr(pattern))
    construct = getattr(patterns, pattern)
    takes = inspect.signature(construct).parameters
    for name in options:
        if name not in takes:
            known = [other for other in PATTERNS if name in inspect.signature(getattr(patterns, other)).parameters]
            raise BlockSparseError.expected(
                f"--{name}", f"one of the patterns that take it ({', '.join(known)})", pattern
            )
    if "features" in takes:
        if features is None or shape is not None:
            got = "none" if shape is None else f"--shape {shape}"
            raise BlockSparseError.expected("size", f"--features N ({pattern} is square)", got)
        return construct(features, block_size, **options)
    return construct(_shape(features, shape), block_size, **options)


def _shape(features: int | None, shape: str | None) -> tuple[int, int]:
    """Return (out, in) features from --features or --shape."""
    if (features is None) == (shape is None):
        raise BlockSparseError.expected("size", "--features N or --shape OUT,IN", "both" if shape else "neither")
    if features is not None:
        return features, features
    try:
        out_features, in_features = (int(part) for part in str(shape).split(","))
    except ValueError as error:
        raise BlockSparseError.expected("shape", "OUT,IN", repr(shape)) from error
    return out_features, in_features


def _table(pattern: str, layout: BlockLayout) -> Table:
    """Build the table of a layout's measures."""
    table = Table(title=pattern, box=None, show_header=False, title_style="bold", title_justify="left", pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for measure in measures(layout):
        table.add_row(*measure)
    return table


def measures(layout: BlockLayout) -> list[tuple[str, str]]:
    """Return names and values of a layout's measures, as the command shows them."""
    rows = np.bincount(layout.row_of_block, minlength=layout.grid[0])
    cols = np.bincount(layout.col_indices().numpy(), minlength=layout.grid[1])
    return [
        ("shape", f"{layout.shape[0]} x {layout.shape[1]} (out x in)"),
        ("grid", f"{layout.grid[0]} x {layout.grid[1]} blocks of {layout.block_shape[0]} x {layout.block_shape[1]}"),
        ("blocks", f"{layout.nnz:,} ({layout.nnz * layout.block_shape[0] * layout.block_shape[1]:,} weights)"),
        ("density", f"{layout.density:.4g}"),
        ("blocks per row", _degrees(rows)),
        ("blocks per column", _degrees(cols)),
        *_graph_measures(layout),
    ]


def sources(layout: BlockLayout) -> int | None:
    """Return the number of nodes from which to search paths; None for all."""
    return SAMPLED if sum(layout.grid) > EXACT else None


def _graph_measures(layout: BlockLayout) -> list[tuple[str, str]]:
    """Return names and values of the measures of a layout as a graph."""
    from blocksparse import topology

    some = sources(layout)
    try:
        summary = topology.summary(layout, sources=some)
    except BlockSparseError as error:
        return [("average path length", str(error).removesuffix(f": {layout!r}"))]
    try:
        length = f"{topology.average_path_length(layout, some):.2f}"
    except BlockSparseError as error:
        length = str(error).removesuffix(f": {layout!r}")
    least = "" if summary.exact else "at least "
    if not summary.exact:
        length += f" (standard error {summary.path_length_error:.2g}, from {some} blocks)"
    square = layout.grid[0] == layout.grid[1]
    never = "some blocks never reach some others" if square else "the layout is not square"
    return [
        ("average path length", length),
        ("longest path", "none" if summary.diameter is None else f"{least}{summary.diameter}"),
        ("steps to mix", never if summary.steps_to_mix is None else f"{least}{summary.steps_to_mix}"),
        ("clustering", f"{summary.clustering:.4g}"),
        ("spectral gap", f"{summary.spectral_gap:.4g}"),
        ("hub load", f"{summary.hub_load:.4g} (the fullest row or column / the mean)"),
    ]


def _degrees(counts: np.ndarray) -> str:
    empty = int((counts == 0).sum())
    return f"{counts.min()} to {counts.max()}, mean {counts.mean():.4g}{f', {empty} empty' if empty else ''}"


def _draw(picture: str, pattern: str, given: dict[str, Any], path: Path, title: str, layout: BlockLayout) -> None:
    """Write the requested picture."""
    from blocksparse.topology import drawings

    if picture == "replacement":
        _replacement(pattern, given, path, title, layout)
        return
    draw: dict[str, Callable[[BlockLayout, Path, str], object]] = {
        "matrix": drawings.matrix,
        "dense": drawings.dense_against_sparse,
        "degrees": drawings.degree_histogram,
        "spreading": drawings.spreading,
    }
    draw[picture](layout, path, title)


def _replacement(pattern: str, given: dict[str, Any], path: Path, title: str, layout: BlockLayout) -> None:
    """Draw sparse layers with the compute of a dense one."""
    from blocksparse import patterns
    from blocksparse.topology.drawings import Replacement, replacement

    if pattern == DESIGN:
        raise BlockSparseError.expected("--picture replacement", "a pattern", DESIGN)
    if layout.shape[0] != layout.shape[1]:
        raise BlockSparseError.expected("--picture replacement", "a square layout", repr(layout))
    takes = inspect.signature(getattr(patterns, pattern)).parameters

    def again(features: int, seed: int) -> BlockLayout:
        options = given | ({"seed": given.get("seed", 0) + seed} if "seed" in takes else {})
        return build(pattern, features, None, layout.block_shape[0], options)

    replacement(Replacement.of(again, layout.shape[0]), path, title)
