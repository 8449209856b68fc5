"""The command line, `blocksparse ...`: one file per command.

A command's module imports what is heavy (models, matplotlib) inside its function, so that `--help` stays fast.
"""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from blocksparse import __version__
from blocksparse.errors import BlockSparseError

from .bench import bench
from .compare import compare
from .compress import compress
from .demo import demo
from .experiment import Experiments, experiment
from .info import info
from .layout import layout
from .plan import plan
from .sample import sample
from .sentiment import sentiment
from .sparsify import sparsify
from .train import train
from .tune import tune


class _Group(TyperGroup):
    """Print a user's mistake as one red line instead of a traceback, and end quietly on Ctrl-C."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _join_help_lines(self)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (BlockSparseError, MemoryError) as error:
            # Without markup, as messages contain brackets, and without wrapping, so that lines can be copied.
            message = f"error: {str(error) or 'not enough memory'}"
            Console(stderr=True).print(message, style="bold red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            Console(stderr=True).print("interrupted")
            raise typer.Exit(130) from None


def _join_help_lines(command: Any) -> None:
    """Make each paragraph of a command's help one line, as typer keeps the line breaks of all but the first."""
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help or ""))
    for each in getattr(command, "commands", {}).values():
        _join_help_lines(each)


app = typer.Typer(
    cls=_Group,
    help="Block-sparse neural networks for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"blocksparse {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(info)
app.add_typer(bench)
app.command()(compare)
app.command()(compress)
app.command()(demo)
app.command(cls=Experiments)(experiment)
app.command()(layout)
app.command()(plan)
app.command()(sample)
app.command()(sentiment)
app.command()(sparsify)
app.add_typer(train)
app.command()(tune)
