"""The directives `results` and `missing-runs`: tables of committed results, made from their JSON as the site is built.

A result is named by its file in `docs/results` or `benchmarks/results`. Each line names a row, no line means all rows:

```{results} wikipedia-small
:columns: dense | small-world
bits per character, held out
```
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from docutils.statemachine import StringList

from blocksparse_lab import experiments

ROOT = Path(__file__).parents[1]
FOLDERS = ROOT / "docs" / "results", ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"^```\{results\} (\S+)\n(?::columns: ([^\n]*)\n)?(.*?)^```", re.MULTILINE | re.DOTALL)

Rows = list[list[str]]


@cache
def table(name: str, folders: tuple[Path, ...] = FOLDERS) -> Rows:
    """Return the table of a committed result, its head first; results of other programs have it in their Markdown."""
    (path,) = [folder / f"{name}.json" for folder in folders if (folder / f"{name}.json").exists()]
    content = json.loads(path.read_text())
    if "experiment" in content:
        found = next(experiments.find(name).tables(experiments.load(path)))
        return [list(found.head), *map(list, found.rows)]
    if "machine" not in content or not {"rows", "results"} & set(content):
        lines = re.findall(r"^\| ?(.*) \|$", path.with_suffix(".md").read_text(), re.MULTILINE)
        cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
        return [line for line in cells if len(line) == len(cells[0])]
    if "rows" in content:
        head = ["work", "target", "measured"]
        return [head, *([row[key] for key in head] for row in content["rows"])]
    peers = list(dict.fromkeys(peer for case in content["results"] for peer in case["speedup"]))
    rows = [
        [f"density {case['density']:g}, {case['pass']}", *(_speedup(case["speedup"].get(peer)) for peer in peers)]
        for case in content["results"]
    ]
    return [["", *(f"times as fast as {peer}" for peer in peers)], *rows]


def _speedup(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:.2f} ({spread['low']:.2f}-{spread['high']:.2f})"


def select(name: str, rows: list[str], columns: list[str], folders: tuple[Path, ...] = FOLDERS) -> Rows:
    """Return the named rows and columns of a table, in that order; raises LookupError for a name it does not have.

    A row is named by its first cell, or by its first two with " | " between them.
    """
    head, *lines = table(name, folders)
    if unknown := set(columns) - set(head):
        raise LookupError(f"{name}: no column {sorted(unknown)} in {head}")
    places = [0, *(head.index(column) for column in columns)] if columns else range(len(head))
    chosen = [line for row in rows for line in lines if row in (line[0], " | ".join(line[:2]))] if rows else lines
    for row in rows:
        if not any(row in (line[0], " | ".join(line[:2])) for line in lines):
            raise LookupError(f"{name}: no row {row!r} in {[line[0] for line in lines]}")
    return [[line[place] for place in places] for line in [head, *chosen]]


def blocks(page: str) -> list[tuple[str, list[str], list[str]]]:
    """Return name, rows and columns of each `results` block of a page."""
    return [
        (name, rows.strip().splitlines(), columns.split(" | ") if columns else [])
        for name, columns, rows in BLOCK.findall(page)
    ]


def missing_runs(folders: tuple[Path, ...] = FOLDERS) -> Rows:
    """Return a table of the runs that experiments define and no result has, with the hours of one core they need."""
    lines = [["experiment", "runs (missing seeds)", "hours"]]
    for name, experiment in experiments.EXPERIMENTS.items():
        path = folders[0] / f"{name}.json"
        results = experiments.load(path) if path.exists() else experiments.Results({})
        # Runs that were left out for a reason are not missing.
        missing = experiment.contenders.keys() - {run.rpartition("-")[0] for run in results.left_out}
        seeds = {one: {run.settings["seed"] for run in results.runs.get(one, ())} for one in missing}
        counts = {one: len(set(experiment.seeds) - seeds[one]) for one in experiment.contenders if one in missing}
        counts = {one: count for one, count in counts.items() if count}
        hours = sum(count * (experiment.hours(one) or float("inf")) for one, count in counts.items())
        need = f"{max(0.1, hours):.1f}" if hours < float("inf") else "days of a GPU"
        if counts:
            lines.append([f"`{name}`", "; ".join(f"{one} ({count})" for one, count in counts.items()), need])
    return lines


def markdown(rows: Rows) -> list[str]:
    head, *lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [head, "|---" + "|---:" * (len(rows[0]) - 1) + "|", *lines]


class ResultsTable(Directive):
    required_arguments = 1
    has_content = True
    option_spec: ClassVar = {"columns": directives.unchanged}

    def rows(self) -> Rows:
        columns = self.options.get("columns", "")
        return select(self.arguments[0], list(self.content), columns.split(" | ") if columns else [])

    def run(self):
        parent = nodes.Element()
        self.state.nested_parse(StringList(markdown(self.rows())), self.content_offset, parent)
        return parent.children


class MissingRuns(ResultsTable):
    required_arguments = 0

    def rows(self) -> Rows:
        return missing_runs()


def setup(app):
    app.add_directive("results", ResultsTable)
    app.add_directive("missing-runs", MissingRuns)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    print(*markdown(missing_runs()), sep="\n")
