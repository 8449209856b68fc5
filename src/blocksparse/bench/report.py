"""Results for people (a table in the terminal, a chart) and for machines (JSON)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..errors import BlockSparseError
from .linear import CaseResult
from .machine import machine
from .timing import Spread

# Of the peers' lines, in the order of `PEERS`: told apart in grey and by the colour-blind as well.
_STYLES = {"dense": ("#0072b2", "o"), "torch-bsr": ("#d55e00", "s"), "bsr-matmul": ("#009e73", "^")}


def table(results: Sequence[CaseResult], title: str = "") -> Table:
    """One row per result: our time and useful arithmetic, and the speed-up over each peer with its quartiles."""
    peers = list(dict.fromkeys(name for result in results for name in (*result.peers, *result.refused)))
    out = Table(title=title, caption="speed-up: median of the rounds, quartiles in brackets", title_style="bold")
    for name in ("density", "time", "GFLOP/s", "error"):
        out.add_column(name, justify="right", no_wrap=True)
    for name in peers:
        out.add_column(f"x {name}", justify="right")
    for result in results:
        cells = [f"{result.spec.density:g}", duration(result.time().median), f"{result.gflops:.0f}"]
        cells.append(f"{max(result.errors.values()):.1e}")
        cells += [ratio(result.speedup(name)) if name in result.peers else "[dim]refused[/]" for name in peers]
        out.add_row(*cells)
    return out


def refusals(results: Sequence[CaseResult]) -> list[str]:
    """A line for each peer that could not run, with its reason; the same reason is said once."""
    return list(dict.fromkeys(f"{name}: {reason}" for result in results for name, reason in result.refused.items()))


def ratio(spread: Spread) -> str:
    """A ratio with its quartiles.

    >>> ratio(Spread(12.34, 11.9, 13.0, 21))
    '12.3 (11.9-13.0)'
    """
    return f"{_short(spread.median)} ({_short(spread.low)}-{_short(spread.high)})"


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> duration(0.00123), duration(2.5e-5), duration(12.0)
    ('1.23 ms', '25.0 us', '12.0 s')
    """
    value, unit = next(
        ((seconds * scale, unit) for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")) if seconds * scale >= 1),
        (seconds * 1e6, "us"),
    )
    return f"{value:#.3g} {unit}"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def write_json(path: Path, results: Sequence[CaseResult], **settings: Any) -> None:
    """The results with the machine they were measured on."""
    content = {
        "what": "block-sparse linear products",
        "machine": machine(),
        "settings": settings,
        "results": [result.as_dict() for result in results],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_chart(path: Path, results: Sequence[CaseResult], title: str) -> None:
    """A PNG of the speed-up over each peer against density, beside what the arithmetic alone would give.

    Raises:
        BlockSparseError: matplotlib is not installed.
    """
    figure, axes = figure_and_axes((7.5, 5.2))
    density = sorted({result.density for result in results if result.density > 0})
    if density:
        axes.plot(density, [1 / value for value in density], "--", color="0.45", lw=1.2, label="1 / density")
    axes.axhline(1, color="0.2", lw=1)
    for peer, (color, marker) in _STYLES.items():
        points = [(r.density, r.speedup(peer)) for r in results if peer in r.peers and r.density > 0]
        if not points:
            continue
        points.sort(key=lambda point: point[0])
        x = [density for density, _ in points]
        medians = [spread.median for _, spread in points]
        axes.plot(x, medians, color=color, marker=marker, ms=5, lw=1.8, label=f"over {peer}")
        lows, highs = [spread.low for _, spread in points], [spread.high for _, spread in points]
        axes.fill_between(x, lows, highs, color=color, alpha=0.18, lw=0)
        for density_, median in zip(x, medians, strict=True):
            axes.annotate(
                _short(median), (density_, median), (0, 7), textcoords="offset points", ha="center", color=color, size=8
            )
    axes.set(xscale="log", yscale="log", xlabel="density (stored blocks / all blocks)", ylabel="speed-up")
    axes.set_title(title, loc="left", size=11)
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    axes.grid(which="major", color="0.9", lw=0.8)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def figure_and_axes(size: tuple[float, float]) -> tuple[Any, Any]:
    """A matplotlib figure that needs no display, with one pair of axes.

    Raises:
        BlockSparseError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BlockSparseError(f"pictures need matplotlib ({error}): pip install 'blocksparse-torch[plots]'") from error
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
