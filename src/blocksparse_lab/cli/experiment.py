"""`blocksparse experiment`: compare dense and sparse training over seeds, with tables and curves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TextColumn
from typer.core import TyperCommand

from blocksparse.checked import integer
from blocksparse.errors import BlockSparseError

from .progress import show
from .terminal import COUNT, bar, make_folder, say, stages

if TYPE_CHECKING:
    from ..experiments import Experiment


class Experiments(TyperCommand):
    """A command whose help ends with a list of the experiments, which is slow to load."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from ..experiments import EXPERIMENTS

        self.epilog = "\n\n".join(f"[bold]{name}[/]: {of.about}." for name, of in EXPERIMENTS.items())
        super().format_help(ctx, formatter)


def experiment(
    name: Annotated[list[str] | None, typer.Argument(help="Experiments, or all; without a name, list them.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs; resumes existing ones.")] = Path("runs"),
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("results"),
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of all data, or of this data; by default downloads it.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this model; may be repeated.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Only this seed; may be repeated.")] = None,
    add: Annotated[
        bool, typer.Option("--add", help="Keep the report's runs of models and seeds that are not here.")
    ] = False,
    redraw: Annotated[bool, typer.Option("--redraw", help="Only draw the report again from its JSON.")] = False,
    cores: Annotated[
        int | None,
        typer.Option(
            help="Runs to train at a time, one thread each; for several experiments, by default all idle cores."
        ),
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Stop after this time; the same command resumes.")] = None,
) -> None:
    """Train the runs of an experiment, evaluate them, and write the results as JSON, Markdown and PNG.

    Runs resume where they stopped; several processes may train different runs (--only, --seed). Given several
    experiments, --cores or --hours, the missing runs train side by side.
    """
    from .. import experiments

    console = Console()
    if not name:
        for one, of in experiments.EXPERIMENTS.items():
            console.print(f"[bold]{one}[/] ({_duration(of)}): {of.about}.", highlight=False)
        return
    if cores is not None:
        integer("cores", cores, 1)
    if hours is not None and not hours > 0:
        raise BlockSparseError.expected("hours", "a positive number", hours)
    if redraw and (add or only or seed or cores or hours):
        raise BlockSparseError.expected("--redraw", "no --add, --only, --seed, --cores or --hours", "some")
    named = {one: experiments.find(one) for one in name if one != "all"}
    chosen = dict(experiments.EXPERIMENTS) if "all" in name else named
    make_folder(out)
    _check(console, chosen, only or (), seed or ())
    if not (redraw or add):
        for one, of in chosen.items():
            _check_no_loss(one, of, runs / one, out, only or (), seed or ())
    if redraw:
        there = {one: of for one, of in chosen.items() if (out / f"{one}.json").exists()}
        for one, of in (there or chosen).items():  # if there is none, the first one raises
            _wrote(console, experiments.draw(one, of, out))
    elif len(chosen) > 1 or cores is not None or hours is not None:
        _side_by_side(console, chosen, runs, out, data_dir, only or (), seed or (), add, cores, hours)
    else:
        ((one, of),) = chosen.items()
        console.print(f"[bold]{one}[/]: {of.about}", highlight=False)
        _one_by_one(console, of, runs / one, data_dir, only or (), seed or ())
        _wrote(console, experiments.write(one, of, runs / one, out, add))


def _duration(experiment: Experiment) -> str:
    """Return how long all runs of an experiment take, roughly."""
    hours = [experiment.hours(contender) for contender in experiment.contenders]
    known = [of_a_run for of_a_run in hours if of_a_run is not None]
    return f"{len(experiment.seeds) * sum(known):.1f} hours of a core" if len(known) == len(hours) else "needs a GPU"


def _check(console: Console, chosen: dict[str, Experiment], only: Any, seeds: Any) -> None:
    """Raise if a contender or a seed is invalid; name seeds that an experiment does not have."""
    from ..experiments.experiment import check_only

    check_only(only, (contender for of in chosen.values() for contender in of.contenders))
    for one in seeds:
        integer("seed", one, 0, below=2**32)
    for name, of in chosen.items():
        if others := sorted(set(seeds).difference(of.seeds)):
            more, own = (", ".join(map(str, of_some)) for of_some in (others, of.seeds))
            say(console, f"{name} compares seeds {own}; trains {more} in addition", "yellow")


def _check_no_loss(name: str, experiment: Experiment, runs: Path, out: Path, only: Any, seeds: Any) -> None:
    """Check before training that the existing report will not lose runs."""
    from .. import experiments
    from ..experiments.experiment import seed_of

    made = {one: set(map(seed_of, some)) for one, some in experiment.finished(runs).items()}
    for contender in only or experiment.contenders:
        made.setdefault(contender, set()).update(seeds or experiment.seeds)
    experiments.check_no_loss(name, out, made)


def _one_by_one(
    console: Console, experiment: Experiment, runs: Path, data_dir: Path | None, only: Any, seeds: Any
) -> None:
    """Train and probe the runs of one experiment in this process."""
    for trainer in experiment.trainers(runs, data_dir, only, seeds):
        console.print(f"[bold]{trainer.run.name}[/]", highlight=False)
        try:
            show(console, trainer)
        except BlockSparseError as error:
            if not experiment.record_failure(trainer, error):
                raise
            say(console, str(error), "yellow")
            continue
        with stages(console) as tell:
            experiment.probe(trainer.run, data_dir, tell)


def _side_by_side(
    console: Console,
    chosen: dict[str, Experiment],
    runs: Path,
    out: Path,
    data_dir: Path | None,
    only: Any,
    seeds: Any,
    add: bool,
    cores: int | None,
    hours: float | None,
) -> None:
    """Train the missing runs of several experiments in processes of one thread, and write the reports."""
    from torch import cuda

    from .. import experiments
    from ..experiments import queue
    from ..training.signals import catch_signals

    for one, of in chosen.items():
        with stages(console) as tell:
            count = sum(map(len, of.finished(runs / one).values()))
            for nth, path in enumerate(of.check_finished(runs / one, data_dir), 1):
                tell(f"{one}: looks at {path.name}", nth, count)
    wanted = queue.missing(chosen, runs, only, seeds)
    jobs = [job for job in wanted if job.experiment.minutes is not None or cuda.is_available()]
    if without := len(wanted) - len(jobs):
        say(console, f"{without} runs are left out because they need a GPU", "yellow")
    cores = queue.idle_cores() if cores is None else cores
    work = sum(job.experiment.hours(job.contender) or 0 for job in jobs)
    say(console, f"{len(jobs)} runs are missing, some {work:.1f} hours of a core; {cores} at a time")
    bars: dict[Path, Any] = {}
    failed: set[Path] = set()
    columns = *COUNT, TextColumn("{task.fields[text]}")
    with catch_signals() as caught, bar(console, *columns, transient=False) as progress:
        for job, news in queue.train(jobs, cores, float("inf") if hours is None else 3600 * hours, data_dir, caught):
            title = f"{job.name} {job.run.name}"
            if job.run not in bars:
                bars[job.run] = progress.add_task(escape(title), total=None, text="")
            progress.update(bars[job.run], completed=news.done, total=news.of or None, text=escape(news.text))
            if news.finished or news.failed:
                progress.update(bars[job.run], visible=False)
                say(progress.console, f"{title}: {news.text}", "green" if news.finished else "yellow")
            if news.failed:
                failed.add(job.run)
    left = [job for job in queue.missing(chosen, runs, only, seeds) if job in jobs]
    broken = failed & {job.run for job in left}
    unwritten = False
    for one, of in chosen.items():
        if any(of.finished(runs / one).values()):
            try:
                _wrote(console, experiments.write(one, of, runs / one, out, add))
            except BlockSparseError as error:  # write the other reports
                unwritten = True
                say(console, f"error: {error}", "red")
    if left:
        say(console, f"{len(left)} of {len(jobs)} runs are left; the same command resumes", "yellow")
    if caught or broken or unwritten:
        raise typer.Exit(128 + caught[0] if caught else 1)


def _wrote(console: Console, paths: list[Path]) -> None:
    for path in paths:
        say(console, f"wrote {path}")
