"""`blocksparse bench`: time our products against their peers, after a check of all results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from blocksparse.errors import BlockSparseError
from blocksparse.measure import BUDGET, ROUNDS

from ..option import option
from .options import with_options
from .terminal import bar, make_folder, say

if TYPE_CHECKING:
    from ..bench.case import Bench

bench = typer.Typer(name="bench", help="Check results, then compare speed with other libraries.", no_args_is_help=True)

BlockSize = Annotated[int, typer.Option(help="Rows and columns of a block.")]
Densities = Annotated[str, typer.Option(help="Fractions of the blocks that random patterns store.")]
Dtype = Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")]


Out = Annotated[Path, typer.Option(help="Folder for the JSON and the PNG.")]
OUT = Path("bench-out")


@dataclass(frozen=True)
class Measured:
    """How to time cases."""

    rounds: int = option(ROUNDS, "At most this many rounds A B A B ...")
    budget: float = option(BUDGET, "Approximate seconds of timing per case.")
    seed: int = option(0, "Random seed.")
    device: str = option("cpu", "cpu, or cuda, with CUDA graphs and copies of the weights in turn.")

    def by(self, kind: type[Bench], against: str) -> Bench:
        return kind(parts(against), **asdict(self))


@bench.callback()
def _bench() -> None:
    # With a callback, typer keeps subcommands even if there is only one.
    pass


@bench.command("linear")
@with_options
def linear(
    *,
    hidden: Annotated[int, typer.Option(help="Features in and out.")] = 4096,
    block_size: BlockSize = 32,
    batch: Annotated[int, typer.Option(help="Tokens.")] = 64,
    densities: Densities = "1,0.5,0.25,0.1,0.05,0.03,0.01",
    dtype: Dtype = "float32",
    pass_: Annotated[str, typer.Option("--pass", help="forward, dgrad, wgrad or train.")] = "forward",
    against: Annotated[str, typer.Option(help="Some of dense, torch-bsr, bsr-matmul, csr-matmul and stk.")] = "dense",
    out: Out = OUT,
    how: Measured,
) -> None:
    """Time y = x W^T and its gradients: speed-up against density, as a table, JSON and a chart.

    Every result is first checked against float64; a wrong one ends the run. Then all take turns in one process.
    """
    from ..bench.linear import LinearBench
    from ..bench.linear_specs import LinearSpec

    of = numbers("densities", densities, float)
    specs = [LinearSpec(hidden, hidden, batch, block_size, density, dtype, pass_) for density in of]
    title = f"{pass_} {dtype}, hidden {hidden}, block {block_size}, {batch} tokens"
    name = f"linear-{pass_}-{dtype}-h{hidden}-b{block_size}-t{batch}"
    _measure(how.by(LinearBench, against), {"": (title, specs)}, out, name, "block-sparse linear products")


@bench.command("conv2d")
@with_options
def conv2d(
    *,
    layer: Annotated[str, typer.Option(help="A named shape: reach, resnet50-conv4-3x3, pixelcnn-16, ...")] = "reach",
    images: Annotated[int | None, typer.Option(help="Images per batch; by default the layer's.")] = None,
    block_size: BlockSize = 32,
    pattern: Annotated[str, typer.Option(help="random, with the densities, or block-diagonal.")] = "random",
    densities: Densities = "1,0.5,0.25,0.1",
    dtype: Dtype = "float32",
    pass_: Annotated[
        str, typer.Option("--pass", help="Some of forward, dgrad, wgrad and train.")
    ] = "forward,dgrad,wgrad",
    against: Annotated[str | None, typer.Option(help="Some of dense and grouped.")] = None,
    out: Out = OUT,
    how: Measured,
) -> None:
    """Time a block-sparse 2-D convolution and its gradients: speed-up against density, as tables, JSON and charts.

    Every result is first checked against float64; a wrong one ends the run. Then all take turns in one process.
    """
    from ..bench.conv import ConvBench
    from ..bench.conv_specs import LAYERS

    if layer not in LAYERS:
        raise BlockSparseError.expected("layer", f"one of {', '.join(LAYERS)}", repr(layer))
    shape = replace(LAYERS[layer], block=block_size, dtype=dtype, pattern=pattern)
    shape = shape if images is None else replace(shape, images=images)
    random = pattern == "random"
    of = numbers("densities", densities, float) if random else [shape.density]
    what = f"{shape.out_channels}x{shape.in_channels}, {shape.kernel}x{shape.kernel} on {shape.size}x{shape.size}"
    groups = {
        name: (
            f"{name} {dtype}, {what}, {shape.images} images, block {block_size}, {pattern}",
            [replace(shape, density=density, pass_=name) for density in of],
        )
        for name in parts(pass_)
    }
    runner = how.by(ConvBench, against if against is not None else "dense" if random else "dense,grouped")
    file = f"conv2d-{layer}-{pattern}-{dtype}-b{block_size}-n{shape.images}"
    _measure(runner, groups, out, file, "block-sparse 2-D convolutions", chart=random, layer=layer)


@bench.command("lstm")
@with_options
def lstm(
    *,
    cell: Annotated[str, typer.Option(help="lstm, mlstm or smallworld.")] = "lstm",
    width: Annotated[int, typer.Option(help="Hidden units.")] = 2048,
    pattern: Annotated[
        str,
        typer.Option(help="barabasi_albert, watts_strogatz, random, random_diagonal, block_diagonal or dense."),
    ] = "barabasi_albert",
    m: Annotated[str, typer.Option(help="Edges of barabasi_albert, or neighbors of watts_strogatz.")] = "8,4,2",
    densities: Densities = "0.25,0.1,0.03",
    batch: Annotated[int, typer.Option(help="Texts per batch.")] = 64,
    seq: Annotated[int, typer.Option(help="Bytes per text.")] = 64,
    block_size: BlockSize = 32,
    embedding: Annotated[int, typer.Option(help="Features of a byte's embedding.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 by autocast.")] = "float32",
    pass_: Annotated[
        str, typer.Option("--pass", help="Some of train (whole steps) and inference.")
    ] = "train,inference",
    against: Annotated[
        str, typer.Option(help="Peers: dense and torch (torch.nn.LSTM) of equal parameters, dense-wide, torch-wide.")
    ] = "dense",
    out: Out = OUT,
    how: Measured,
) -> None:
    """Time recurrent language models over bytes: speed-up of steps and inference, as tables, JSON and charts.

    Small versions are first checked against float64; a wrong one ends the run. Then all take turns in one process.
    """
    from ..bench.lstm import LstmBench, LstmSpec
    from ..models.char_lm import CharLMConfig

    base = CharLMConfig(
        cell=cell, width=width, embedding=embedding, pattern=pattern, block_size=block_size, seed=how.seed
    )
    by_density = [{"density": density} for density in numbers("densities", densities, float)]
    variants: dict[str, list[dict[str, Any]]] = {
        "barabasi_albert": [{"m": ties} for ties in numbers("m", m, int)],
        "watts_strogatz": [{"neighbors": ties} for ties in numbers("m", m, int)],
        **dict.fromkeys(("random", "random_diagonal", "block_diagonal"), by_density),
        "dense": [{}],
    }
    configs = [replace(base, **changes) for changes in variants[pattern]]
    groups = {
        name: (
            f"{name} {dtype}, {cell} of width {width}, {pattern}, block {block_size}, batch {batch}, seq {seq}",
            [LstmSpec(config, batch, seq, dtype, name) for config in configs],
        )
        for name in parts(pass_)
    }
    runner = how.by(LstmBench, against)
    file = f"lstm-{cell}-{pattern}-{dtype}-w{width}-b{block_size}-n{batch}x{seq}"
    wide = any(name.endswith("-wide") for name in runner.against)
    _measure(runner, groups, out, file, "block-sparse recurrent language models", bound=wide)


def _measure(
    runner: Bench,
    groups: Mapping[str, tuple[str, Sequence[Any]]],
    out: Path,
    name: str,
    what: str,
    chart: bool = True,
    bound: bool = True,
    **settings: Any,
) -> None:
    """Time the specs of each group; print a table for each, and write one JSON file and a chart per group."""
    from .. import machine
    from ..bench import report

    make_folder(out)
    console, everything = Console(), []
    device = runner.device.torch.type
    if gpu := machine.machine(device)["gpu"]:
        name += f"-{machine.slug(gpu['name'])}"
    with bar(Console(stderr=True)) as shown:
        task = shown.add_task("checking and timing", total=sum(len(specs) for _, specs in groups.values()))
        for group, (title, specs) in groups.items():
            results = []
            for spec in specs:
                shown.update(task, description=f"checking and timing {spec!r}")
                results.append(runner.run(spec))
                shown.advance(task)
            everything += results
            console.print(report.results_table(results, title))
            for line in report.refusals(results):
                say(console, f"refused: {line}", "yellow")
            if chart:
                report.write_chart(out / f"{name}{group and '-'}{group}.png", results, title, bound)
    settings = {"rounds": runner.rounds, "budget": runner.budget, "seed": runner.seed, "device": device} | settings
    report.write_results(out / f"{name}.json", everything, what, against=list(runner.against), **settings)
    say(console, f"wrote {out / name}.json" + " and .png" * chart)


def numbers(name: str, text: str, kind: type) -> list[Any]:
    """Parse numbers separated by commas.

    Raises:
        BlockSparseError: another text, or no number.
    """
    try:
        values = [kind(part) for part in parts(text)]
    except ValueError:
        values = []
    if not values:
        example = "ints with commas between, as in 8,4,2" if kind is int else "numbers with commas between, as in 1,0.5"
        raise BlockSparseError.expected(name, example, repr(text))
    return list(dict.fromkeys(values))


def parts(text: str) -> list[str]:
    """Split words separated by commas, without duplicates."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
