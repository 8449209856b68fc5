"""`blocksparse compare`: tables and curves of training runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from blocksparse.errors import BlockSparseError

from ..bench.report import chance, noted, spread
from .terminal import JsonFile, say, short, table, write

if TYPE_CHECKING:
    from ..training.compare import Group, Run


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="Write a PNG of held-out figures against steps and seconds.")] = None,
    json_file: JsonFile = None,
    topology: Annotated[
        bool, typer.Option("--topology", help="Compare the runs' layouts: measures, and NNSTD distances.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="With --topology: write a page to explore the layouts.")] = None,
) -> None:
    """Compare training runs; runs that differ only in their seed also by mean and standard deviation."""
    from ..training import compare as recipe

    if topology:
        from .compare_topology import compare_topology

        compare_topology(runs, out, json_file, html)
        return
    if html is not None:
        raise BlockSparseError.expected("--html", "--topology with it", "none")
    if twice := [str(path) for path in runs if [each.resolve() for each in runs].count(path.resolve()) > 1]:
        raise BlockSparseError.expected("runs", "each once", " and ".join(twice))
    read_runs = [recipe.read(path) for path in runs]
    grouped = recipe.groups(read_runs)
    console = Console()
    console.print(_table(read_runs, narrow=console.width < 100))
    data = [of for run in read_runs if isinstance(of := run.task.get("text", run.task.get("data")), dict)]
    if any(of != data[0] for of in data):
        say(console, "these runs have different data: do not compare their held-out figures", "yellow")
    if len(grouped) < len(read_runs):
        console.print()
        console.print(_seeds(grouped))
        if any(len(group.comparable) < len(group.runs) for group in grouped):
            say(console, "means leave out runs that lag behind, and all but one run per seed", "yellow")
    if json_file is not None:
        content = {"what": "training runs side by side", "runs": [run.as_dict() for run in read_runs]}
        write(console, "json", json_file, content)
    if out is not None:
        recipe.picture(out, grouped)
        say(console, f"wrote {out}")


def _table(runs: list[Run], narrow: bool) -> Table:
    """Build a table with a row per run, without empty columns."""
    best = min((run.held_out for run in runs if run.held_out is not None), default=None)
    rows: list[dict[str, str]] = []
    for run in runs:
        numbers, model = run.as_dict(), run.task.get("model")
        model = model if isinstance(model, dict) else {}
        method = "" if numbers.get("density") == 1 and model.get("method") == "fixed" else model.get("method")
        planned = run.settings["steps"]
        held_out = "" if run.held_out is None else f"{run.held_out:.4f}"
        reads_text = "text" in run.task
        rows.append(
            {
                "run": escape(run.name),
                "method": _word(method),
                "net": "-".join(map(_word, sizes if isinstance(sizes := model.get("sizes"), list) else [])),
                "cell": _word(model.get("cell")),
                "pattern": _word(model.get("pattern")).replace("_", "_\n" if narrow else "_"),
                "width": _count(model.get("width")),
                "density": f"{density:.3g}" if _shown(density := numbers.get("density")) else "",
                "params": _short(numbers.get("parameters")),
                "mul-adds\nper byte": _short(numbers.get("multiply_adds_per_byte")),
                "steps": _count(run.steps) if run.result else f"{run.steps:,}\nof {planned:,}",
                "bytes\nseen": _short(numbers["bytes"]) if reads_text else "",
                "\n".join(_word(run.unit).rsplit(" ", 1)): f"[bold]{held_out}[/]" if run.held_out == best else held_out,
                "bytes/s": _short(numbers["bytes_per_second"]) if reads_text else "",
                "minutes": f"{run.seconds / 60:.3g}",
            }
        )
    words = ["run", "method", "net", "cell", "pattern"]
    head = [name for name in rows[0] if any(row[name] for row in rows)]
    shown = [[row[name] for name in head] for row in rows]
    return table(head, shown, words=sum(name in words for name in head), padding=(0, 0 if narrow else 1))


def _seeds(groups: list[Group]) -> Table:
    """Build a table with a row per group; differences pair runs of the same seed."""
    rows = []
    for group in groups:
        mean, deviation = group.held_out or (None, None)
        count = len(group.comparable)
        shown = "" if mean is None else f"{mean:.4f}" + (f" ± {deviation:.4f}" if count > 1 else "")
        runs = str(count) if count == len(group.runs) else f"{count} of {len(group.runs)}"
        rows.append((escape(group.label), runs, shown, "" if group is groups[0] else _against(groups[0], group)))
    head = ("over seeds", "runs", f"{_word(groups[0].runs[0].unit)} ± deviation", "against the first, by seeds")
    return table(head if any(row[-1] for row in rows) else head[:-1], [row[: len(head)] for row in rows])


def _against(first: Group, group: Group) -> str:
    """Format the difference of two groups with its p-value; "" without two shared seeds."""
    figures = [{run.settings.get("seed"): run.held_out for run in of.comparable} for of in (first, group)]
    theirs, own = figures
    differences = [x - y for seed, x in own.items() if x is not None and (y := theirs.get(seed)) is not None]
    return noted(spread(differences, 4, "+"), chance(differences)) if len(differences) > 1 else ""


def _word(value: Any) -> str:
    """Escape a word or number from a file and remove control characters; "" for other values."""
    return escape("".join(filter(str.isprintable, str(value)))) if isinstance(value, str | int) else ""


def _count(number: Any) -> str:
    return f"{number:,.0f}" if _shown(number) else ""


def _short(number: Any) -> str:
    return short(number, "kMG") if _shown(number) else ""


def _shown(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) < 1e100
