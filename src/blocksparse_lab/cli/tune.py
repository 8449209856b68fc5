"""`blocksparse tune`: find the fastest tiles of this machine's GPU for later calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blocksparse.errors import BlockSparseError

from .bench import numbers, parts
from .terminal import bar, say


def tune(
    dtypes: Annotated[
        str, typer.Option(help="Some of bfloat16, float16, float32, tf32 and float64.")
    ] = "bfloat16,float32",
    blocks: Annotated[str, typer.Option(help="Block sizes.")] = "16,32,64,128",
    passes: Annotated[str, typer.Option(help="Some of forward, dgrad and wgrad.")] = "forward,dgrad,wgrad",
    tokens: Annotated[
        str, typer.Option(help="Numbers of tokens; small and large ones need different tiles.")
    ] = "32,8192",
    densities: Annotated[str, typer.Option("--density", help="Densities.")] = "0.1,0.5",
    hidden: Annotated[int, typer.Option(help="Features in and out.")] = 8192,
    minutes: Annotated[float, typer.Option(help="Approximate time for all cases together.")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="Folder for the tiles; by default, where later runs look.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Find the fastest tiles of this GPU and save them for all later runs.

    The library never tunes by itself: by default it uses the tiles shipped for the GPU model, or a rule. Each tile is
    checked against float64 before it is timed. Results of a case are saved at once.
    """
    from ..bench import report
    from ..bench import tune as tuning

    cases = tuning.cases(
        parts(dtypes), numbers("blocks", blocks, int), parts(passes), numbers("tokens", tokens, int),
        numbers("density", densities, float), hidden,
    )  # fmt: skip
    if not minutes > 0:
        raise BlockSparseError.expected("minutes", "a positive number", minutes)
    tuner = tuning.Tuner(folder=out, seed=seed)
    results: list[tuning.Result] = []
    with bar(Console(stderr=True)) as shown:
        task = shown.add_task(str(cases[0]), total=len(cases))
        try:
            for result in tuner.run(cases, 60 * minutes):
                results.append(result)
                shown.update(task, advance=1, description=str(cases[min(len(results), len(cases) - 1)]))
        finally:  # print and keep the results so far
            shown.stop()
            if results:
                cells = [result.cells for result in results]
                Console().print(report.table(tuning.HEAD, cells, tuner.gpu.name, text=2))
                say(Console(), f"wrote {tuner.path}")
