"""`blocksparse train pixelcnn`: images, pixel by pixel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .train import show


def pixelcnn(
    out: Annotated[Path, typer.Option(help="The run's folder. A run that is there goes on.")],
    data: Annotated[str, typer.Option(help="cifar10 or fashion_mnist.")] = "cifar10",
    data_dir: Annotated[Path | None, typer.Option(help="A folder with its files; else they are downloaded.")] = None,
    filters: Annotated[int, typer.Option(help="Channels of all layers; 160 in the paper.")] = 32,
    resnets: Annotated[int, typer.Option(help="Gated residual layers of each resolution; 5 in the paper.")] = 1,
    sparse: Annotated[int | None, typer.Option(help="Groups of channels of each layer; dense where not said.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Of groups: our kernels, in such blocks; else PyTorch's grouped convolutions.")
    ] = None,
    depth: Annotated[int, typer.Option(help="Times as many gated residual layers.")] = 1,
    mixtures: Annotated[int, typer.Option(help="Logistics of a pixel.")] = 10,
    dropout: Annotated[float, typer.Option(help="Within each gated residual layer.")] = 0.5,
    steps: Annotated[int, typer.Option(help="Of the whole run.")] = 10_000,
    batch: Annotated[int, typer.Option(help="Images of a step.")] = 16,
    lr: Annotated[float, typer.Option(help="The learning rate at first.")] = 0.001,
    decay_per_step: Annotated[float, typer.Option(help="By which it is multiplied after each step.")] = 0.999995,
    decay: Annotated[str, typer.Option(help="How it falls besides: linear or cosine, to 0, or none.")] = "none",
    warmup: Annotated[int, typer.Option(help="Steps over which it rises.")] = 0,
    clip: Annotated[float, typer.Option(help="The gradient's largest norm; 0 for any.")] = 0.0,
    ema: Annotated[float, typer.Option(help="Evaluate a running mean of the weights of this decay; 0: none.")] = 0.9995,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 by autocast.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    eval_images: Annotated[int, typer.Option(help="Test images per evaluation; 0 for all.")] = 0,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0: at the end.")] = 1000,
    log_every: Annotated[int, typer.Option(help="Steps between lines of the log.")] = 20,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints, at least one in 5 minutes.")] = 500,
    seed: Annotated[int, typer.Option(help="Of weights, order and dropout.")] = 0,
) -> None:
    """PixelCNN++: images pixel by pixel, each from all before it; dense, or sparse in its channels and deeper.

    Ctrl-C finishes the step and saves.
    """
    from ..data import images
    from ..recipes import pixelcnn as recipes

    network = recipes.Network(
        filters=filters, resnets=resnets, mixtures=mixtures, dropout=dropout, sparse=sparse, block_size=block_size,
        depth=depth, seed=seed,
    )  # fmt: skip
    how = recipes.settings(
        steps, learning_rate=lr, decay_per_step=decay_per_step, decay=decay, warmup=warmup, clip=clip, ema=ema,
        dtype=dtype, device=device, eval_every=eval_every, log_every=log_every, save_every=save_every, seed=seed,
    )  # fmt: skip
    loaded = images.load(data, data_dir)
    trainer = recipes.trainer(network, loaded, out, how, batch, eval_images)
    wired = "dense" if sparse is None else f"{sparse} groups of channels"
    wired += "" if block_size is None else f" in blocks of {block_size}"
    console = Console()
    console.print(f"[bold]PixelCNN++, {wired}[/], {filters} filters, {resnets * depth} deep", highlight=False)
    said = f"{trainer.facts['parameters']:,} parameters; {data}: {len(loaded.train):,} images to train on, "
    said += f"{trainer.facts['tested']:,} to test on"
    console.print(said, style="dim", highlight=False)
    show(console, trainer)
