"""The experiment command on a tiny experiment, shared by tests."""

from __future__ import annotations

from pathlib import Path

from blocksparse_lab import experiments
from command import output, run

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def command(tmp_path, *arguments):
    """Run "tiny"; return the output, the results and the Markdown."""
    done = attempt(tmp_path, *arguments)
    assert (tmp_path / "out" / "tiny.png").read_bytes().startswith(b"\x89PNG")
    markdown = (tmp_path / "out" / "tiny.md").read_text()
    return done.output, experiments.load(tmp_path / "out" / "tiny.json").runs, markdown


def cells(markdown, title):
    row = next(line for line in markdown.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def attempt(tmp_path, *arguments, names=("tiny",), code=0):
    """Run experiments; return the result of the command."""
    return run("experiment", *names, "--runs", tmp_path / "runs", "--out", tmp_path / "out", *arguments, code=code)


def refused(*arguments):
    return output("experiment", *arguments, code=1)
