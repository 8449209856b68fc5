"""`blocksparse train resnet`: a residual network on small images, and what circular shifts of them do to it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blocksparse.errors import BlockSparseError

from .stages import stages
from .train import parse_sizes, show


def resnet(
    out: Annotated[Path, typer.Option(help="The run's folder. A run that is there goes on.")],
    data: Annotated[str, typer.Option(help="cifar10 or fashion_mnist.")] = "cifar10",
    data_dir: Annotated[Path | None, typer.Option(help="A folder with its files; else they are downloaded.")] = None,
    downsample: Annotated[str, typer.Option(help="stride, or aps: adaptive polyphase sampling.")] = "stride",
    width: Annotated[int, typer.Option(help="Channels of the first stage, doubled from stage to stage.")] = 8,
    blocks: Annotated[str, typer.Option(help="Residual blocks of each stage.")] = "1,1,1,1",
    density: Annotated[float | None, typer.Option(help="Of the convolutions' blocks; dense where not said.")] = None,
    block_size: Annotated[int, typer.Option(help="Of channels, where there is a density.")] = 8,
    blur: Annotated[int, typer.Option(help="Of aps: the size of its low-pass filter; 1 for none.")] = 1,
    padding_mode: Annotated[
        str | None, typer.Option(help="zeros or circular; aps has circular, stride zeros where not said.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Of the whole run.")] = 6,
    batch: Annotated[int, typer.Option(help="Images of a step.")] = 64,
    lr: Annotated[float, typer.Option(help="The highest learning rate.")] = 0.01,
    weight_decay: Annotated[float, typer.Option(help="Of the weights, decoupled.")] = 0.01,
    shifted: Annotated[int, typer.Option(help="Test images to see at all of their circular shifts; 0: none.")] = 64,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of weights, order, crops and mirrors.")] = 0,
) -> None:
    """A residual network on small images, with strides or blind to circular shifts: its error and its consistency.

    Ctrl-C finishes the step and saves.
    """
    from ..data import images
    from ..recipes import resnet as recipes

    if shifted < 0:
        raise BlockSparseError.expected("shifted", "an int, 0 or more", shifted)
    given = {**locals(), "blocks": parse_sizes(blocks, "blocks"), "learning_rate": lr}
    recipe = recipes.Recipe(**{field.name: given[field.name] for field in fields(recipes.Recipe)})
    console = Console()
    loaded = images.load(data, data_dir)
    trainer = recipes.trainer(recipe, loaded, out, seed, device)
    channels = "-".join(str(recipe.width << stage) for stage in range(len(recipe.blocks)))
    sparse = "" if density is None else f", density {density:g} in blocks of {block_size}"
    console.print(f"[bold]resnet, {downsample}[/], {channels} channels{sparse}", highlight=False)
    said = f"{trainer.facts['parameters']:,} parameters; {data}: {len(loaded.train):,} images to train on, "
    said += f"{len(loaded.test):,} to test on; {epochs:,} epoch{'s' * (epochs != 1)}"
    console.print(said, style="dim", highlight=False)
    show(console, trainer)
    if not shifted:
        return
    with stages(console) as tell:
        found = recipes.shifted(out, loaded, shifted, lambda done, of: tell("shifts", done, of))
    console.print(
        f"consistency [bold]{100 * found.agreement:.2f} %[/] over all pairs of {found.shifts:,} circular shifts, "
        f"{found.images:,} test image{'s' * (found.images != 1)}; logits differ by up to {found.difference:.1e}",
        highlight=False,
        soft_wrap=True,
    )
