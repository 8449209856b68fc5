"""`blocksparse experiment`: dense against block-sparse, whole comparisons with seeds, tables and curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from .sentiment import _COLUMNS, _teller
from .train import show


def experiment(
    name: Annotated[str, typer.Argument(help="wikipedia-small, imdb-small, wikipedia-large or imdb-large.")],
    runs: Annotated[Path, typer.Option(help="A folder for the runs; those that are there go on.")] = Path("runs"),
    out: Annotated[Path, typer.Option(help="A folder for the report.")] = Path("docs/results"),
    data_dir: Annotated[Path | None, typer.Option(help="A folder with the texts; else they are downloaded.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Some of the models, by name.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Some of the seeds.")] = None,
) -> None:
    """Trains what an experiment compares, probes it, and writes what came out as JSON, Markdown and PNG.

    Every run goes on where it was stopped; several processes may do different ones (--only, --seed).
    """
    from ..recipes import experiments

    console = Console()
    chosen = experiments.find(name)
    folder = runs / name
    console.print(f"[bold]{name}[/]: {chosen.about}", highlight=False)
    for trainer in experiments.trainers(chosen, folder, data_dir, only or (), seed or ()):
        console.print(f"[bold]{trainer.run.name}[/]", highlight=False)
        show(console, trainer)
        with Progress(*_COLUMNS, console=console, transient=True, disable=not console.is_terminal) as progress:
            experiments.probe(chosen, trainer.run, data_dir, _teller(progress))
    for path in experiments.write_report(name, chosen, folder, out):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
