"""Progress of a training run: a bar with the newest figures, and a line per evaluation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn

from ..training.parallel import rank_and_size
from ..training.trainer import Callback, Interrupted, Trainer
from .terminal import LEFT, bar, plural, say

# Without a terminal, print at most one progress line in this time.
SECONDS_BETWEEN_LINES = 10
EVALUATIONS = 20  # approximate number of evaluations that get a line

_SHORT = {"bits per character": "bpc", "bits per dimension": "bpd"}


def console() -> Console:
    """Return the console of a training, quiet except on rank 0."""
    return Console(quiet=rank_and_size()[0] > 0)


def show(console: Console, trainer: Trainer, *about: str) -> None:
    """Train with progress shown; print what is trained before, and at the end the result or how to resume."""
    for nth, line in enumerate(about, 1):
        console.print(line, style="dim" if 1 < nth == len(about) else None, highlight=False)
    if trainer.settings.warmup > trainer.settings.steps:
        rises = f"the learning rate rises over {trainer.settings.warmup:,} steps (--warmup)"
        say(console, f"{rises}, more than the run has: it never reaches its maximum", "yellow")
    try:
        counted = TaskProgressColumn() if trainer.facts.get("epochs") else MofNCompleteColumn()
        columns = TextColumn("{task.fields[shown]}"), BarColumn(bar_width=16), counted, *LEFT
        with bar(console, *columns, transient=False) as progress:
            result = trainer.train(_Bar(progress, trainer))
    except Interrupted as stop:
        at = _at(trainer, stop.step)
        say(console, f"stopped after {at}; saved {trainer.path}. The same command resumes.", "yellow")
        raise typer.Exit(128 + stop.number) from None
    epochs = trainer.facts.get("epochs")
    done = plural(epochs, "epoch") if epochs else f"{result['steps']:,} steps"
    tested = trainer.facts.get("tested")
    rows = f" of {tested:,} {trainer.task.samples}" if tested else ""
    console.print(
        f"held out [bold]{result['held_out']:.4f}[/] {result['unit']}{rows} after {done}, "
        f"{_duration(result['seconds'])}, {_speed(trainer, result)}",
        highlight=False,
    )
    say(console, f"wrote {trainer.path} and result.json", "dim")


class _Bar(Callback):
    """A bar with the newest figures, and lines for evaluations; without a terminal also lines for other figures."""

    def __init__(self, progress: Progress, trainer: Trainer):
        self.progress, self.trainer, self.console = progress, trainer, progress.console
        self.shown: dict[str, str] = {}
        self.last = 0.0
        self.part = -1

    def began(self, step: int) -> None:
        total = self.trainer.settings.steps
        if step == total:
            self.console.print("this run is finished", style="green")
        elif step:
            self.console.print(f"resumes after {_at(self.trainer, step)}", style="green", highlight=False)
        self.task = self.progress.add_task("", total=total, completed=step, shown="training")

    def after_step(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def logged(self, record: Mapping[str, Any]) -> None:
        """Show a log record in the bar, and print a line at some held-out losses, or regularly without a terminal."""
        trainer, now = self.trainer, time.monotonic()
        if "held_out" in record:
            line = f"held out {record['held_out']:.4f} {trainer.task.unit}"
            self.shown["held out"] = f"held out [bold]{record['held_out']:.3f}[/]"
        else:
            unit = trainer.task.loss_unit or trainer.task.unit
            left = (trainer.settings.steps - record["step"]) * trainer.task.bytes_per_step / record["bytes_per_second"]
            line = f"{record['loss']:.4f} {unit}, {_speed(trainer, record)}, {_duration(left)} left"
            self.shown |= {"loss": f"[bold]{record['loss']:.3f}[/] {_SHORT.get(unit, unit)}"}
            self.shown |= {"speed": _speed(trainer, record)}
        parts = [self.shown[key] for key in ("loss", "held out", "speed") if key in self.shown]
        self.progress.update(self.task, shown="  ".join(parts))
        often = not self.console.is_terminal and now - self.last >= SECONDS_BETWEEN_LINES
        part = EVALUATIONS * record["step"] // trainer.settings.steps
        if ("held_out" in record and part > self.part) or often:
            self.last, self.part = now, part
            say(self.console, f"{_at(trainer, record['step'])}: {line}")

    def note(self, text: str) -> None:
        say(self.console, text, "yellow")


def _at(trainer: Trainer, step: int) -> str:
    """Return the position of a step in the run, in epochs if the run has epochs.

    >>> from types import SimpleNamespace as Some
    >>> some = Some(steps=1200)
    >>> _at(Some(settings=some, facts={"epochs": 12}), 250), _at(Some(settings=some, facts={}), 250)
    ('epoch 2.5 of 12', 'step 250 of 1,200')
    """
    epochs, steps = trainer.facts.get("epochs"), trainer.settings.steps
    return f"epoch {step * epochs / steps:,.4g} of {epochs:,}" if epochs else f"step {step:,} of {steps:,}"


def _speed(trainer: Trainer, record: Mapping[str, Any]) -> str:
    """Format bytes, rows or images per second."""
    task, bytes_per_second = trainer.task, record["bytes_per_second"]
    if task.samples_per_step is None:
        return f"{bytes_per_second:,.0f} bytes/s"
    return f"{bytes_per_second * task.samples_per_step / task.bytes_per_step:,.0f} {task.samples}/s"


def _duration(seconds: float) -> str:
    """Format seconds.

    >>> _duration(5), _duration(75), _duration(7300)
    ('5 s', '1 min 15 s', '2 h 1 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
