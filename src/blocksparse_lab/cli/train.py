"""`blocksparse train`: train models in run folders; the same command resumes a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from math import lcm
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.markup import escape

from blocksparse.checked import integer
from blocksparse.errors import BlockSparseError
from blocksparse.nn.module import BlockSparseModule

from ..data.text import Text
from ..models.char_lm import USED_BY, CharLMConfig, width_for
from ..models.gpt import GPTConfig
from ..recipes import charlm as charlm_recipe
from ..recipes import finetune as finetune_recipe
from ..recipes import gpt as gpt_recipe
from ..recipes import mlp as mlp_recipe
from ..recipes import pixelcnn as pixelcnn_recipe
from ..recipes import resnet as resnet_recipe
from ..training.parallel import Parallel
from ..training.settings import Settings
from .options import DataDir, Device, Given, Run, parse_count, with_options
from .progress import console, show
from .terminal import plural, stages

train = typer.Typer(
    name="train", help="Train a model in a run folder; the same command resumes the run.", no_args_is_help=True
)

S = TypeVar("S", bound=Settings)
Seed = Annotated[int, typer.Option(help="Random seed.")]
TextFile = Annotated[Path | None, typer.Option(help="Train on this file.")]
TextName = Annotated[str | None, typer.Option(help="Train on a text by name: enwik8, text8, imdb, python, ...")]
HeldOut = Annotated[float, typer.Option(help="Fraction of the text, its tail, to evaluate on.")]
ImageData = Annotated[str, typer.Option(help="cifar10 or fashion_mnist.")]


def _join_torchrun(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command join torchrun's processes, if it was started by torchrun."""

    @wraps(command)
    def joined(*, parallel: Parallel, **given: Any) -> None:
        with parallel.join(), warnings.catch_warnings():
            # The warning is about in-place changes of outputs that are views; the models here make none.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
            command(parallel=parallel, **given)

    return joined


