"""Tables, charts and JSON files of results."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from blocksparse import checkpoint
from blocksparse.measure import Spread
from blocksparse.topology.drawings import style
from blocksparse.topology.drawings.style import figure_and_axes

from .. import text_table
from ..folders import report_os_errors
from ..machine import machine, where
from .case import CaseResult

# Colour and marker of each peer, distinct in grey and for colour-blind readers.
STYLES = {
    "dense": ("#0072b2", "o"),
    "torch-bsr": ("#d55e00", "s"),
    "bsr-matmul": ("#009e73", "^"),
    "csr-matmul": ("#e69f00", "v"),
    "stk": ("#56b4e9", "P"),
    "grouped": ("#cc79a7", "D"),
    "dense-wide": ("#d55e00", "s"),
    "torch": ("#009e73", "^"),
    "torch-wide": ("#e69f00", "v"),
}


_LOOK: dict[str, Any] = {
    **{"title_style": "bold", "title_justify": "left", "caption_justify": "left", "header_style": "table.header"},
    **dict.fromkeys(("pad_edge", "show_edge", "collapse_padding"), True),
}


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", caption: str = "", text: int = 0
) -> Table:
    """Return a table for the terminal; the first `text` columns are text, the others numbers."""
    made = text_table.table(head, rows, text, title=title, caption=caption or None, **_LOOK)
    for column in made.columns:
        if f"{column.header}".startswith("over "):
            # Wide enough for the quartiles, which wrap below the median on a narrow terminal.
            column.no_wrap, column.min_width = False, 13
    return made


def results_table(results: Sequence[CaseResult], title: str = "") -> Table:
    """Return a table with a row per result: our time and rate, and the speed-up over each peer with its quartiles and
    width.
    """
    peers = list(dict.fromkeys(name for result in results for name in (*result.peers, *result.refused)))
    worst = max((error for result in results for error in result.errors.values()), default=0)
    bound = max((result.bound for result in results), default=0)
    widths = any("widths" in result.facts for result in results)
    cells = []
    for result in results:
        rate = result.gflops if result.spec.products else result.tokens_per_second()
        over = ["[dim]refused[/]" if name not in result.peers else ratio(result.speedup(name)) for name in peers]
        if widths:
            over = [f"{one}\n{result.facts['widths'].get(name, '')}" for one, name in zip(over, peers, strict=True)]
        density = f"{result.density:.3g}" if widths else f"{result.spec.density:g}"
        label = [result.spec.pattern.partition(" ")[2]] if widths else []
        cells.append([*label, density, duration(result.time().median), f"{rate:.0f}", *over])
    head = [*([""] if widths else []), "density", "our time", "bytes/s" if widths else "GFLOP/s"]
    caption = f"speed-up: median of the rounds (quartiles){'; below it the width of the peer' * widths}"
    caption += f"\nrelative error against float64: {worst:.1e}, bound {bound:g}"
    return table([*head, *(f"over {name}" for name in peers)], cells, title, caption)


def refusals(results: Sequence[CaseResult]) -> list[str]:
    """Return a line for each peer that could not run, with its reason; equal lines appear once."""
    return list(dict.fromkeys(f"{name}: {reason}" for result in results for name, reason in result.refused.items()))


def ratio(spread: Spread) -> str:
    """Format a ratio with its quartiles; with fewer than three rounds there are none.

    >>> ratio(Spread(12.34, 11.9, 13.0, 21)), ratio(Spread(45.6, 45.1, 46.1, 2))
    ('12.3 (11.9-13.0)', '45.6 (twice)')
    """
    if spread.count < 3:
        return f"{short(spread.median)} ({'once' if spread.count == 1 else 'twice'})"
    return f"{short(spread.median)} ({short(spread.low)}-{short(spread.high)})"


def duration(seconds: float) -> str:
    """Format a time in a fitting unit.

    >>> duration(0.00123), duration(4.08e-4), duration(12.0)
    ('1.23 ms', '408 us', '12.0 s')
    """
    for scale, unit in ((1, "s"), (1e3, "ms")):
        if seconds * scale >= 1:
            return f"{short(seconds * scale)} {unit}"
    return f"{short(seconds * 1e6)} us"


def short(value: float) -> str:
    """Format a number with three significant figures.

    >>> short(1.234), short(9.999), short(1234.5)
    ('1.23', '10.0', '1234')
    """
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def write_results(path: Path, results: Sequence[CaseResult], what: str, **settings: Any) -> None:
    """Write results with the machine that they were measured on."""
    every = [result.as_dict() for result in results]
    write_json(path, {"what": what, "machine": machine(_device_type(results)), "settings": settings, "results": every})


def write(path: Path, content: Mapping[str, Any], *parts: str | Sequence[str]) -> None:
    """Write results as JSON and, next to it, in Markdown; a part is a paragraph or the lines of a table."""
    write_json(path, content)
    text = "\n\n".join(part if isinstance(part, str) else "\n".join(part) for part in parts)
    write_text(path.with_suffix(".md"), text + "\n")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with seven digits per number; flat objects and lists of flat lists take one line each."""
    text = json.dumps(_round_floats(content), indent=1, separators=(",", ":"))
    # A line break right after a bracket is never inside a string, so joining lines changes no string.
    for parts in (r"(?<=[\[{])\n[^\[\]{}]*(?=[\]}])", r"\[\n(?: *\[[^\[\]{}\n]*\],?\n)+ *\]"):
        text = re.sub(parts, lambda match: re.sub(r"\n *", "", match[0]), text)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, and its folder if it is missing.

    Raises:
        BlockSparseError: the file cannot be written.
    """
    with report_os_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write_text(path, text)


def _round_floats(value: Any) -> Any:
    """Round the floats of nested content to seven digits."""
    if isinstance(value, dict):
        return {key: _round_floats(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_round_floats(part) for part in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def columns(records: Sequence[Any]) -> Any:
    """Turn dicts with the same keys into one dict with a list for each leaf, which is shorter as JSON; leave others as
    they are.

    >>> columns([{"step": 1, "loss": {"mean": 0.5}}, {"step": 2, "loss": {"mean": 0.25}}])
    {'step': [1, 2], 'loss': {'mean': [0.5, 0.25]}}
    """
    first = records[0] if records else None
    same = isinstance(first, dict) and all(isinstance(of, dict) and of.keys() == first.keys() for of in records)
    return {key: columns([of[key] for of in records]) for key in first} if first and same else list(records)


def rows(columns: Any) -> list[Any]:
    """Return the list of dicts that `columns` turned into one dict.

    >>> rows({"step": [1, 2], "loss": {"mean": [0.5, 0.25]}})
    [{'step': 1, 'loss': {'mean': 0.5}}, {'step': 2, 'loss': {'mean': 0.25}}]
    """
    if not isinstance(columns, dict):
        return list(columns)
    return [dict(zip(columns, values, strict=True)) for values in zip(*map(rows, columns.values()), strict=True)]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> list[str]:
    """Return the lines of a table in Markdown; the first `text` columns are text, the others numbers."""
    lines = [head, [*["---"] * text, *["---:"] * (len(head) - text)], *rows]
    return [f"| {' | '.join(line)} |" if line is not lines[1] else f"|{'|'.join(line)}|" for line in lines]


def spread(values: Sequence[float], digits: int | None = None, sign: str = "") -> str:
    """Format mean and standard deviation, or a single value alone.

    >>> spread([10.25, 10.75]), spread([8]), spread([1.5, 2.5], digits=1, sign="+")
    ('10.50 ± 0.35', '8.0000', '+2.0 ± 0.7')
    """
    if digits is None:
        digits = 4 if max(values) < 10 else 2 if max(values) < 100 else 0
    deviation = f" ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign},.{digits}f}{deviation}"


def noted(cell: str, *notes: str) -> str:
    """Append notes in brackets to a cell; empty notes are left out.

    >>> noted("+1.0", "", "p 0.2"), noted("+1.0", "")
    ('+1.0 (p 0.2)', '+1.0')
    """
    text = ", ".join(filter(None, notes))
    return f"{cell} ({text})" if text else cell


def chance(values: Sequence[float], others: Sequence[float] | None = None) -> str:
    """Return the p-value of a difference of means by a two-sided t-test, as text.

    The result is "" for fewer than three values on either side, or if the values differ by rounding alone.

    Args:
        values: differences of pairs; with `others`, the first of two independent samples, compared by Welch's test.
        others: the second sample.

    >>> chance([0.2, 0.3, 0.4]), chance([1, 2, 3], [2, 3, 4]), chance([1.0, 2.0]), chance([0.3, 0.1 + 0.2, 0.3])
    ('p 0.035', 'p 0.29', '', '')
    """
    from scipy.stats import ttest_1samp, ttest_ind

    samples = [values] if others is None else [values, others]
    if min(map(len, samples)) < 3 or not any(max(of) - min(of) > 1e-9 * max(map(abs, of)) for of in samples):
        return ""
    test = ttest_1samp(values, 0) if others is None else ttest_ind(values, others, equal_var=False)
    # Three digits if two would hide on which side of 0.05 the value is.
    return f"p {test.pvalue:.{3 if f'{test.pvalue:.2g}' == '0.05' else 2}g}" if test.pvalue >= 0.001 else "p < 0.001"


# -- charts ----------------------------------------------------------------------------------------------------------


def write_chart(path: Path, results: Sequence[CaseResult], title: str, bound: bool = True) -> None:
    """Write a PNG of the speed-up over each peer against density; `bound` adds the line 1 / density.

    Bands are quartiles. Points have numbers where the lines alone are hard to read.
    """
    figure, axes = figure_and_axes((7.5, 5.2))
    some = sorted((result for result in results if result.density > 0), key=lambda result: result.density)
    densities = list(dict.fromkeys(result.density for result in some))
    if bound:
        axes.plot(densities, [1 / density for density in densities], "--", color="0.45", lw=1.2, label="1 / density")
    for peer, (color, marker) in STYLES.items():
        points = [(result.density, result.speedup(peer)) for result in some if peer in result.peers]
        if points:
            line(axes, points, f"over {peer}", color, marker, _NUMBERS.get(peer))
    speedup_axes(axes, title)
    if not densities:
        axes.set_xlim(0.01, 1)  # without points a logarithmic axis needs a range
    axes.margins(x=0.08, y=0.12)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    save(figure, path, where(machine(_device_type(results))))


# Height of a peer's numbers above its line, in points; lines of peers with equal widths are close to each other.
_NUMBERS = {"dense": -13, "dense-wide": -13, "torch": 6, "torch-wide": 6}


def line(
    axes: Any,
    points: Sequence[tuple[float, Spread]],
    label: str,
    color: str,
    marker: str = "o",
    above: int | None = -13,
) -> None:
    """Draw the medians at some densities as a line, the quartiles as a band, and numbers at height `above`, unless
    None.
    """
    x, spreads = zip(*points, strict=True)
    axes.plot(x, [s.median for s in spreads], color=color, marker=marker, ms=5, lw=1.8, label=label)
    axes.fill_between(x, [s.low for s in spreads], [s.high for s in spreads], color=color, alpha=0.18, lw=0)
    for at, spread in points if above else ():
        place: Any = {"xytext": (0, above), "textcoords": "offset points", "ha": "center"}
        axes.annotate(short(spread.median), (at, spread.median), color=color, size=8.5, **place)


def speedup_axes(axes: Any, title: str) -> None:
    """Set up axes of speed-up against density."""
    axes.axhline(1, color="0.2", lw=1)
    log_axes(axes, title, "density (stored blocks / all blocks)", "speed-up")


def log_axes(axes: Any, title: str, xlabel: str, ylabel: str) -> None:
    """Set up logarithmic axes."""
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, loc="left", size=10)
    axes.grid(which="major", color="0.9", lw=0.8)
    plain_ticks(axes)


def plain_ticks(axes: Any, which: str = "xy") -> None:
    """Label logarithmic axes at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (getattr(axes, f"{one}axis") for one in which):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def save(figure: Any, path: Path, caption: str, dpi: int = 150) -> None:
    """Write a PNG with a caption below it."""
    figure.supxlabel(caption, size=7.5, color="0.4", x=0.01, ha="left")
    style.save(figure, path, dpi)


def _device_type(results: Sequence[CaseResult]) -> str:
    return next((result.facts["device"] for result in results), "cpu")
