"""Rows of targets and results, as the benchmark programs print and write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.markup import escape
from rich.table import Table

from blocksparse.errors import BlockSparseError
from blocksparse.files import read_json
from blocksparse.measure import BUDGET, ROUNDS, Call, Samples, Spread, alternate, host_clock
from blocksparse_lab.bench import report
from blocksparse_lab.bench.case import CaseResult
from blocksparse_lab.bench.report import ratio, short
from blocksparse_lab.machine import where

# The text of a row that was not started in time.
OUT_OF_TIME = "not measured: out of time"
HEAD = ("work", "target", "measured", "met")


@dataclass(frozen=True)
class Row:
    """A row of the table; `met` is None if there is no target, or if it could not be measured."""

    work: str
    target: str
    measured: str
    met: bool | None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The text of `met`.

        >>> Row("forward", ">= 3x dense", "2.9x dense", False).verdict
        'NO'
        """
        return "-" if self.met is None else "yes" if self.met else "NO"


RowIterator = Iterator[Row]


def ratio_row(
    work: str,
    ratio: Spread,
    over: str,
    *,
    least: float | None = None,
    most: float | None = None,
    target: str | None = None,
    more: str = "",
    details: Mapping[str, Any] | None = None,
) -> Row:
    """Return the row of a ratio: met if its median is at least `least`, or at most `most`; without either there is no
    target.

    `target` replaces the text of the target, `more` follows the ratio, and `details` are for JSON.

    >>> ratio_row("a step", Spread(1.5, 1.4, 1.6, 21), "dense", least=2)
    Row(work='a step', target='>= 2x dense', measured='1.50x (1.40-1.60) dense', met=False, details={})
    """
    met: bool | None = None
    if least is not None:
        met, goal = bool(ratio.median >= least), format_minimum(least, over)
    elif most is not None:
        met, goal = bool(ratio.median <= most), f"<= {most:.3g}x {over}"
    else:
        goal = "-"
    return Row(work, target or goal, f"{format_ratio(ratio)} {over}{more}", met, dict(details or {}))


def format_minimum(least: float | None, over: str) -> str:
    """Return the text of a target speed-up over a peer."""
    return "-" if least is None else f">= {least:.3g}x {over}"


def unmeasured_row(work: str, target: str, reason: object, details: Mapping[str, Any] | None = None) -> Row:
    """Return the row of work that could not be measured.

    >>> unmeasured_row("forward", ">= 1.1x stk", "STK is not installed").measured
    'not measured: STK is not installed'
    """
    return Row(work, target, f"not measured: {' '.join(str(reason).split())}", None, dict(details or {}))


def refused_row(work: str, target: str, result: CaseResult, peer: str, details: Mapping[str, Any]) -> Row:
    """Return the row of a comparison that the peer refused; it has our time."""
    reason = f"{peer}: {result.refused[peer]}; ours takes {1e6 * result.time().median:.4g} us"
    return unmeasured_row(work, target, reason, details)


def speedup_row(
    work: str,
    result: CaseResult,
    peer: str,
    least: float | None = None,
    more: Callable[[], str] = str,
    details: Mapping[str, Any] | None = None,
) -> Row:
    """Return the row of a speed-up over a peer, which may have refused; the details are the result's by default."""
    row_details = result.as_dict() if details is None else details
    if peer in result.refused:
        return refused_row(work, format_minimum(least, peer), result, peer, row_details)
    return ratio_row(work, result.speedup(peer), peer, least=least, more=more(), details=row_details)


@dataclass(frozen=True)
class Race:
    """Calls that were timed in turn."""

    samples: Samples

    @property
    def details(self) -> dict[str, Any]:
        return {"seconds": {name: vars(self.samples.time(name)) for name in self.samples.names}}

    def row(
        self, work: str, over: str, base: str, peer: str, *, details: Mapping[str, Any] | None = None, **goal: Any
    ) -> Row:
        """Return the row of the time of `over` as a multiple of that of `base`, which the text calls `peer`."""
        ratio = self.samples.ratio(over, base)
        return ratio_row(work, ratio, peer, details={**self.details, "ratio": vars(ratio), **(details or {})}, **goal)


def race(
    calls: Mapping[str, Call], rounds: int = ROUNDS, budget: float = BUDGET, clock: Callable[..., float] = host_clock
) -> Race:
    """Time calls on the CPU in turn."""
    return Race(alternate(calls, rounds=rounds, budget=budget, clock=clock))


