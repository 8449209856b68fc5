"""`blocksparse bench`: our products against their peers, correctness first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from blocksparse.errors import BlockSparseError

bench = typer.Typer(name="bench", help="Measure against the peers, correctness first.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    # With a callback, typer keeps `linear` as a subcommand even while it is the only one.
    pass


@bench.command("linear")
def linear(
    hidden: Annotated[int, typer.Option(help="Features in and out.")] = 4096,
    block_size: Annotated[int, typer.Option(help="Rows and columns of a block.")] = 32,
    batch: Annotated[int, typer.Option(help="Tokens.")] = 64,
    densities: Annotated[
        str, typer.Option(help="Parts of the blocks that are stored.")
    ] = "1,0.5,0.25,0.1,0.05,0.03,0.01",
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    pass_: Annotated[str, typer.Option("--pass", help="forward, dgrad, wgrad or train.")] = "forward",
    against: Annotated[str, typer.Option(help="Peers, of dense, torch-bsr, bsr-matmul, csr-matmul and stk.")] = "dense",
    out: Annotated[Path, typer.Option(help="Folder for the JSON and the PNG.")] = Path("bench-out"),
    rounds: Annotated[int, typer.Option(help="Rounds of A B A B ... at most.")] = 21,
    budget: Annotated[float, typer.Option(help="Seconds of timing per density, about.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Of patterns and numbers.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, or cuda: CUDA graphs, copies of the weights in turn.")] = "cpu",
) -> None:
    """y = x W^T and its gradients: speed-up against density, as a table, JSON and a chart.

    Every result is checked against float64 first; a wrong one ends the run. Then all take turns in one process.
    """
    from blocksparse.ops.linear.specs import LinearSpec

    from .. import machine
    from ..bench import report
    from ..bench.linear import LinearBench

    specs = [LinearSpec(hidden, hidden, batch, block_size, density, dtype, pass_) for density in _densities(densities)]
    runner = LinearBench(_list(against), rounds=rounds, budget=budget, seed=seed, device=device)
    _folder(out)
    console = Console()
    results = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    stderr = Console(stderr=True)
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("checking and timing", total=len(specs))
        for spec in specs:
            progress.update(task, description=f"checking and timing, density {spec.density:g}")
            results.append(runner.run(spec))
            progress.advance(task)

    name = f"linear-{pass_}-{dtype}-h{hidden}-b{block_size}-t{batch}"
    if gpu := machine.machine(device)["gpu"]:
        name += f"-{machine.slug(gpu['name'])}"
    title = f"{pass_} {dtype}, hidden {hidden}, block {block_size}, {batch} tokens"
    console.print(report.table(results, title))
    for line in report.refusals(results):
        console.print(f"refused: {line}", style="yellow", markup=False, highlight=False)
    settings: dict[str, Any] = {
        "rounds": rounds,
        "budget": budget,
        "seed": seed,
        "device": device,
        "against": list(runner.against),
    }
    report.write_results(out / f"{name}.json", results, **settings)
    report.write_chart(out / f"{name}.png", results, title)
    console.print(f"wrote {out / name}.json and .png", highlight=False, soft_wrap=True)


@bench.command("conv2d")
def conv2d(
    layer: Annotated[str, typer.Option(help="A named shape: reach, resnet50-conv4-3x3, pixelcnn-16, ...")] = "reach",
    images: Annotated[int | None, typer.Option(help="Images at once, where not those of the layer.")] = None,
    block_size: Annotated[int, typer.Option(help="Rows and columns of a block of channels.")] = 32,
    pattern: Annotated[str, typer.Option(help="random (of the densities) or block-diagonal.")] = "random",
    densities: Annotated[str, typer.Option(help="Parts of the blocks that are stored.")] = "1,0.5,0.25,0.1",
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    pass_: Annotated[str, typer.Option("--pass", help="Of forward, dgrad, wgrad and train.")] = "forward,dgrad,wgrad",
    against: Annotated[str | None, typer.Option(help="Peers, of dense and grouped.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the JSON and the PNG.")] = Path("bench-out"),
    rounds: Annotated[int, typer.Option(help="Rounds of A B A B ... at most.")] = 21,
    budget: Annotated[float, typer.Option(help="Seconds of timing per density and pass, about.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Of patterns and numbers.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """A block-sparse 2-D convolution and its gradients: speed-up against density, as tables, JSON and charts.

    Every result is checked against float64 first; a wrong one ends the run. Then all take turns in one process.
    """
    from dataclasses import replace

    from blocksparse.ops.conv.specs import LAYERS

    from .. import machine
    from ..bench import report
    from ..bench.conv import ConvBench

    if layer not in LAYERS:
        raise BlockSparseError.expected("layer", f"one of {', '.join(LAYERS)}", repr(layer))
    shape = replace(LAYERS[layer], block=block_size, dtype=dtype, pattern=pattern)
    shape = shape if images is None else replace(shape, images=images)
    random = pattern == "random"
    passes = _list(pass_)
    specs = {
        name: [replace(shape, density=d, pass_=name) for d in (_densities(densities) if random else [shape.density])]
        for name in passes
    }
    peers = _list(against) if against is not None else ["dense"] if random else ["dense", "grouped"]
    runner = ConvBench(peers, rounds=rounds, budget=budget, seed=seed, device=device)
    _folder(out)
    console = Console()
    base = f"conv2d-{layer}-{pattern}-{dtype}-b{block_size}-n{shape.images}"
    if gpu := machine.machine(device)["gpu"]:
        base += f"-{machine.slug(gpu['name'])}"
    everything = []
    for name in passes:
        results = [runner.run(spec) for spec in specs[name]]
        everything += results
        what = f"{shape.out_channels}x{shape.in_channels}, {shape.kernel}x{shape.kernel} on {shape.size}x{shape.size}"
        title = f"{name} {dtype}, {what}, {shape.images} images, block {block_size}, {pattern}"
        console.print(report.table(results, title))
        for line in report.refusals(results):
            console.print(f"refused: {line}", style="yellow", markup=False, highlight=False)
        if random:
            report.write_chart(out / f"{base}-{name}.png", results, title)
    settings: dict[str, Any] = {
        "rounds": rounds,
        "budget": budget,
        "seed": seed,
        "device": device,
        "against": list(runner.against),
        "layer": layer,
    }
    report.write_results(out / f"{base}.json", everything, "block-sparse 2-D convolutions", **settings)
    console.print(f"wrote {out / base}.json" + (" and .png" if random else ""), highlight=False, soft_wrap=True)


@bench.command("lstm")
def lstm(
    cell: Annotated[str, typer.Option(help="lstm, mlstm or smallworld.")] = "lstm",
    width: Annotated[int, typer.Option(help="Units.")] = 2048,
    pattern: Annotated[str, typer.Option(help="barabasi_albert, watts_strogatz, random or dense.")] = "barabasi_albert",
    m: Annotated[str, typer.Option(help="Ties of barabasi_albert, or neighbors of watts_strogatz.")] = "8,4,2",
    densities: Annotated[str, typer.Option(help="Of random: parts of the blocks that are stored.")] = "0.25,0.1,0.03",
    batch: Annotated[int, typer.Option(help="Texts at once.")] = 64,
    seq: Annotated[int, typer.Option(help="Bytes of each.")] = 64,
    block_size: Annotated[int, typer.Option(help="Rows and columns of a block.")] = 32,
    embedding: Annotated[int, typer.Option(help="Features of a byte.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 by autocast.")] = "float32",
    pass_: Annotated[str, typer.Option("--pass", help="Of train (whole steps) and inference.")] = "train,inference",
    against: Annotated[
        str, typer.Option(help="Peers: dense and torch (torch.nn.LSTM) of equal parameters, dense-wide, torch-wide.")
    ] = "dense",
    out: Annotated[Path, typer.Option(help="Folder for the JSON and the PNG.")] = Path("bench-out"),
    rounds: Annotated[int, typer.Option(help="Rounds of A B A B ... at most.")] = 21,
    budget: Annotated[float, typer.Option(help="Seconds of timing per pattern and pass, about.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Of patterns and numbers.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, or cuda: a step as one CUDA graph.")] = "cpu",
) -> None:
    """Language models over bytes with recurrent layers: speed-up of steps and of inference, as tables, JSON and charts.

    Every model is checked in small against float64 first; a wrong one ends the run. Then all take turns in one process.
    """
    from dataclasses import replace

    from .. import machine
    from ..bench import lstm, report
    from ..models.char_lm import CharLMConfig

    base = CharLMConfig(cell=cell, width=width, embedding=embedding, pattern=pattern, block_size=block_size, seed=seed)
    variants: dict[str, list[dict[str, Any]]] = {
        "barabasi_albert": [{"m": ties} for ties in _ints("m", m)],
        "watts_strogatz": [{"neighbors": ties} for ties in _ints("m", m)],
        "random": [{"density": density} for density in _densities(densities)],
        "dense": [{}],
    }
    configs = [replace(base, **changes) for changes in variants[pattern]]
    passes = _list(pass_)
    specs = {name: [lstm.LstmSpec(config, batch, seq, dtype, name) for config in configs] for name in passes}
    runner = lstm.LstmBench(_list(against), rounds=rounds, budget=budget, seed=seed, device=device)
    _folder(out)
    console = Console()
    file = f"lstm-{cell}-{pattern}-{dtype}-w{width}-b{block_size}-n{batch}x{seq}"
    if gpu := machine.machine(device)["gpu"]:
        file += f"-{machine.slug(gpu['name'])}"
    everything = []
    for name in passes:
        results = [runner.run(spec) for spec in specs[name]]
        everything += results
        title = f"{name} {dtype}, {cell} of width {width}, {pattern}, block {block_size}, batch {batch}, seq {seq}"
        console.print(lstm.table(results, title))
        for line in report.refusals(results):
            console.print(f"refused: {line}", style="yellow", markup=False, highlight=False)
        lstm.write_chart(out / f"{file}-{name}.png", results, title)
    settings: dict[str, Any] = {
        "rounds": rounds,
        "budget": budget,
        "seed": seed,
        "device": device,
        "against": list(runner.against),
    }
    report.write_results(out / f"{file}.json", everything, "block-sparse recurrent language models", **settings)
    console.print(f"wrote {out / file}.json and .png", highlight=False, soft_wrap=True)


def _densities(text: str) -> list[float]:
    return _numbers("densities", text, float, "numbers with commas between, as in 1,0.5,0.1")


def _ints(name: str, text: str) -> list[int]:
    return _numbers(name, text, int, "ints with commas between, as in 8,4,2")


def _numbers(name: str, text: str, kind: Any, expected: str) -> list[Any]:
    try:
        numbers = [kind(part) for part in _list(text)]
    except ValueError:
        numbers = []
    if not numbers:
        raise BlockSparseError.expected(name, expected, repr(text))
    return list(dict.fromkeys(numbers))


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BlockSparseError.expected("out", "a folder to write to", f"{path} ({error.strerror})") from error
