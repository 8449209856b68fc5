"""`blocksparse demo`: show on this machine, in under a minute, what block-sparse weights gain."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import Progress, TextColumn
from rich.text import Text

from blocksparse.errors import BlockSparseError

from .terminal import COUNT, bar, make_folder, say, table

if TYPE_CHECKING:
    from ..recipes.three_ways import Data, Settings, ThreeWays
    from .demo_page import Story

# Colours of the dense net, the block-sparse one and the sparsified one, by name and among a terminal's 256 colours.
COLORS = ("dark_orange", "dodger_blue1", "medium_purple")
COLOR_NUMBERS = (208, 33, 104)

# On two cores. The number of steps depends on it, not on the clock, so that a seed gives the same curves each time.
STEPS_PER_SECOND = 8

NEXT = """Try your own model: bs.tradeoff(model, batches, example) says what to expect,
bs.compress(model, batches) makes it sparse.
How to: docs/how_to/recover_accuracy.md"""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the demo's parts; tests use smaller ones."""

    hidden: int = 4096
    batch: int = 64
    block: int = 32
    densities: Sequence[float] = (1, 0.5, 0.25, 0.1, 0.05, 0.02)
    budget: float = 0.5
    training: dict[str, Any] = field(default_factory=dict)


def demo(
    text: Annotated[
        Path | None, typer.Option(help="Train on the next byte of this file; by default on drawn letters and digits.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Plan 8 training steps for each second; stop training after twice this time.")
    ] = 25,
    out: Annotated[Path, typer.Option(help="Folder for demo.html and demo.json.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Train a net dense and block-sparse, time products, check the 2017 example; write a page.

    Ctrl-C ends it early and keeps the results so far.
    """
    play(Console(), Sizes(), text, seconds, out, seed)


def play(console: Console, sizes: Sizes, text: Path | None, seconds: float, out: Path, seed: int) -> None:
    """Run `demo` at any sizes."""
    from blocksparse import checkpoint

    from ..data import text as texts
    from ..machine import machine
    from ..recipes import three_ways
    from . import demo_page as page

    if not 0 < seconds < math.inf:
        raise BlockSparseError.expected("seconds", "a positive number", seconds)
    if not 0 <= seed < 2**32:
        raise BlockSparseError.expected("seed", "an int from 0 to 2^32 - 1", seed)
    steps = max(1, round(seconds * STEPS_PER_SECOND))
    settings = three_ways.Settings(**{"steps": steps, "seconds": 2 * seconds, "seed": seed, **sizes.training})
    parts = None if text is None else texts.split(texts.read(text), three_ways.CONTEXT, name=text.name)
    make_folder(out)

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has no load average
    facts = machine() | {"load before": round(load, 2)}
    story = page.Story(facts, seed)
    console.print("[bold]blocksparse demo[/]")
    say(console, f"{facts['cpu']}, {facts['isa']}, threads: {facts['threads']}", "dim")
    if load > 0.5:
        say(console, f"Other programs are running (load {load:.1f}), so times are less certain.", "yellow")
    try:
        with bar(console) as progress:
            task = progress.add_task("making examples", total=1)
            data = three_ways.letters_data(settings) if parts is None else three_ways.text_data(parts, settings)
            progress.advance(task)
        _train(console, story, data, settings)
        if not story.interrupted:
            _speedups(console, story, sizes)
            _example(console, story, sizes)
            _equal_cost(console, story)
    except KeyboardInterrupt:
        story.interrupted = True
    checkpoint.write_text(out / "demo.html", page.render(story))
    checkpoint.write_text(out / "demo.json", json.dumps(_as_dict(story), indent=1) + "\n")
    if story.interrupted:
        console.print("\nInterrupted: the page has the results so far.", style="yellow")
    console.print(f"\nOpen [bold]{(out / 'demo.html').resolve()}[/]", highlight=False, soft_wrap=True)
    if story.interrupted:
        raise typer.Exit(130)
    say(console, NEXT)


# -- parts ---------------------------------------------------------------------------------------------------------


def _train(console: Console, story: Story, data: Data, settings: Settings) -> None:
    """Train the nets, with a live plot, and print the headline and the table."""
    from ..recipes.three_ways import SPARSIFIED, ThreeWays
    from .demo_page import compared, headline

    s = settings
    _title(console, 1, f"One net, three ways: {data.name}")
    widths = f"1,024 -> {s.hidden:,} -> {s.hidden:,} -> {data.classes}"
    examples = f"{s.steps * s.batch:,} examples to train on, {len(data.test[1]):,} {data.test_name} to test on"
    say(console, f"{widths}, density {s.density:g}\n{examples}", "dim")
    comparison = ThreeWays(data, settings)
    columns = (*COUNT[:3], TextColumn("{task.fields[seconds]:5.1f} s"), TextColumn("{task.fields[right]}"))
    progress = Progress(*columns, console=console)
    tasks = {name: progress.add_task(name, total=s.steps, seconds=0.0, right="") for name in comparison.entries}
    tasks[SPARSIFIED] = progress.add_task(SPARSIFIED, total=None, seconds=0.0, right="")
    try:
        with Live(progress, console=console, refresh_per_second=4, transient=True) as live:
            for entry in comparison.train():
                right = f"{100 * entry.curve[-1][1]:.0f} % right" if entry.curve else ""
                progress.update(
                    tasks[entry.name], completed=entry.done, total=entry.steps, seconds=entry.seconds, right=right
                )
                if entry.curve and entry.curve[-1][0] == entry.done:
                    live.update(Group(progress, _plot(console, comparison)))
            comparison.finish()
    except KeyboardInterrupt:
        comparison.finish()
        story.interrupted = True
    if not comparison.comparable:
        return
    story.comparison = comparison
    if comparison.shortfall:
        say(console, comparison.shortfall, "yellow")
    console.print(_plot(console, comparison))
    console.print(f"\n[bold]{headline(comparison)}[/]\n", highlight=False)
    head = [f"[{color}]{name}[/]" for color, name in zip(COLORS, comparison.ways, strict=False)]
    made = table(("", *head))
    for name, cells in compared(comparison):
        made.add_row(name, *cells)
    console.print(made)


def _speedups(console: Console, story: Story, sizes: Sizes) -> None:
    """Time products at several densities and print bars."""
    from ..bench.linear import LinearBench
    from ..bench.linear_specs import LinearSpec
    from .demo_page import speedup_row

    _title(console, 2, "Speed-up against density")
    runner = LinearBench(("dense",), rounds=15, budget=sizes.budget, seed=story.seed)
    with bar(console) as progress:
        task = progress.add_task("checking and timing", total=len(sizes.densities))
        for density in sizes.densities:
            spec = LinearSpec(sizes.hidden, sizes.hidden, sizes.batch, sizes.block, density)
            story.speedups.append(runner.run(spec))
            progress.advance(task)
    made = table(("density", "block-sparse", "dense", "speed-up", "1 / density", ""))
    longest = max(result.speedup("dense").median for result in story.speedups)
    room = max(4, min(32, console.width - 70))
    for result in story.speedups:
        at, cells = speedup_row(result)
        line = Text("━" * max(1, round(room * result.speedup("dense").median / longest)), style=COLORS[1])
        made.add_row(at, *cells, f"{1 / result.density:.3g}", line)
    made.columns[-1].justify = "left"
    console.print(made)


def _example(console: Console, story: Story, sizes: Sizes) -> None:
    """Run the 2017 example and print its errors and times."""
    from ..recipes import example_2017
    from .demo_page import example_rows

    _title(console, 3, "The 2017 example, checked against dense")
    with bar(console) as progress:
        task = progress.add_task("checking and timing", total=1)
        story.example = example = example_2017.run(
            sizes.hidden, sizes.block, sizes.batch, seed=story.seed, budget=sizes.budget
        )
        progress.advance(task)
    what = f"y = bsmm(x, w): hidden {example.hidden}, blocks of {example.block}, batch {example.batch}"
    say(console, what, "dim")
    rows = [(name, *cells) for name, cells in example_rows(example)]
    console.print(table(("", ""), rows, words=2, show_header=False))


def _equal_cost(console: Console, story: Story) -> None:
    """Print how the wide block-sparse net compares with a dense one of equal cost."""
    from .demo_page import equal_cost

    if story.comparison is not None:
        _title(console, 4, "Wide and block-sparse, or small and dense")
        console.print(equal_cost(story.comparison), highlight=False)


# -- pieces --------------------------------------------------------------------------------------------------------


def _title(console: Console, number: int, text: str) -> None:
    console.print(f"\n[bold {COLORS[1]}]{number}[/]  [bold]{escape(text)}[/]", highlight=False)


def _plot(console: Console, comparison: ThreeWays) -> Text:
    """Plot the accuracy of the nets so far against seconds of training."""
    curves = [comparison.seconds_and_accuracy(name) for name in comparison.ways]
    if console.options.ascii_only or not all(seconds for seconds, _ in curves):
        return Text()
    most = max(seconds[-1] for seconds, _ in curves)
    picture = plot(curves, min(console.width, 100), 12, (0, most), (0, 100))
    title = Text("% right against seconds of training  ", style="dim")
    for color, name in zip(COLORS, comparison.ways, strict=False):
        title.append(f" ━ {name}", color)
    return Text("\n").join([title, picture])


def plot(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]],
    width: int,
    height: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> Text:
    """Plot curves in characters of a terminal, in the order of `COLORS`.

    Args:
        curves: x and y of each.
        width, height: of the whole plot in characters.
        x_range, y_range: of the axes.
    """
    import plotext

    figure = plotext.figure  # plotext has one global figure
    figure.clear()
    figure.theme("colorless").canvas("default").plot_size(width, height)
    figure.axes(False, side=1)
    for axis, limits in (("x", x_range), ("y", y_range)):
        figure.ruler(axis).lim(*limits)
    for (x, y), color in zip(curves, COLOR_NUMBERS, strict=False):
        figure.draw(figure.signal(list(x), list(y), marker=plotext.marker("braille", plotext.pixel(color))).lines())
    return Text.from_ansi(str(figure.build()).rstrip("\n"), no_wrap=True)


def _as_dict(story: Story) -> dict[str, Any]:
    """Return the numbers of a demo, ready for JSON."""
    content: dict[str, Any] = {"machine": story.machine, "seed": story.seed, "interrupted": story.interrupted}
    if (comparison := story.comparison) is not None:
        names = ("name", "rate", "steps", "done", "parameters", "memory", "seconds", "accuracy", "bits", "curve")
        content["training"] = {
            "data": comparison.data.name,
            "settings": asdict(comparison.settings),
            "models": [
                {name: getattr(entry, name) for name in names}
                | {"step": vars(entry.step), "inference": vars(comparison.inference.time(entry.name))}
                for entry in comparison.entries.values()
            ],
        }
    content["speedups"] = [result.as_dict() for result in story.speedups]
    if (example := story.example) is not None:
        facts = ("hidden", "block", "batch", "relative_error", "largest_error")
        content["example_2017"] = {name: getattr(example, name) for name in facts} | {
            "density": example.layout.density,
            "seconds": {name: vars(example.samples.time(name)) for name in example.samples.names},
            "speedup": vars(example.samples.ratio("dense", "block-sparse")),
        }
    return content
