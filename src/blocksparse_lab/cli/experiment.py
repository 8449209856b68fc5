"""`blocksparse experiment`: whole comparisons with seeds, tables and curves, dense against sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from blocksparse.errors import BlockSparseError

from .stages import stages
from .train import show


class Experiments(TyperCommand):
    """A command whose help ends with the experiments, looked up only when it is shown, since that is slow."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from ..experiments import EXPERIMENTS

        self.epilog = "\n\n".join(f"[bold]{name}[/]: {of.about}." for name, of in EXPERIMENTS.items())
        super().format_help(ctx, formatter)


def experiment(
    name: Annotated[str, typer.Argument(help="One of those below.")],
    runs: Annotated[Path, typer.Option(help="A folder for the runs; those that are there go on.")] = Path("runs"),
    out: Annotated[Path, typer.Option(help="A folder for the report.")] = Path("docs/results"),
    data_dir: Annotated[
        Path | None, typer.Option(help="The folder of all data, or the data's own; else it is downloaded.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Some of the models, by name.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Some of the seeds.")] = None,
    add: Annotated[
        bool, typer.Option("--add", help="Models without a run here stay in the report as they are.")
    ] = False,
    redraw: Annotated[bool, typer.Option("--redraw", help="Only the report, again, from its JSON.")] = False,
) -> None:
    """Trains what an experiment compares, probes it, and writes what came out as JSON, Markdown and PNG.

    Every run goes on where it was stopped; several processes may do different ones (--only, --seed).
    """
    from .. import experiments

    console = Console()
    chosen = experiments.find(name)
    folder = runs / name
    console.print(f"[bold]{name}[/]: {chosen.about}", highlight=False)
    if redraw:
        for path in experiments.draw(name, chosen, out):
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)
        return
    for trainer in chosen.trainers(folder, data_dir, only or (), seed or ()):
        console.print(f"[bold]{trainer.run.name}[/]", highlight=False)
        try:
            show(console, trainer)
        except BlockSparseError as error:
            if not chosen.failed(trainer, error):
                raise
            console.print(f"[yellow]{escape(str(error))}[/]", highlight=False, soft_wrap=True)
            continue
        with stages(console) as tell:
            chosen.probe(trainer.run, data_dir, tell)
    for path in experiments.write(name, chosen, folder, out, add):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
