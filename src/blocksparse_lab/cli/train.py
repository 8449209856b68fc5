"""`blocksparse train`: training runs in a folder each; the same command goes on with one that stopped."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from blocksparse.errors import BlockSparseError

if TYPE_CHECKING:
    from ..models.char_lm import CharLMConfig
    from ..recipes.trainer import Trainer, Watcher

train = typer.Typer(
    name="train", help="Train a model in a folder; the same command again goes on with it.", no_args_is_help=True
)

# Without a terminal, a line of progress is printed this often at most.
SECONDS_BETWEEN_LINES = 10


@train.callback()
def _train() -> None:
    # With a callback, typer keeps `charlm` as a subcommand even while it is the only one.
    pass


@train.command("charlm")
def charlm(
    out: Annotated[Path, typer.Option(help="The run's folder. A run that is there goes on.")],
    text: Annotated[Path | None, typer.Option(help="Train on this file.")] = None,
    data: Annotated[str | None, typer.Option(help="Or on a text by name: enwik8, text8, imdb, python, ...")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="A folder with the text; else it is downloaded.")] = None,
    cell: Annotated[str, typer.Option(help="lstm, mlstm or smallworld.")] = "lstm",
    width: Annotated[int | None, typer.Option(help="Hidden units of a layer; 1024 where not said.")] = None,
    params: Annotated[str | None, typer.Option(help="Or so many parameters, as 800k or 2.5M: finds the width.")] = None,
    layers: Annotated[int, typer.Option(help="Recurrent layers.")] = 1,
    depth: Annotated[int, typer.Option(help="Of smallworld: steps through the graph within a time step.")] = 4,
    embedding: Annotated[int, typer.Option(help="Features of a byte.")] = 64,
    pattern: Annotated[str, typer.Option(help="dense, barabasi_albert, watts_strogatz or random.")] = "dense",
    block_size: Annotated[int, typer.Option(help="Rows and columns of a block.")] = 32,
    m: Annotated[int, typer.Option(help="Of barabasi_albert: edges of each new node.")] = 8,
    neighbors: Annotated[int, typer.Option(help="Of watts_strogatz, of each node.")] = 8,
    rewire: Annotated[float, typer.Option(help="Of watts_strogatz: part of the edges drawn anew.")] = 0.2,
    density: Annotated[float, typer.Option(help="Of random: part of the blocks.")] = 0.1,
    steps: Annotated[int, typer.Option(help="Of the whole run.")] = 10_000,
    batch: Annotated[int, typer.Option(help="Streams of text side by side.")] = 64,
    seq: Annotated[int, typer.Option(help="Bytes of a stream per step.")] = 128,
    lr: Annotated[float, typer.Option(help="The highest learning rate.")] = 0.002,
    warmup: Annotated[int, typer.Option(help="Steps over which it rises.")] = 100,
    decay: Annotated[str, typer.Option(help="How it falls after that: linear or cosine, to 0, or none.")] = "linear",
    weight_decay: Annotated[float, typer.Option(help="Of the weights, decoupled.")] = 0.0,
    clip: Annotated[float, typer.Option(help="The gradient's largest norm; 0 for any.")] = 1.0,
    ema: Annotated[float, typer.Option(help="Evaluate a running mean of the weights of this decay; 0: none.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 by autocast.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    cuda_graph: Annotated[bool, typer.Option("--cuda-graph", help="On cuda: a step as one graph.")] = False,
    held_out: Annotated[float, typer.Option(help="Part of the text, its tail, to evaluate on.")] = 0.1,
    eval_bytes: Annotated[int, typer.Option(help="Held-out bytes per evaluation; 0 for all.")] = 0,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0: at the end.")] = 500,
    log_every: Annotated[int, typer.Option(help="Steps between lines of the log.")] = 20,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints, at least one in 5 minutes.")] = 500,
    seed: Annotated[int, typer.Option(help="Of pattern, weights and whatever is drawn.")] = 0,
) -> None:
    """A language model of bytes: the next byte from all before, dense or block-sparse.

    Ctrl-C finishes the step and saves.
    """
    from ..data import corpora
    from ..data import text as texts
    from ..models.char_lm import CharLMConfig, width_for
    from ..recipes import charlm as recipes
    from ..recipes.memory import check_room
    from ..recipes.trainer import Settings, Trainer, device_of

    if (text is None) == (data is None):
        raise BlockSparseError.expected("text", "--text FILE or --data NAME", "neither" if text is None else "both")
    if width is not None and params is not None:
        raise BlockSparseError.expected("size", "--width or --params", "both")
    config = CharLMConfig(
        cell=cell, width=_any_width(width, block_size), embedding=embedding, layers=layers, depth=depth,
        pattern=pattern, block_size=block_size, m=m, neighbors=neighbors, rewire=rewire, density=density, seed=seed,
    )  # fmt: skip
    if params is not None:
        wanted = parse_count(params)
        check_room(f"params {wanted:,}", wanted)
        config = width_for(config, wanted)
    settings = Settings(
        steps=steps, learning_rate=lr, warmup=warmup, decay=decay, weight_decay=weight_decay, clip=clip, ema=ema,
        dtype=dtype, device=device, cuda_graph=cuda_graph, eval_every=eval_every, log_every=log_every,
        save_every=save_every, seed=seed,
    )  # fmt: skip
    console = Console()
    if text is not None:
        content, name = texts.read(text), text.name
    else:
        content, name = corpora.load(str(data), data_dir), str(data)
    parts = texts.split(content, seq, name=name, held_out=held_out)
    model = recipes.network(config)
    facts = recipes.facts(config, name)
    task = recipes.CharLMTask(model, parts, batch, seq, eval_bytes, device_of(device))
    said = f"{name}: {len(parts.train):,} bytes to train on, {len(parts.held_out):,} held out"
    console.print(f"[bold]{_named(config)}[/], width {config.width:,}", highlight=False)
    console.print(
        f"{facts['parameters']:,} parameters, recurrent density {facts['density']:.3g}, "
        f"{facts['multiply_adds_per_byte']:,} multiply-adds per byte",
        highlight=False,
    )
    console.print(said, style="dim", highlight=False)
    show(console, Trainer(task, out, settings, facts))


@train.command("mlp")
def mlp(
    out: Annotated[Path, typer.Option(help="The run's folder. A run that is there goes on.")],
    data: Annotated[str | None, typer.Option(help="fashion_mnist, cifar10, madelon, higgs or a FILE.csv.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="A folder with its files; else they are downloaded.")] = None,
    neurons: Annotated[str | None, typer.Option(help="Or so many, as 50M, with 65,536 inputs; synthetic rows.")] = None,
    method: Annotated[str, typer.Option(help="set, rigl, fixed (sparse, never changed) or dense.")] = "set",
    epochs: Annotated[int | None, typer.Option(help="Of the whole run; as others below, by the data's recipe.")] = None,
    hidden: Annotated[str | None, typer.Option(help="Features of the hidden layers, as 1000,1000,1000.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="About epsilon (n_in + n_out) connections of a layer.")] = None,
    zeta: Annotated[float | None, typer.Option(help="Of set: the part that is replaced after an epoch.")] = None,
    evolve_every: Annotated[int | None, typer.Option(help="Of set: epochs from one evolution to the next.")] = None,
    regrow: Annotated[
        str | None, typer.Option(help="Of set: first values of new connections: zeros, he, xavier.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="The slope of All-ReLU.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Of the hidden layers' outputs.")] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate, the same throughout.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of SGD.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of all weights, not multiplied by the rate.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows of a step.")] = None,
    importance_from: Annotated[
        int | None, typer.Option(help="Prune the least important neurons after so many epochs.")
    ] = None,
    importance_every: Annotated[int, typer.Option(help="Epochs from one such pruning to the next.")] = 10,
    importance_percentile: Annotated[float, typer.Option(help="Of the neurons of a layer, each time.")] = 20,
    rows: Annotated[int, typer.Option(help="Of --neurons: synthetic rows to train on.")] = 512,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of layouts, weights, order and whatever is drawn.")] = 0,
) -> None:
    """A truly sparse network on a table, by the recipe of the papers for it: nothing dense is ever stored.

    Ctrl-C finishes the step and saves.
    """
    from ..data import tables
    from ..data.synthetic import Synthetic
    from ..recipes import mlp as recipes

    if (data is None) == (neurons is None):
        got = "neither" if data is None else "both"
        raise BlockSparseError.expected("data", "--data NAME, --data FILE.csv or --neurons", got)
    if neurons is not None and hidden is not None:
        raise BlockSparseError.expected("size", "--neurons or --hidden", "both")
    given: dict[str, Any] = {
        "epochs": epochs, "epsilon": epsilon, "zeta": zeta, "alpha": alpha, "dropout": dropout, "learning_rate": lr,
        "momentum": momentum, "weight_decay": weight_decay, "batch": batch, "evolve_every": evolve_every,
        "regrow": regrow,
        "hidden": None if hidden is None else parse_sizes(hidden),
    }  # fmt: skip
    if neurons is not None:
        recipe = recipes.extreme(parse_count(neurons, "neurons"))
        table: recipes.Data = Synthetic(recipes.EXTREME_FEATURES, rows, max(1, rows // 4))
    else:
        recipe, table = recipes.recipe_for(str(data)), tables.load(str(data), data_dir)
    recipe = replace(recipe, **{key: value for key, value in given.items() if value is not None})
    trainer = recipes.trainer(
        recipe, table, out, method, seed, device, importance_from=importance_from, importance_every=importance_every,
        importance_percentile=importance_percentile,
    )  # fmt: skip
    facts, epochs = trainer.facts, recipe.epochs
    console = Console()
    sizes = "-".join(f"{size:,}" for size in trainer.task.about()["model"]["sizes"])
    console.print(f"[bold]{method}, {sizes}[/], All-ReLU {recipe.alpha:g}", highlight=False)
    console.print(
        f"{facts['neurons']:,} neurons, {facts['connections']:,} connections, density {facts['density']:.3g}, "
        f"{facts['stored_bytes'] / 1e6:,.1f} MB",
        highlight=False,
    )
    said = f"{table.name}: {table.rows:,} rows to train on, {len(table.classes)} classes; "
    said += f"{epochs:,} epoch{'s' * (epochs != 1)} of {trainer.settings.steps // epochs:,} steps"
    console.print(said, style="dim", highlight=False)
    show(console, trainer)


def parse_sizes(text: str, name: str = "hidden") -> tuple[int, ...]:
    """Sizes such as the features of hidden layers.

    >>> parse_sizes("4000,1000,4000")
    (4000, 1000, 4000)
    """
    if not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", text):
        raise BlockSparseError.expected(name, "positive ints with commas between, such as 1000,1000", repr(text))
    return tuple(map(int, text.split(",")))


def parse_count(text: str, name: str = "params") -> int:
    """A number with k, M or G behind it, or without.

    >>> [parse_count(text) for text in ("800k", "2.5M", "1_000")]
    [800000, 2500000, 1000]
    """
    found = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?)\s*([kmgb]?)", text.strip(), re.IGNORECASE)
    if not found:
        raise BlockSparseError.expected(name, "a number such as 800k, 2.5M or 1000000", repr(text))
    number = float(re.sub("[_,]", "", found.group(1)))
    return round(number * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}[found.group(2).lower()])


def show(console: Console, trainer: Trainer) -> None:
    """Trains with progress shown; prints at the end the result, or how to resume."""
    from ..recipes.trainer import Interrupted

    try:
        with _watcher(console, trainer) as watch:
            result = trainer.train(watch)
    except Interrupted as stop:
        console.print(
            f"stopped after step {stop.step:,} of {trainer.settings.steps:,}; {trainer.path} is saved. "
            "The same command goes on.",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(128 + stop.number) from None
    console.print(
        f"held out [bold]{result['held_out']:.4f}[/] {result['unit']} after {result['steps']:,} steps, "
        f"{_duration(result['seconds'])}, {result['bytes_per_second']:,.0f} bytes/s",
        highlight=False,
    )
    console.print(f"{trainer.path} and result.json are there", style="dim", highlight=False, soft_wrap=True)


# -- pieces --------------------------------------------------------------------------------------------------------


def _any_width(width: int | None, block_size: int) -> int:
    """The requested width, or 1024 rounded down to a multiple of the block."""
    return width if width is not None else max(1, 1024 // max(1, block_size)) * max(1, block_size)


def _named(config: CharLMConfig) -> str:
    wired = {
        "dense": "dense",
        "barabasi_albert": f"Barabasi-Albert with m {config.m}",
        "watts_strogatz": f"Watts-Strogatz with {config.neighbors} neighbors, {config.rewire:g} rewired",
        "random": f"random of density {config.density:g}",
    }[config.pattern]
    blocks = "" if config.pattern == "dense" else f" in blocks of {config.block_size}"
    inner = f" of depth {config.depth}" if config.cell == "smallworld" else ""
    layers = f", {config.layers} layers" if config.layers > 1 else ""
    return f"{config.cell}{inner}, {wired}{blocks}{layers}"


@contextmanager
def _watcher(console: Console, trainer: Trainer) -> Iterator[Watcher]:
    if not console.is_terminal:
        yield _lines(console, trainer)
        return
    columns = (
        TextColumn("{task.fields[shown]}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _bar(progress, trainer)


def _began(console: Console, trainer: Trainer, step: int) -> None:
    if step == trainer.settings.steps:
        console.print("this run is finished", style="green")
    elif step:
        console.print(f"goes on after step {step:,}", style="green", highlight=False)


def _loss_unit(trainer: Trainer) -> str:
    return getattr(trainer.task, "loss_unit", trainer.task.unit)


def _short(unit: str) -> str:
    return {"bits per character": "bpc", "bits per dimension": "bpd"}.get(unit, unit)


def _bar(progress: Progress, trainer: Trainer) -> Watcher:
    """A bar with the newest figures."""
    from ..recipes.trainer import Watcher

    class Bar(Watcher):
        shown: dict[str, str]

        def began(self, step: int) -> None:
            self.shown = {}
            _began(progress.console, trainer, step)
            self.task = progress.add_task("", total=trainer.settings.steps, completed=step, shown="training")

        def stepped(self, step: int) -> None:
            progress.update(self.task, completed=step)

        def logged(self, record: Mapping[str, Any]) -> None:
            if "loss" in record:
                self.shown["loss"] = f"[bold]{record['loss']:.3f}[/] {_short(_loss_unit(trainer))}"
                self.shown["speed"] = f"{record['bytes_per_second']:,.0f} bytes/s"
            else:
                self.shown["held out"] = f"held out [bold]{record['held_out']:.3f}[/]"
                progress.console.print(_line(record, trainer), highlight=False)
            order = [self.shown[key] for key in ("loss", "held out", "speed") if key in self.shown]
            progress.update(self.task, shown="  ".join(order))

        def note(self, text: str) -> None:
            progress.console.print(text, style="yellow", markup=False, highlight=False)

    return Bar()


def _lines(console: Console, trainer: Trainer) -> Watcher:
    """Every evaluation as a line, and other figures now and then."""
    from ..recipes.trainer import Watcher

    class Lines(Watcher):
        last = 0.0

        def began(self, step: int) -> None:
            _began(console, trainer, step)

        def logged(self, record: Mapping[str, Any]) -> None:
            now = time.monotonic()
            if "held_out" in record or now - self.last >= SECONDS_BETWEEN_LINES:
                self.last = now
                console.print(_line(record, trainer), highlight=False, soft_wrap=True)

        def note(self, text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    return Lines()


def _line(record: Mapping[str, Any], trainer: Trainer) -> str:
    said = f"step {record['step']:,} of {trainer.settings.steps:,}: "
    if "held_out" in record:
        return said + f"held out {record['held_out']:.4f} {trainer.task.unit}"
    left = (trainer.settings.steps - record["step"]) * trainer.task.bytes_per_step / record["bytes_per_second"]
    return (
        said + f"{record['loss']:.4f} {_loss_unit(trainer)}, {record['bytes_per_second']:,.0f} bytes/s, "
        f"{_duration(left)} left"
    )


def _duration(seconds: float) -> str:
    """
    >>> _duration(5), _duration(75), _duration(7300)
    ('5 s', '1 min 15 s', '2 h 1 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
