"""The experiment command on a tiny experiment, shared by tests."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from blocksparse_lab import experiments
from blocksparse_lab.cli import app

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def command(tmp_path, *arguments):
    """Run "tiny"; return the output, the results and the Markdown."""
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["experiment", "tiny", *folders, *arguments])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "tiny.png").read_bytes().startswith(b"\x89PNG")
    markdown = (tmp_path / "out" / "tiny.md").read_text()
    return done.output, experiments.load(tmp_path / "out" / "tiny.json").runs, markdown


def cells(markdown, title):
    row = next(line for line in markdown.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def refused(*arguments):
    done = CliRunner().invoke(app, ["experiment", *map(str, arguments)])
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    return " ".join(done.output.split())
