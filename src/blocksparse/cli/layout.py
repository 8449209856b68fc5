"""`blocksparse layout`: a pattern as a picture, with its measures; or patterns proposed for a budget."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ..errors import BlockSparseError

if TYPE_CHECKING:
    from ..layout import BlockLayout
    from ..topology.design import Proposals

PATTERNS = (
    "dense",
    "random",
    "block_diagonal",
    "banded",
    "butterfly",
    "erdos_renyi",
    "watts_strogatz",
    "watts_strogatz_2d",
    "barabasi_albert",
)
DESIGN = "design"

# A grid of more blocks than this to a side is drawn in cells of several blocks, as dark as they are full.
LARGEST_PICTURE = 512

# Of a graph of more blocks of features, paths are searched from so many: one does not care to wait for a drawing.
EXACT, SAMPLED = 8_000, 500


def layout(
    pattern: Annotated[str, typer.Argument(help=f"One of {', '.join(PATTERNS)}; or {DESIGN}, which proposes some.")],
    features: Annotated[int | None, typer.Option(help="Features in and out.")] = None,
    shape: Annotated[str | None, typer.Option(help="OUT,IN instead, for patterns that need not be square.")] = None,
    block_size: Annotated[int, typer.Option(help="Rows and columns of a block.")] = 32,
    density: Annotated[float | None, typer.Option(help="Part of the blocks that is stored.")] = None,
    neighbors: Annotated[int | None, typer.Option(help="Of each node of a small world.")] = None,
    rewire: Annotated[float | None, typer.Option(help="Part of the edges of a small world drawn anew.")] = None,
    m: Annotated[int | None, typer.Option(help="Edges that each new node of Barabasi-Albert brings.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Erdos-Renyi's scale of density.")] = None,
    bandwidth: Annotated[int | None, typer.Option(help="Of a banded pattern, in blocks.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of what is drawn at random.")] = None,
    params: Annotated[str | None, typer.Option(help=f"Of {DESIGN}: so many weights, as 800k or 2.5M.")] = None,
    objective: Annotated[
        str | None, typer.Option(help=f"Of {DESIGN}, what comes first: mixing, path, clustering, balance or time.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The PNG; without it only the numbers are printed.")] = None,
) -> None:
    """Draw a pattern as a PNG; print its shape, density, degrees and graph measures. Or design one for a budget."""
    options = {
        "density": density,
        "neighbors": neighbors,
        "rewire": rewire,
        "m": m,
        "epsilon": epsilon,
        "bandwidth": bandwidth,
        "seed": seed,
    }
    given = {k: v for k, v in options.items() if v is not None}
    budget = {k: v for k, v in {"params": params, "objective": objective}.items() if v is not None}
    console = Console()
    if pattern == DESIGN:
        proposals = propose(features, block_size, given, **budget)
        console.print(str(proposals), highlight=False, markup=False, soft_wrap=True)
        pattern, made = proposals[0].name, proposals[0].layout
    else:
        if budget:
            raise BlockSparseError.expected(f"--{next(iter(budget))}", f"the pattern {DESIGN}", pattern)
        made = build(pattern, features, shape, block_size, given)
        console.print(_measures(pattern, made))
    if out is not None:
        draw(made, out, title=pattern)
        console.print(f"wrote {out}", highlight=False, soft_wrap=True)


def propose(
    features: int | None, block_size: int, options: dict[str, Any], params: str | None = None, objective: str = "mixing"
) -> Proposals:
    """What `bs.patterns.design` proposes, of the options of the command line."""
    from .. import patterns
    from .train import parse_count

    for name in options:
        if name != "seed":
            raise BlockSparseError.expected(f"--{name}", f"none: {DESIGN} chooses it", DESIGN)
    if features is None or params is None:
        got = f"--features {features} --params {params}"
        raise BlockSparseError.expected(DESIGN, "--features N --params N", got)
    return patterns.design(features, parse_count(params), block_size, objective, **options)


def build(
    pattern: str, features: int | None, shape: str | None, block_size: int, options: dict[str, Any]
) -> BlockLayout:
    """The layout of a pattern by its name, with the options that this pattern takes.

    >>> build("block_diagonal", 128, None, 32, {})
    BlockLayout(shape=(128, 128), block_size=(32, 32), nnz=4, density=0.25)
    """
    from .. import patterns

    if pattern not in PATTERNS:
        raise BlockSparseError.expected("pattern", f"one of {', '.join(PATTERNS)}", repr(pattern))
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
            raise BlockSparseError.expected("size", f"--features N ({pattern} is square)", f"--shape {shape}")
        return construct(features, block_size, **options)
    return construct(_shape(features, shape), block_size, **options)


def _shape(features: int | None, shape: str | None) -> tuple[int, int]:
    if (features is None) == (shape is None):
        raise BlockSparseError.expected("size", "--features N or --shape OUT,IN", "both" if shape else "neither")
    if features is not None:
        return features, features
    try:
        out_features, in_features = (int(part) for part in str(shape).split(","))
    except ValueError as error:
        raise BlockSparseError.expected("shape", "OUT,IN", repr(shape)) from error
    return out_features, in_features


def _measures(pattern: str, layout: BlockLayout) -> Table:
    rows = np.bincount(layout.row_of_block, minlength=layout.grid[0])
    cols = np.bincount(layout.col_indices().numpy(), minlength=layout.grid[1])
    table = Table(title=pattern, box=None, show_header=False, title_style="bold", title_justify="left", pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("shape", f"{layout.shape[0]} x {layout.shape[1]} (out x in)"),
        ("grid", f"{layout.grid[0]} x {layout.grid[1]} blocks of {layout.block_shape[0]} x {layout.block_shape[1]}"),
        ("blocks", f"{layout.nnz:,} ({layout.nnz * layout.block_shape[0] * layout.block_shape[1]:,} weights)"),
        ("density", f"{layout.density:.4g}"),
        ("blocks per row", _degrees(rows)),
        ("blocks per column", _degrees(cols)),
        *_graph_measures(layout),
    ):
        table.add_row(name, value)
    return table


def _graph_measures(layout: BlockLayout) -> list[tuple[str, str]]:
    from .. import topology

    sources = SAMPLED if sum(layout.grid) > EXACT else None
    try:
        found = topology.summary(layout, sources=sources)
    except BlockSparseError as error:
        return [("average path length", str(error).removesuffix(f": {layout!r}"))]
    try:
        length = f"{topology.average_path_length(layout, sources):.2f}"
    except BlockSparseError as error:
        length = str(error).removesuffix(f": {layout!r}")
    least = "" if found.exact else "at least "
    if not found.exact:
        length += f" (standard error {found.path_length_error:.2g}, from {sources} blocks)"
    square = layout.grid[0] == layout.grid[1]
    never = "some blocks never reach some others" if square else "the layout is not square"
    return [
        ("average path length", length),
        ("longest path", "none" if found.diameter is None else f"{least}{found.diameter}"),
        ("steps to mix", never if found.steps_to_mix is None else f"{least}{found.steps_to_mix}"),
        ("clustering", f"{found.clustering:.4g}"),
        ("spectral gap", f"{found.spectral_gap:.4g}"),
        ("hub load", f"{found.hub_load:.4g} (the fullest row or column / the mean)"),
    ]


def _degrees(counts: np.ndarray) -> str:
    empty = int((counts == 0).sum())
    return f"{counts.min()} to {counts.max()}, mean {counts.mean():.4g}{f', {empty} empty' if empty else ''}"


def draw(layout: BlockLayout, path: Path, title: str) -> None:
    """The mask as a PNG: a cell per block, or per several blocks of a large grid; the mask is never made whole.

    Raises:
        BlockSparseError: matplotlib is not installed, or there is no such folder.
    """
    from ..bench.report import figure_and_axes

    image, step = _image(layout)
    height, width = image.shape
    longest = max(height, width)
    figure, axes = figure_and_axes((max(5.5 * width / longest + 0.9, 3.6), max(5.5 * height / longest + 1.1, 2.4)))
    edges = (-0.5, width * step - 0.5, height * step - 0.5, -0.5)
    # Drawn at least as large as it is: beyond that "nearest" leaves no block out and adds no grey.
    axes.imshow(image, cmap="Blues", vmin=0, vmax=1, extent=edges, interpolation="nearest", aspect="equal")
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color("0.7")
    axes.set(xlabel="inputs, in blocks", ylabel="outputs, in blocks")
    rows, cols = layout.shape
    note = f", {step} x {step} blocks to a cell" if step > 1 else ""
    # Of the figure, not of the axes: these can be far narrower than it.
    figure.suptitle(f"{title}, {rows} x {cols}\ndensity {layout.density:.3g}{note}", x=0.02, ha="left", size=10)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    try:
        figure.savefig(path, format="png", dpi=max(150, 1.2 * longest / 5.5))
    except OSError as error:
        raise BlockSparseError.expected("out", "a PNG file to write", f"{path} ({error.strerror})") from error


def _image(layout: BlockLayout) -> tuple[np.ndarray, int]:
    """How full each cell of `step` x `step` blocks is, and the step."""
    step = -(-max(layout.grid) // LARGEST_PICTURE)
    height, width = (-(-size // step) for size in layout.grid)
    cells = layout.row_of_block // step * width + layout.col_of_block.astype(np.int64) // step
    counts = np.bincount(cells, minlength=height * width).reshape(height, width)
    full = counts / step**2
    # A cell with anything in it must be seen on a sparse grid: the scale starts well above white.
    peak = full.max() or 1
    return np.where(counts > 0, 0.5 + 0.5 * full / peak, 0), step