@train.command("charlm")
@with_options
@_join_torchrun
def charlm(
    *,
    out: Run,
    text: TextFile = None,
    data: TextName = None,
    data_dir: DataDir = None,
    held_out: HeldOut = 0.1,
    width: Annotated[
        int | None, typer.Option(help="Hidden units per layer; by default about 1024.", show_default=False)
    ] = None,
    params: Annotated[str | None, typer.Option(help="Choose the width for this many parameters, such as 800k.")] = None,
    model: Annotated[dict[str, Any], CharLMConfig],
    how: Annotated[dict[str, Any], charlm_recipe.CharLMSettings],
    parallel: Parallel,
) -> None:
    """Train a language model of bytes, dense or block-sparse, to predict the next byte from all bytes before.

    Ctrl-C finishes the step and saves. Under torchrun all processes train together.
    """
    if width is not None and params is not None:
        raise BlockSparseError.expected("size", "--width or --params", "both")
    block = lcm(max(1, model["block_size"]), max(1, model["stride"]))
    usual = max(1, max(1024, 2 * model["projection"] if params is not None else 0) // block) * block
    config = CharLMConfig(**model, width=width if width is not None else usual)
    ignored = [
        f"--{name} has no effect with --pattern {config.pattern}, only with {', '.join(patterns)}"
        for name, patterns in USED_BY.items()
        if config.pattern not in patterns and getattr(config, name) != getattr(CharLMConfig, name)
    ]
    if params is not None:
        wanted = parse_count(params)
        mlp_recipe.check_room(f"params {wanted:,}", wanted)
        config = width_for(config, wanted)
    settings = _set_pace(charlm_recipe.CharLMSettings(model=config, **how), parallel)
    parts = _load_text(text, data, data_dir, settings.seq, held_out)
    trainer = charlm_recipe.trainer(settings, parts, out)
    facts = trainer.facts
    show(
        console(),
        trainer,
        f"[bold]{_describe_net(config)}[/], width {config.width:,}",
        f"{facts['parameters']:,} parameters, recurrent density {facts['density']:.3g}, "
        f"{facts['multiply_adds_per_byte']:,} multiply-adds per byte",
        *ignored,
        f"{escape(parts.name)}: {len(parts.train):,} bytes to train on, {len(parts.held_out):,} held out",
    )


@train.command("gpt")
@with_options
@_join_torchrun
def gpt(
    *,
    out: Run,
    text: TextFile = None,
    data: TextName = None,
    data_dir: DataDir = None,
    held_out: HeldOut = 0.1,
    model: Annotated[dict[str, Any], GPTConfig],
    how: Annotated[dict[str, Any], gpt_recipe.GPTSettings],
    seq: Annotated[int, typer.Option(help="Bytes of each stream per step, and of the context.")] = 128,
    parallel: Parallel,
) -> None:
    """Train a transformer of bytes, dense or block-sparse, to predict the next byte from up to --seq bytes.

    Ctrl-C finishes the step and saves. Under torchrun all processes train together.
    """
    config = GPTConfig(**model, context=integer("seq", seq, 1))
    parts = _load_text(text, data, data_dir, seq, held_out)
    trainer = gpt_recipe.trainer(_set_pace(gpt_recipe.GPTSettings(model=config, **how), parallel), parts, out)
    facts = trainer.facts
    sparse = f"density {facts['density']:.3g} in blocks of {config.block_size}, {config.method}"
    show(
        console(),
        trainer,
        f"[bold]gpt, {'dense' if config.density == 1 else sparse}[/], {plural(config.layers, 'layer')} of width "
        f"{config.width:,}, {plural(config.heads, 'head')}",
        f"{facts['parameters']:,} parameters, {facts['multiply_adds_per_byte']:,} multiply-adds per byte",
        f"{escape(parts.name)}: {len(parts.train):,} bytes to train on, {len(parts.held_out):,} held out",
    )


@train.command("mlp")
@with_options
@_join_torchrun
def mlp(
    *,
    out: Run,
    data: Annotated[
        str | None,
        typer.Option(help="fashion_mnist, cifar10, madelon, higgs or a FILE.csv of numbers with a column label."),
    ] = None,
    data_dir: DataDir = None,
    neurons: Annotated[
        str | None, typer.Option(help="A net of this many neurons, such as 50M, with 65,536 inputs, on synthetic rows.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="With --neurons: synthetic rows to train on, 512 by default.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="set, smet, chts, rigl, gradual, fixed (never changed), dense, or 2:4 (SR-STE).")
    ] = "set",
    device: Device = "cpu",
    seed: Seed = 0,
    given: Annotated[dict[str, Any], Given(mlp_recipe.MLPSettings)],
    parallel: Parallel,
) -> None:
    """Train a truly sparse network on a table, with the papers' settings for it; nothing dense is ever stored.

    Ctrl-C finishes the step and saves. Under torchrun all processes train together.
    """
    from ..data import tables

    if (data is None) == (neurons is None):
        got = "neither" if data is None else "both"
        raise BlockSparseError.expected("data", "--data NAME, --data FILE.csv or --neurons", got)
    if neurons is not None and "hidden" in given:
        raise BlockSparseError.expected("size", "--neurons or --hidden", "both")
    if neurons is None and rows is not None:
        raise BlockSparseError.expected("rows", "--neurons beside --rows", "--data")
    mlp_recipe.check_used(given, method)
    if neurons is not None:
        rows = 512 if rows is None else rows
        settings = mlp_recipe.extreme(parse_count(neurons, "neurons"))
        table: mlp_recipe.Data = mlp_recipe.extreme_data(rows, max(1, rows // 4))
    else:
        table = tables.load(str(data), data_dir)
        settings = mlp_recipe.settings_for(str(data), table.rows)
    settings = replace(settings, **given, shard=parallel.shard)
    trainer = mlp_recipe.trainer(settings, table, out)
    facts, sizes = trainer.facts, trainer.task.about()["model"]["sizes"]
    show(
        console(),
        trainer,
        f"[bold]{method}, {'-'.join(f'{size:,}' for size in sizes)}[/], All-ReLU {settings.alpha:g}",
        f"{facts['neurons']:,} neurons, {facts['connections']:,} connections, density {facts['density']:.3g}, "
        f"{facts['stored_bytes'] / 1e6:,.1f} MB",
        f"{escape(table.name)}: {table.rows:,} rows to train on, {len(table.classes)} classes; "
        f"{plural(settings.epochs, 'epoch')} of {trainer.task.steps_per_epoch:,} steps of {settings.batch:,} rows",
    )


@train.command("pixelcnn")
@with_options
@_join_torchrun
def pixelcnn(
    *,
    out: Run,
    data: ImageData = "cifar10",
    data_dir: DataDir = None,
    model: pixelcnn_recipe.SmallPixelCNNConfig,
    how: Annotated[dict[str, Any], pixelcnn_recipe.PixelCNNSettings],
    parallel: Parallel,
) -> None:
    """Train PixelCNN++, a model of images pixel by pixel: dense, or sparse in its channels and deeper.

    Ctrl-C finishes the step and saves. Under torchrun all processes train together.
    """
    from ..data import images

    loaded = images.load(data, data_dir)
    settings = _set_pace(pixelcnn_recipe.PixelCNNSettings(model=model, **how), parallel)
    trainer = pixelcnn_recipe.trainer(settings, loaded, out)
    wired = "dense" if model.sparse is None else f"{model.sparse} groups of channels"
    wired += "" if model.block_size is None else f" in blocks of {model.block_size}"
    show(
        console(),
        trainer,
        f"[bold]PixelCNN++, {wired}[/], {model.filters} filters, {model.resnets * model.depth} deep",
        f"{trainer.facts['parameters']:,} parameters; {data}: {len(loaded.train):,} images to train on, "
        f"{trainer.facts['tested']:,} to test on",
    )


@train.command("resnet")
@with_options
@_join_torchrun
def resnet(
    *,
    out: Run,
    data: ImageData = "cifar10",
    data_dir: DataDir = None,
    settings: resnet_recipe.ResNetSettings,
    shifted: Annotated[int, typer.Option(help="Test images to evaluate at all of their circular shifts.")] = 64,
    parallel: Parallel,
) -> None:
    """Train a residual network on small images, with strides or shift-invariant; report error and consistency.

    Ctrl-C finishes the step and saves. Under torchrun all processes train together.
    """
    from ..data import images

    if shifted < 0:
        raise BlockSparseError.expected("shifted", "an int, 0 or more", shifted)
    out_console = console()
    loaded = images.load(data, data_dir)
    if shifted:
        resnet_recipe.check_shifted(shifted, loaded)  # report this before training
    trainer = resnet_recipe.trainer(replace(settings, shard=parallel.shard), loaded, out)
    s = settings
    channels = "-".join(str(s.width << stage) for stage in range(len(s.blocks)))
    sparse = "" if s.density is None else f", density {s.density:g} in blocks of {s.block_size}"
    show(
        out_console,
        trainer,
        f"[bold]resnet, {s.downsample}[/], {channels} channels{sparse}",
        f"{trainer.facts['parameters']:,} parameters; {data}: {len(loaded.train):,} images to train on, "
        f"{len(loaded.test):,} to test on; {plural(s.epochs, 'epoch')}",
    )
    if not shifted or not parallel.first:
        return
    with stages(out_console) as tell:
        consistency = resnet_recipe.shift_consistency(out, loaded, shifted, lambda done, of: tell("shifts", done, of))
    out_console.print(
        f"consistency [bold]{100 * consistency.agreement:.2f} %[/] over all pairs of {consistency.shifts:,} "
        f"circular shifts, {plural(consistency.images, 'test image')}; "
        f"logits differ by up to {consistency.difference:.1e}",
        highlight=False,
        soft_wrap=True,
    )


@train.command("sentiment")
@with_options
@_join_torchrun
def sentiment(
    *,
    out: Run,
    model: Annotated[Path, typer.Option(help="The language model: a charlm run folder or checkpoint.")],
    data: Annotated[str, typer.Option(help="sst, imdb, or a csv file with columns text and label.")] = "imdb",
    data_dir: DataDir = None,
    limit: Annotated[int | None, typer.Option(help="About this many texts per part, for a quick test.")] = None,
    settings: finetune_recipe.FinetuneSettings,
    parallel: Parallel,
) -> None:
    """Fine-tune a language model of bytes end to end to classify texts.

    Ctrl-C finishes the step and saves. Under torchrun all processes train together.
    """
    from ..data import reviews
    from ..recipes.text_features import digest

    reader = charlm_recipe.load(model)
    with stages(console()) as tell:
        splits = reviews.load(
            data, data_dir, settings.seed, lambda done, total: tell(f"downloading {data}", done, total)
        )
    splits = splits if limit is None else splits.limited(limit, settings.seed)
    weights = digest(model / "last.safetensors" if model.is_dir() else model)
    trainer = finetune_recipe.trainer(reader, splits, out, replace(settings, shard=parallel.shard), weights)
    out_console = console()
    pruned = reader.config.pattern == "dense" and any(isinstance(of, BlockSparseModule) for of in reader.modules())
    sizes = [len(part) for part in (splits.train, splits.validation, splits.test)]
    show(
        out_console,
        trainer,
        f"[bold]{_describe_net(reader.config)}{', made sparse' * pruned}[/], width {reader.config.width:,}, of "
        + escape(str(model)),
        f"{trainer.facts['parameters']:,} parameters; at most the last {settings.longest:,} bytes of a text",
        escape(f"{splits.name}, {splits.classes[0]} or {splits.classes[1]}: ")
        + "{:,} texts to train on, {:,} to choose with, {:,} to test".format(*sizes),
    )
    if not parallel.first:
        return
    with stages(out_console) as tell:
        error = finetune_recipe.evaluate(out, splits, settings.device, lambda done, of: tell("testing", done, of))
    out_console.print(f"test error [bold]{error:.2f} %[/] of {plural(sizes[2], 'text')}", highlight=False)


def _load_text(text: Path | None, data: str | None, data_dir: Path | None, seq: int, held_out: float) -> Text:
    """Load the text to train and to evaluate on."""
    from ..data import corpora
    from ..data import text as texts

    if (text is None) == (data is None):
        raise BlockSparseError.expected("text", "--text FILE or --data NAME", "neither" if text is None else "both")
    content, name = (corpora.load(str(data), data_dir), str(data)) if text is None else (texts.read(text), text.name)
    return texts.split(content, seq, name=name, held_out=held_out)


def _set_pace(how: S, parallel: Parallel) -> S:
    """Log and evaluate a short run often enough for curves, unless the user chose how often."""
    usual = type(how)()
    often: dict[str, Any] = {
        name: max(1, how.steps // times)
        for name, times in (("log_every", 20), ("eval_every", 10))
        if getattr(how, name) == getattr(usual, name) > max(1, how.steps // times)
    }
    return replace(how, shard=parallel.shard, **often)


def _describe_net(config: CharLMConfig) -> str:
    """Describe the cell and the recurrent weights."""
    wired = {
        "dense": "dense",
        "barabasi_albert": f"Barabasi-Albert with m {config.m}",
        "watts_strogatz": f"Watts-Strogatz with {config.neighbors} neighbors, {config.rewire:g} rewired",
        "random": f"random of density {config.density:g}",
        "random_diagonal": f"random of density {config.density:g} with the diagonal",
        "block_diagonal": "squares on the diagonal",
    }[config.pattern]
    blocks = "" if config.pattern == "dense" else f" in blocks of {config.block_size}"
    inner = f" of depth {config.depth}" if config.cell == "smallworld" else ""
    layers = f", {config.layers} layers" if config.layers > 1 else ""
    return f"{config.cell}{inner}, {wired}{blocks}{layers}"
