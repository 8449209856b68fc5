"""`blocksparse sparsify`: make a checkpoint block-sparse."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blocksparse.errors import BlockSparseError, SparsityWarning

from .terminal import say

# Replaces the arguments that messages of `blocksparse.sparsify` recommend.
ADVICE = "pass --force and fine-tune, or run blocksparse compress"


def sparsify(
    model: Annotated[
        Path,
        typer.Argument(help="Byte model's checkpoint or run, transformers folder, or *.safetensors of weights."),
    ],
    density: Annotated[float, typer.Option(help="Fraction of the weights to keep.")] = 0.1,
    block_size: Annotated[int, typer.Option(help="Rows and columns of a block.")] = 32,
    criterion: Annotated[str, typer.Option(help="Score of a block: l2, magnitude, max or lamp.")] = "lamp",
    scope: Annotated[
        str,
        typer.Option(help="Threshold: one with a floor (careful), one (global), one per weight (layer), or erk."),
    ] = "careful",
    skip: Annotated[list[str] | None, typer.Option(help="Module or weight to leave dense; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the checkpoint and report.json.")] = None,
    tokens: Annotated[int, typer.Option(help="Rows of the inputs for which weights must be faster.")] = 64,
    force: Annotated[bool, typer.Option("--force", help="Sparsify every weight without timing it.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Report only; write nothing.")] = False,
) -> None:
    """Drop the blocks with the lowest scores from a trained model, write it, and report on each weight.

    In a *.safetensors of weights, each 2-D tensor counts as a linear weight unless its name contains "emb".
    """
    from ..recipes import sparsify as recipe

    if (out is None) != report_only:
        raise BlockSparseError.expected("out", "--out FOLDER or --report-only", "both" if out else "neither")
    console = Console()
    folder = None if out is None else recipe.folder(out, model)
    stored = recipe.open_model(model)
    status = console.status("measuring which weights are faster block-sparse")
    with _warnings_of_the_library(console), status:
        new, made = recipe.sparsify_model(
            stored, tuple(skip or ()), density=density, block_size=block_size, criterion=criterion, scope=scope,
            tokens=tokens, force=force,
        )  # fmt: skip
    say(console, made.table(console.width))
    if folder is not None:
        path = recipe.save(stored, new, made, folder)
        say(console, f"wrote {path} and report.json")


@contextmanager
def _warnings_of_the_library(console: Console) -> Iterator[None]:
    """Print warnings of `blocksparse.sparsify` at the end, with the options of this command in place of arguments."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for each in caught:
        if not issubclass(each.category, SparsityWarning):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
            continue
        lines = [line for line in str(each.message).splitlines() if not line.strip().startswith("see help(")]
        text = re.sub(r"pass (data= to calibrate, or )?force=True and fine-tune", ADVICE, "\n".join(lines))
        say(console, text)
