"""`blocksparse compress`: make the model of a run block-sparse, and train it to agree with the dense one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocksparse.errors import BlockSparseError

from .options import DataDir
from .progress import console
from .terminal import make_folder, say


def compress(
    run: Annotated[
        Path,
        typer.Argument(
            help="Finished run of blocksparse train charlm, gpt, resnet or mlp, or a folder of transformers."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint and the curve; resumes an interrupted call.")],
    density: Annotated[float, typer.Option(help="Fraction of the parameters that the pruned weights keep.")] = 0.1,
    block_size: Annotated[
        int | None, typer.Option(help="Rows and columns of a block; 16 or 32 by default.", show_default=False)
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Time to use; by default 10.", show_default=False)] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps, instead of a time.")] = None,
    data: Annotated[str | None, typer.Option(help="Name or file of the data, if it is not the run's.")] = None,
    data_dir: DataDir = None,
    skip: Annotated[list[str] | None, typer.Option(help="Module or weight to leave dense; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Make the model of a run block-sparse in stages, and train it to agree with the dense model.

    A folder of transformers has a model and its tokenizer; --data is then a text. Layers that are not faster
    block-sparse stay dense. The model that is best on an eighth of the training data is written. Test data are only
    used for the two figures that are printed at the end. Ctrl-C writes the best model so far.
    """
    from ..recipes import compress as recipe
    from ..recipes import compress_folder

    if out.resolve() == run.resolve():
        raise BlockSparseError.expected("out", "another folder than the run's", out)
    is_folder = compress_folder.is_folder(run)
    opened = compress_folder.open_folder(run, data) if is_folder else recipe.open_run(run, data, data_dir)
    make_folder(out)
    result, written = recipe.compress(
        opened, out, density=density, block_size=block_size, minutes=minutes, steps=steps, skip=tuple(skip or ()),
        seed=seed,
    )  # fmt: skip
    screen = console()
    say(screen, result.table())
    unit, figures = opened.unit, [opened.held_out(model) for model in (opened.model, result.model)]
    say(screen, f"{figures[0]:.4g} {unit} before, {figures[1]:.4g} compressed")
    written += [name for name in ("curve.json", recipe.PICTURE) if (out / name).is_file()]
    say(screen, f"wrote {', '.join(written)} in {out}")
