"""`blocksparse demo`: show on this machine, in under two minutes, what the library does."""

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
from rich.progress import Progress, TextColumn
from rich.text import Text

from blocksparse.errors import BlockSparseError

from .terminal import COUNT, bar, make_folder, say, table

if TYPE_CHECKING:
    from ..recipes.next_byte import Race
    from .demo_page import Story

DENSE, SPARSE = "dark_orange", "dodger_blue1"
COLOR_NUMBERS = (208, 33)  # the same among a terminal's 256 colours

# Steps per second on two slow cores. The number of steps depends on it, not on the clock, so that a seed gives the
# same curve each time.
STEPS_PER_SECOND = 20


@dataclass(frozen=True)
class Sizes:
    """Sizes of the demo's parts; tests use smaller ones."""

    hidden: int = 4096
    batch: int = 64
    block: int = 32
    densities: Sequence[float] = (1, 0.5, 0.25, 0.1, 0.05, 0.02)
    budget: float = 1.2
    training: dict[str, Any] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)


def demo(
    text: Annotated[Path | None, typer.Option(help="Train on this file; by default on Python's help topics.")] = None,
    seconds: Annotated[float, typer.Option(help="Stop training after this time; plans 20 steps per second.")] = 80,
    out: Annotated[Path, typer.Option(help="Folder for demo.html and demo.json.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Run the 2017 example, the speed-up, and a race of a wide block-sparse and a dense model; write a page.

    Ctrl-C ends it early and keeps the results so far.
    """
    play(Console(), Sizes(), text, seconds, out, seed)


def play(console: Console, sizes: Sizes, text: Path | None, seconds: float, out: Path, seed: int) -> None:
    """Run `demo` at any sizes."""
    from ..data import text as texts
    from ..machine import machine
    from ..recipes.next_byte import RaceSettings
    from . import demo_page as page

    if not 0 < seconds < math.inf:
        raise BlockSparseError.expected("seconds", "a positive number", seconds)
    if not 0 <= seed < 2**32:
        raise BlockSparseError.expected("seed", "an int from 0 to 2^32 - 1", seed)
    steps = max(1, round(seconds * STEPS_PER_SECOND))
    settings = RaceSettings(**{"steps": steps, "seconds": seconds, "seed": seed, **sizes.training})
    data = texts.python_topics() if text is None else texts.read(text)
    name = "The help topics of Python" if text is None else text.name
    parts = texts.split(data, settings.context, name=name)
    make_folder(out)

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has no load average
    facts = machine() | {"load before": round(load, 2)}
    story = page.Story(facts, seed)
    console.print("[bold]blocksparse demo[/]")
    say(console, f"{facts['cpu']}, {facts['isa']}, {facts['threads']} threads", "dim")
    if load > 0.5:
        say(console, f"other programs are running (load {load:.1f}): times will be of a shared machine", "yellow")
    try:
        _example(console, story, sizes)
        _speedups(console, story, sizes)
        _train(console, story, sizes, parts, settings)
    except KeyboardInterrupt:
        story.interrupted = True
    (out / "demo.html").write_text(page.render(story), encoding="utf-8")
    (out / "demo.json").write_text(json.dumps(_as_dict(story), indent=1) + "\n", encoding="utf-8")
    if story.interrupted:
        console.print("\ninterrupted: the page has what was done by then", style="yellow")
    console.print(f"\nOpen [bold]{(out / 'demo.html').resolve()}[/]", highlight=False, soft_wrap=True)
    if story.interrupted:
        raise typer.Exit(130)


# -- the parts -----------------------------------------------------------------------------------------------------


def _example(console: Console, story: Story, sizes: Sizes) -> None:
    """Run the 2017 example and print its errors and times."""
    from ..recipes import example_2017
    from .demo_page import example_rows

    _title(console, 1, "The 2017 example, checked against dense")
    with bar(console) as progress:
        task = progress.add_task("checking and timing", total=1)
        story.example = example = example_2017.run(
            sizes.hidden, sizes.block, sizes.batch, seed=story.seed, budget=sizes.budget
        )
        progress.advance(task)
    what = f"y = bsmm(x, w): hidden {example.hidden}, blocks of {example.block}, batch {example.batch}"
    say(console, what, "dim")
    console.print(
        table(("", ""), [(name, *cells) for name, cells in example_rows(example)], words=2, show_header=False)
    )


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
        line = Text("━" * max(1, round(room * result.speedup("dense").median / longest)), style=SPARSE)
        made.add_row(at, *cells, f"{1 / result.density:.3g}", line)
    made.columns[-1].justify = "left"
    console.print(made)


def _train(console: Console, story: Story, sizes: Sizes, parts: Any, settings: Any) -> None:
    """Run the race, with a live plot, and print its result."""
    from ..recipes import next_byte
    from .demo_page import Training, compared, verdict

    _title(console, 3, "The next byte: dense against wide and block-sparse, equal parameters")
    models, layouts = next_byte.contenders(settings.context, seed=story.seed, **sizes.models)
    race = next_byte.Race(models, next_byte.LEARNING_RATES, parts, settings)
    training = Training(parts.name, len(parts.train), len(parts.held_out), settings, layouts)
    story.training = training
    line = f"{parts.name}: {training.train_bytes:,} bytes to train on, {training.held_out_bytes:,} held out"
    console.print(line, style="dim", markup=False, highlight=False)
    try:
        progress = Progress(*COUNT, TextColumn("{task.fields[bits]}"), console=console)
        task = progress.add_task("training both", total=settings.steps, bits="")
        with Live(progress, console=console, refresh_per_second=4) as live:
            for step in race.run():
                progress.update(task, completed=step, bits=_now(race))
                if step % settings.eval_every == 0 or step == settings.steps:
                    live.update(Group(progress, _plot(console, race)))
            progress.update(task, description="evaluating")
            training.outcomes = next_byte.outcomes(race)
            progress.update(task, description="trained both")
    except KeyboardInterrupt:
        if race.steps:
            training.outcomes = next_byte.outcomes(race, at_most=settings.probe)
        story.interrupted = True
    training.steps = race.steps
    if not training.outcomes:
        return
    made = table(("", f"[{DENSE}]dense[/]", f"[{SPARSE}]block-sparse[/]"))
    for name, cells in compared(training.outcomes):
        style = "bold" if "held-out" in name or "ms" in name else None
        made.add_row(name, *cells, style=style)
    if training.steps < settings.steps:
        console.print(f"stopped after {training.steps:,} of {settings.steps:,} steps", style="yellow", highlight=False)
    console.print()
    console.print(made)
    console.print(f"\n{verdict(training.outcomes)}", highlight=False)


def _plot(console: Console, race: Race) -> Text:
    """Plot the held-out bits per byte of both models so far."""
    from .demo_page import bits_range

    curves = list(race.curves.values())
    if console.options.ascii_only or not all(curve.held_out for curve in curves):
        return Text()
    points = [(curve.evaluated_at, curve.held_out) for curve in curves]
    picture = plot(points, min(console.width, 100), 12, (0, race.settings.steps), bits_range(curves))
    title = Text("held-out bits per byte   ", style="dim").append("━ dense  ", DENSE).append("━ block-sparse", SPARSE)
    return Text("\n").join([title, picture])


def plot(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]],
    width: int,
    height: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> Text:
    """Plot the curves of the dense and the block-sparse model in characters of a terminal.

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
    for (x, y), color in zip(curves, COLOR_NUMBERS, strict=True):
        figure.draw(figure.signal(list(x), list(y), marker=plotext.marker("braille", plotext.pixel(color))).lines())
    return Text.from_ansi(str(figure.build()).rstrip("\n"), no_wrap=True)


def _now(race: Race) -> str:
    """Describe the newest step of the race."""
    shown = [
        f"[{style}]{curve.held_out[-1]:.3f}[/]"
        for curve, style in zip(race.curves.values(), (DENSE, SPARSE), strict=True)
        if curve.held_out
    ]
    return " ".join(shown)


# -- pieces --------------------------------------------------------------------------------------------------------


def _title(console: Console, number: int, text: str) -> None:
    console.print(f"\n[bold {SPARSE}]{number}[/]  [bold]{text}[/]", highlight=False)


def _as_dict(story: Story) -> dict[str, Any]:
    """Return the numbers of a demo, ready for JSON."""
    content: dict[str, Any] = {"machine": story.machine, "seed": story.seed, "interrupted": story.interrupted}
    if (example := story.example) is not None:
        names = ("hidden", "block", "batch", "relative_error", "largest_error")
        content["example_2017"] = {name: getattr(example, name) for name in names} | {
            "density": example.layout.density,
            "seconds": {name: vars(example.samples.time(name)) for name in example.samples.names},
            "speedup": vars(example.samples.ratio("dense", "block-sparse")),
        }
    content["speedups"] = [result.as_dict() for result in story.speedups]
    if (training := story.training) is not None:
        facts = ("text", "train_bytes", "held_out_bytes", "steps")
        content["training"] = {name: getattr(training, name) for name in facts} | {
            "settings": asdict(training.settings),
            "models": [asdict(outcome) for outcome in training.outcomes],
        }
    return content
