"""`blocksparse tune`: the fastest tiles of this machine's GPU, for the calls that come after."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from blocksparse.errors import BlockSparseError


def tune(
    dtypes: Annotated[str, typer.Option(help="Of bfloat16, float16, float32, tf32 and float64.")] = "bfloat16,float32",
    blocks: Annotated[str, typer.Option(help="Rows and columns of blocks.")] = "16,32,64,128",
    passes: Annotated[str, typer.Option(help="Of forward, dgrad and wgrad.")] = "forward,dgrad,wgrad",
    tokens: Annotated[str, typer.Option(help="Tokens: few and many have tiles of their own.")] = "32,8192",
    densities: Annotated[str, typer.Option("--density", help="Parts of the blocks that are stored.")] = "0.1,0.5",
    hidden: Annotated[int, typer.Option(help="Features in and out.")] = 8192,
    minutes: Annotated[float, typer.Option(help="About so long, for all of them together.")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="Folder; else where every later run looks for it.")] = None,
    seed: Annotated[int, typer.Option(help="Of patterns and numbers.")] = 0,
) -> None:
    """Find the fastest tiles of this GPU, and keep them for every later run.

    Nothing is tuned in a call of the library: without this, tiles are those shipped for the GPU model, or a rule's.
    Each tile is checked against float64 before it is timed. A finished case is in the file at once.
    """
    from ..bench import tune as tuning

    cases = tuning.cases(
        _list(dtypes), _numbers("blocks", blocks, int), _list(passes), _numbers("tokens", tokens, int),
        _numbers("density", densities, float), hidden,
    )  # fmt: skip
    if not minutes > 0:
        raise BlockSparseError.expected("minutes", "a positive number", minutes)
    tuner = tuning.Tuner(folder=out, seed=seed)
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results: list[tuning.Result] = []
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task(str(cases[0]), total=len(cases))
        try:
            for result in tuner.run(cases, 60 * minutes):
                results.append(result)
                progress.update(task, advance=1, description=str(cases[min(len(results), len(cases) - 1)]))
        finally:  # results so far are still printed and kept
            progress.stop()
            if results:
                Console().print(_table(results, tuner.gpu.name))
                Console().print(f"wrote {tuner.path}", highlight=False, soft_wrap=True)


def _table(results: list[Any], title: str) -> Table:
    from ..bench.report import duration, short

    out = Table(title=title, box=SIMPLE_HEAD, title_style="bold", title_justify="left")
    for name in ("case", "rule", "tuned", "faster by", "tile", "tried"):
        out.add_column(name, justify="left" if name in ("case", "tile") else "right")
    for result in results:
        gain = result.rule_time.median / result.time.median
        refused = f" ({len(result.refused)} refused)" if result.refused else ""
        times = [duration(spread.median) for spread in (result.rule_time, result.time)]
        out.add_row(str(result.case), *times, short(gain), _short(result.tile), f"{result.tried}{refused}")
    return out


def _short(tile: Any) -> str:
    extras = [f"group {tile.group_m}"] * (tile.group_m > 1) + ["pairs"] * tile.pairs
    size = f"{tile.block_m}x{tile.block_n}x{tile.block_k}, {tile.warps} warps, {tile.stages} stages"
    return ", ".join([size, *extras])


def _list(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _numbers(name: str, text: str, kind: type) -> list[Any]:
    try:
        numbers = [kind(part) for part in _list(text)]
    except ValueError:
        numbers = []
    if not numbers:
        raise BlockSparseError.expected(name, "numbers with commas between", repr(text))
    return numbers
