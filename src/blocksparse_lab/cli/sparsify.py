"""`blocksparse sparsify`: a checkpoint with block-sparse weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blocksparse.errors import BlockSparseError

from .terminal import say


def sparsify(
    model: Annotated[
        Path,
        typer.Argument(
            help="A byte model's checkpoint or run, a folder of transformers, or a *.safetensors of weights."
        ),
    ],
    density: Annotated[float, typer.Option(help="Part of the weights to keep.")] = 0.1,
    block_size: Annotated[int, typer.Option(help="Rows and columns of a block.")] = 32,
    criterion: Annotated[str, typer.Option(help="Score of a block: l2, magnitude, max or lamp.")] = "lamp",
    scope: Annotated[
        str, typer.Option(help="One threshold with a floor (careful) or without (global), each alone (layer), or erk.")
    ] = "careful",
    skip: Annotated[list[str] | None, typer.Option(help="A module or weight to leave dense; again for others.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder for the checkpoint and report.json.")] = None,
    tokens: Annotated[int, typer.Option(help="Rows of the inputs to be fast for.")] = 64,
    force: Annotated[bool, typer.Option("--force", help="Also where dense is faster; else such weights stay.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Only say what would come of it.")] = False,
) -> None:
    """Drop the blocks with the lowest scores from a trained model; write it and say what came of each weight.

    In a *.safetensors of weights all that is 2-D is a linear weight, but for names with "emb" in them.
    """
    from ..recipes import sparsify as recipe

    if (out is None) != report_only:
        raise BlockSparseError.expected("out", "--out FOLDER or --report-only", "both" if out else "neither")
    console = Console()
    folder = None if out is None else recipe.folder(out, model)
    stored = recipe.open_model(model)
    with console.status("measuring which weights are faster block-sparse"):
        new, made = recipe.sparsified(
            stored, tuple(skip or ()), density=density, block_size=block_size, criterion=criterion, scope=scope,
            tokens=tokens, force=force,
        )  # fmt: skip
    say(console, made.table(console.width))
    if folder is not None:
        path = recipe.save(stored, new, made, folder)
        say(console, f"wrote {path} and report.json")