@contextmanager
def set_threads(count: int) -> Iterator[None]:
    """Set the number of PyTorch's threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timing_options(budget: float, quick: bool) -> dict[str, Any]:
    """Return the rounds and seconds of a row; `quick` rows only try the program."""
    return {"rounds": 3, "budget": min(budget, 0.02)} if quick else {"rounds": ROUNDS, "budget": budget}


@dataclass(frozen=True)
class Line:
    """A line through points and the largest distance of a point from it, relative to the point's height."""

    slope: float
    intercept: float
    off: float

    @classmethod
    def of(cls, x: Sequence[float], y: Sequence[float]) -> Line:
        """Fit a line by relative residuals; otherwise the largest point alone would determine it.

        >>> line = Line.of([1.0, 2.0, 4.0], [3.0, 5.0, 9.0])
        >>> round(line.slope, 6), round(line.intercept, 6), line.off < 1e-9
        (2.0, 1.0, True)
        """
        xs, ys = np.asarray(x, float), np.asarray(y, float)
        slope, intercept = np.polyfit(xs, ys, 1, w=1 / ys)
        return cls(float(slope), float(intercept), float(np.abs((slope * xs + intercept) / ys - 1).max()))


MEMORY_TARGET = "gradient + activations + O(nnz) indices"


def memory_row(work: str, facts: Mapping[str, int], dense: int) -> Row:
    """Return the row of the peak memory of a forward and backward, beyond the values, inputs and output gradient before
    it.

    The gradient of the values, the output and the gradient of the input are needed. The rest (plans, panels, threads'
    stacks, the allocator) may be a working copy of the activations, 128 bytes of indices per block and 16 MiB: nothing
    that grows with in x out. `dense` is the bytes of a dense weight.

    >>> facts = {"nnz": 1000, "peak": 9 << 20, "gradient": 2 << 20, "activations": 4 << 20}
    >>> row = memory_row("a step", facts, dense=64 << 20)
    >>> row.measured, row.met
    ('2.00 + 4.00 + 3.00 MiB; a dense weight is 64.0 MiB', True)
    """
    rest = facts["peak"] - facts["gradient"] - facts["activations"]
    limit = facts["activations"] + 128 * facts["nnz"] + 2**24
    parts = " + ".join(map(format_mib, (facts["gradient"], facts["activations"], rest)))
    details = {**facts, "rest": rest, "dense": dense}
    return Row(work, MEMORY_TARGET, f"{parts} MiB; a dense weight is {format_mib(dense)} MiB", rest <= limit, details)


def read_earlier_rows(path: Path, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Row]:
    """Return the rows in a file of this commit, machine and settings, without those that failed or came too late.

    There are none if the commit is unknown or files differ from it.

    Raises:
        BlockSparseError: `write` did not write the file.
    """
    if not path.exists() or facts["commit"] is None or facts["dirty"] is not False:
        return []
    content, rows = read(path)
    before = content["machine"]
    same = all(before.get(name) == facts[name] for name in ("commit", "dirty", "torch", "cpu"))
    same = same and (before.get("gpu") or {}).get("name") == (facts["gpu"] or {}).get("name")
    if not same or content.get("settings") != settings:
        return []
    return [row for row in rows if not row.measured.startswith(("FAILED", OUT_OF_TIME))]


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return the content of a file that `write` wrote, and its rows.

    Raises:
        BlockSparseError: it is another kind of file.
    """
    content = read_json(path, "rows")
    try:
        rows = [Row(**row) for row in content["rows"]]
        texts = [text for row in rows for text in (row.work, row.target, row.measured)]
        right = all(isinstance(text, str) for text in texts) and all(row.met in (None, True, False) for row in rows)
        details = [content["machine"], content["machine"].get("gpu") or {}, *(row.details for row in rows)]
        if not right or not all(isinstance(of, dict) for of in details):
            raise TypeError("types of another program")
        return content, rows
    except (KeyError, TypeError, AttributeError) as error:
        raise BlockSparseError.expected(str(path), "a file that this program wrote", repr(error)) from error


def table(rows: Sequence[Row], title: str) -> Table:
    """Return the rows as a table for the terminal."""
    colours = {None: "dim", True: "green", False: "bold red"}
    cells = [(*map(escape, (r.work, r.target, r.measured)), f"[{colours[r.met]}]{r.verdict}[/]") for r in rows]
    return report.table(HEAD, cells, title, text=3)


def write(
    path: Path,
    rows: Sequence[Row],
    what: str,
    facts: Mapping[str, Any],
    *,
    ratios: str = "median of the rounds of one run (quartiles)",
    **settings: Any,
) -> None:
    """Write the rows as JSON, and as a table in Markdown next to it.

    `facts` are those of the machine, and `ratios` says in the caption what ratios are.
    """
    every = [asdict(row) for row in rows]
    lines = report.markdown(HEAD, [(row.work, row.target, row.measured, row.verdict) for row in rows], text=4)
    caption = f"{where(facts)}, {facts['date'][:10]}. Ratios: {ratios}."
    content = {"what": what, "machine": facts, "settings": settings, "rows": every}
    report.write(path, content, lines, caption)


def format_ratio(speedup: Spread) -> str:
    """Format a ratio for a sentence.

    >>> format_ratio(Spread(12.34, 11.9, 13.0, 21))
    '12.3x (11.9-13.0)'
    """
    return ratio(speedup).replace(" ", "x ", 1)


def format_mib(size: float) -> str:
    """Format bytes in MiB."""
    return short(size / 2**20) if size >= 2**20 / 100 else "0"
