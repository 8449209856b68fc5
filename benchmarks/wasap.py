"""One sparse net on Fashion-MNIST, trained by one process and by WASAP-SGD with several: accuracy, throughput, time.

    python benchmarks/wasap.py --data-dir DATA                            1, 2 and 4 processes, 100 epochs each
    python benchmarks/wasap.py --data-dir DATA --processes 1,2 --seeds 0,1,2 --wassp --threads --rates 0.5,1,2
    python benchmarks/wasap.py --data-dir DATA --epochs 1 --rows 2000 --out /tmp/wasap      to see that it runs

Each run is `torchrun` with that many processes of one thread; --threads: one process with a thread on each core, too.
Without --data-dir Fashion-MNIST is downloaded. Prints an epoch per line, and writes wasap-fashion_mnist.json, .md and
.png into the folder --out after each run: what was measured stays when a later one fails. A run whose process dies, or
that says nothing for --patience seconds, is ended, named in the table, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import sub, truediv
from pathlib import Path
from typing import Any

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored
    # Ctrl-C ends it at once and quietly, while it imports and, in the processes of a run, whatever they wait for.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from rich.console import Console

from blocksparse import BlockSparseError
from blocksparse.checkpoint import read_json
from blocksparse.distributed import Epoch, Settings, train
from blocksparse.topology.drawings.style import COLORS, figure_and_axes
from blocksparse_lab.bench import report
from blocksparse_lab.bench.report import chance, noted, spread
from blocksparse_lab.data import tables
from blocksparse_lab.machine import machine, where
from blocksparse_lab.recipes import mlp

NAME = "wasap-fashion_mnist"
ABOUT = (
    "The sparse net for Fashion-MNIST, trained by one process (sequential SET) and by WASAP-SGD with several: in the "
    "first phase they train one network asynchronously (WASSP-SGD: in step, with the mean gradient), in the second "
    "each trains alone; then they are averaged"
)
CAPTION = (
    "The test accuracy is that of the network at the end, averaged and pruned; rows per second, the median over the "
    "epochs of a phase. Mean and standard deviation over the seeds; comparisons are run by run with the same seed, "
    "p by a t-test of them."
)
# Of the phases, as `distributed.Epoch` calls them.
FIRST, SECOND = ("asynchronous", "synchronous"), ("alone",)
# Titles of a run's facts.
FACTS = {
    "threads of a process": "threads",
    "rows to train on": "rows",
    "rows to test on": "tested",
    "rows of a batch, in each process": "batch",
    "connections": "connections",
}
# Seconds. It waits 30 for its processes to end.
PATIENCE_WITH_TORCHRUN = 60


@dataclass(frozen=True)
class Options:
    """The options that all runs share."""

    epochs: int
    rows: int | None
    data_dir: str | None
    patience: float


@dataclass
class Run:
    """A run of several processes and its output, a line per epoch."""

    processes: int
    seed: int
    epochs: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    synchronous: bool = False
    threads: int = 1  # of each process
    rate: float = 1.0  # times that of one process

    @property
    def name(self) -> str:
        return f"{self.contender}, seed {self.seed}"

    @property
    def contender(self) -> str:
        several = f", {self.threads} threads" if self.threads > 1 else ""
        rate = f", rate x{self.rate:g}" if self.rate != 1 else ""
        return _processes(self.processes) + several + (", WASSP" if self.synchronous else "") + rate

    @property
    def accuracy(self) -> float:
        """The newest network's accuracy on the test rows, in %."""
        return 100 * self.epochs[-1]["accuracy"]

    def rows_per_second(self, phases: Sequence[str]) -> float | None:
        """The median over the epochs of a phase; None where it has none."""
        found = [epoch["samples_per_second"] for epoch in self.epochs if epoch["phase"] in phases]
        return statistics.median(found) if found else None


# -- a process of a run ------------------------------------------------------------------------------------------------


def work(seed: int, synchronous: bool, rate: float, options: Options) -> None:
    """Trains in each process of torchrun; the first one prints the results, in lines of JSON."""

    def tell(**said: Any) -> None:
        if int(os.environ["RANK"]) == 0:
            print(json.dumps(said), flush=True)

    recipe, table = mlp.recipe_for("fashion_mnist"), tables.load("fashion_mnist", options.data_dir)
    some = slice(options.rows)
    model = mlp.network(replace(recipe, seed=seed), table)
    net = mlp.size_of(model)
    same = ("batch", "momentum", "weight_decay", "zeta", "regrow")
    settings = Settings(
        epochs=options.epochs,
        learning_rate=rate * recipe.learning_rate,
        synchronous=synchronous,
        seed=seed,
        timeout=options.patience,
        **{name: getattr(recipe, name) for name in same},
    )
    facts = {"threads": torch.get_num_threads(), "cores": cores(), "rows": len(table.train[some])}
    facts |= {"tested": table.tested, "batch": recipe.batch, "connections": net.connections, "density": net.density}
    tell(facts=facts)
    begun = time.perf_counter()

    def show(epoch: Epoch) -> None:
        tell(epoch=asdict(epoch) | {"seconds": time.perf_counter() - begun})

    data, test = (table.train[some], table.train_labels[some]), (table.test, table.test_labels)
    train(model, data, settings, test=test, skip=model.output, report=show)


def cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- a run -------------------------------------------------------------------------------------------------------------


def command(run: Run, options: Options) -> list[str]:
    """The `torchrun` of a run."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.processes}"]
    asked = {"seed": run.seed, "synchronous": run.synchronous, "rate": run.rate, "options": asdict(options)}
    return [*launch, __file__, "--work", json.dumps(asked)]


def measure(run: Run, options: Options, say: Callable[[str], None]) -> None:
    """Trains; `run.failure` records a failure."""
    environment = os.environ | {"OMP_NUM_THREADS": str(run.threads)}
    lines: queue.Queue[str | None] = queue.Queue()
    with tempfile.TemporaryFile("w+") as errors:
        # In a session of its own: Ctrl-C is for us, who then end it.
        process = subprocess.Popen(
            command(run, options), stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        try:
            while (line := lines.get(timeout=options.patience)) is not None:
                _take(run, line, options, say)
            status = process.wait(options.patience)
        except (queue.Empty, subprocess.TimeoutExpired):
            run.failure = f"not a word for {options.patience:g} s"
            return
        finally:
            _end(process)
            reader.join(PATIENCE_WITH_TORCHRUN)
        if status:
            run.failure = _reason(errors, status)
        elif not run.epochs or run.epochs[-1]["epoch"] < options.epochs:
            run.failure = "it ended before its last epoch"


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    """Its output, line by line; None at the end."""
    with process.stdout or nullcontext(()) as output:
        for line in output:
            lines.put(line)
    lines.put(None)


def _take(run: Run, line: str, options: Options, say: Callable[[str], None]) -> None:
    try:
        said = json.loads(line)
    except ValueError:  # not ours
        return
    if "facts" in said:
        run.facts = said["facts"]
    elif "epoch" in said:
        run.epochs.append(said["epoch"])
        of = run.epochs[-1]
        say(
            f"{run.name}: epoch {of['epoch']} of {options.epochs}, {of['phase']}: loss {of['loss']:.4f}, "
            f"test accuracy {run.accuracy:.2f} %, {of['samples_per_second']:,.0f} rows/s"
        )


def _end(process: subprocess.Popen[str]) -> None:
    """Ends it where it still runs: asked to, torchrun ends its processes, which a killed one would leave behind."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_WITH_TORCHRUN)
    if process.poll() is None:
        process.kill()
        process.wait()


def _reason(errors: Any, status: int) -> str:
    """The line of an error, of all that torchrun says."""
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    named = [line for line in lines if "Signal " in line]  # of the killed one, with which others only lost contact
    named += [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return (named or [f"exit status {status}"])[0]


# -- the report --------------------------------------------------------------------------------------------------------


def write(runs: Sequence[Run], options: Options, facts: dict[str, Any], out: Path) -> list[Path]:
    """Writes the results so far as JSON, Markdown and a picture."""
    paths = [out / f"{NAME}.{kind}" for kind in ("json", "md", "png")]
    settings = {"epochs": options.epochs, "rows": options.rows}
    every = [asdict(run) | {"epochs": report.columns(run.epochs)} for run in runs]
    report.write_json(paths[0], {"what": ABOUT, "machine": facts, "settings": settings, "runs": every})
    draw(paths[0])
    return paths


def draw(path: Path) -> None:
    """Writes the Markdown and the picture of a JSON file."""
    content = read_json(path)
    runs = [Run(**run | {"epochs": report.rows(run["epochs"])}) for run in content["runs"]]
    of = contenders(runs)
    parts = [f"# {NAME}", f"{ABOUT}.", CAPTION]
    if of:
        parts.append("\n".join(report.markdown(["", *of], list(_rows(of)))))
    if failures := [(run.name, run.failure) for run in runs if run.failure is not None]:
        parts.append("\n".join(report.markdown(("failed", "reason"), failures)))
    report.write_text(path.with_suffix(".md"), "\n\n".join([*parts, where(content["machine"])]) + "\n")
    picture(path.with_suffix(".png"), of, content["machine"])


def picture(path: Path, of: dict[str, list[Run]], machine: dict[str, Any]) -> None:
    """Draws the test error against the seconds of training: means over the seeds, their deviation as a band."""
    figure, axes = figure_and_axes((7.5, 4.6))
    for (name, some), color in zip(of.items(), COLORS, strict=False):
        epochs = min(len(run.epochs) for run in some)
        seconds = [statistics.fmean(run.epochs[i]["seconds"] for run in some) for i in range(epochs)]
        errors = [[100 - 100 * run.epochs[i]["accuracy"] for run in some] for i in range(epochs)]
        mean = list(map(statistics.fmean, errors))
        off = [statistics.stdev(one) if len(one) > 1 else 0.0 for one in errors]
        seeds = f", {len(some)} seeds" if len(some) > 1 else ""
        axes.plot(seconds, mean, color=color, lw=1.8, marker="o", ms=3, label=f"{name}{seeds}: {mean[-1]:.2f} %")
        low, high = ([m + sign * d for m, d in zip(mean, off, strict=True)] for sign in (-1, 1))
        axes.fill_between(seconds, low, high, color=color, alpha=0.18, lw=0)
    axes.set(xlabel="seconds, evaluations and all", ylabel="test error, %", yscale="log")
    axes.set_xlim(left=0)
    if of:
        report.plain_ticks(axes, "y")
        axes.legend(frameon=False)
    axes.grid(which="major", color="0.9", lw=0.8)
    report.save(figure, path, where(machine), dpi=110)


def contenders(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Those that did not fail, by what they compare."""
    of: dict[str, list[Run]] = {}
    for run in runs:
        if run.failure is None:
            of.setdefault(run.contender, []).append(run)
    return of


def _rows(of: dict[str, list[Run]]) -> Iterator[list[str]]:
    def row(title: str, value: Callable[[Run], Any], digits: int = 0, tested: bool = False) -> list[str]:
        """A text, or mean and standard deviation of the seeds where they have one; tested, how likely by chance."""

        def cell(runs: Sequence[Run]) -> str:
            some = [x for x in map(value, runs) if x is not None]
            if not some or isinstance(some[0], str):
                return some[0] if some else "-"
            return noted(spread(some, digits), chance(some) if tested else "")

        return [title, *map(cell, of.values())]

    def compared(value: Callable[[Run], Any], how: Callable[[Any, Any], float]) -> Callable[[Run], float | None]:
        """Of a run and that of one process with the same seed."""
        base = {run.seed: value(run) for run in of.get(_processes(1), ())}
        return lambda run: how(value(run), base[run.seed]) if value(run) and base.get(run.seed) else None

    speeds = {
        title: partial(Run.rows_per_second, phases=phases)
        for title, phases in (("first phase", FIRST), ("second phase", SECOND))
    }
    # The processes share the cores.
    yield row("cores of a process", lambda run: f"{min(run.threads, run.facts['cores'] / run.processes):.2g}")
    for title, name in FACTS.items():
        yield row(title, lambda run, name=name: f"{run.facts[name]:,}")
    yield row("density", lambda run: f"{100 * run.facts['density']:.3g} %")
    yield row("epochs", lambda run: str(run.epochs[-1]["epoch"]))
    yield row("of them in the first phase", lambda run: str(sum(epoch["phase"] in FIRST for epoch in run.epochs)))
    yield ["seeds", *(str(len(runs)) for runs in of.values())]
    yield row("test accuracy, %", lambda run: run.accuracy, 2)
    yield row("test accuracy, against 1 process", compared(lambda run: run.accuracy, sub), 2, tested=True)
    yield from (row(f"rows per second of all, {phase}", speed) for phase, speed in speeds.items())
    yield from (
        row(f"times those of 1 process, {phase}", compared(speed, truediv), 2) for phase, speed in speeds.items()
    )
    yield row("seconds, evaluations and all", lambda run: run.epochs[-1]["seconds"])


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


# -- the program -------------------------------------------------------------------------------------------------------


def numbers(name: str, text: str, least: int) -> list[int]:
    """Different ints with commas between.

    >>> numbers("processes", "1,2,4", 1)
    [1, 2, 4]
    """
    found = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if len(set(found)) < len(text.split(",")) or min(found) < least:
        raise BlockSparseError.expected(name, f"different ints of {least} or more, with commas between", repr(text))
    return found


def checked(arguments: argparse.Namespace) -> tuple[list[Run], Options]:
    """The requested runs, the fewest processes first; refuses those that could not run."""
    if arguments.epochs < 1:
        raise BlockSparseError.expected("epochs", "a positive int", arguments.epochs)
    if not 0 < arguments.patience < float("inf"):
        raise BlockSparseError.expected("patience", "a positive number of seconds", arguments.patience)
    processes, seeds = numbers("processes", arguments.processes, 1), numbers("seeds", arguments.seeds, 0)
    there = tables.load("fashion_mnist", arguments.data_dir).rows
    rows = there if arguments.rows is None else arguments.rows
    if not max(processes) <= rows <= there:
        raise BlockSparseError.expected("rows", f"{max(processes)}, one for each process, to {there:,}", rows)
    try:
        rates = [float(part) for part in arguments.rates.split(",")]
    except ValueError:
        rates = []
    if not rates or len(set(rates)) < len(rates) or not all(0 < rate < float("inf") for rate in rates):
        raise BlockSparseError.expected("rates", "different positive numbers, with commas between", arguments.rates)
    if max(processes) == 1 and (arguments.wassp or rates != [1]):
        raise BlockSparseError.expected("processes", "several somewhere, for --wassp and --rates", arguments.processes)
    options = Options(arguments.epochs, arguments.rows, arguments.data_dir, arguments.patience)
    if arguments.threads and (cores() == 1 or 1 not in processes):
        got = f"{cores()} of them, and processes {arguments.processes}"
        raise BlockSparseError.expected("threads", "two cores or more, and one process among the runs", got)
    threads = (1, cores()) if arguments.threads else (1,)
    one = [{"processes": 1, "threads": count} for count in threads] if 1 in processes else []
    many = [
        {"processes": count, "synchronous": synchronous, "rate": rate}
        for count in sorted(set(processes) - {1})
        for synchronous in ((False, True) if arguments.wassp else (False,))
        for rate in rates
    ]
    return [Run(seed=seed, **run) for seed in seeds for run in (*one, *many)], options


def main() -> None:
    parser = argparse.ArgumentParser(description="Fashion-MNIST by one process and by WASAP-SGD with several.")
    parser.add_argument("--data-dir", help="the folder of all data, or that of Fashion-MNIST; else it is downloaded")
    parser.add_argument("--epochs", type=int, default=100, help="of each run, both phases together")
    parser.add_argument("--processes", default="1,2,4", help="of the runs")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--wassp", action="store_true", help="WASSP-SGD as well")
    parser.add_argument("--threads", action="store_true", help="one process with a thread on each core as well")
    parser.add_argument("--rates", default="1", help="of several processes, times the rate of one")
    parser.add_argument("--rows", type=int, help="number of those to train on, for a quick look")
    parser.add_argument("--patience", type=float, default=900, help="seconds that an epoch may take")
    parser.add_argument("--out", type=Path, default=Path("results"), help="the folder of the report")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        asked = arguments.work
        work(asked["seed"], asked["synchronous"], asked["rate"], Options(**asked["options"]))
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on there is something to clean up
    console = Console()

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    torch.set_num_threads(1)  # as in each process: the machine's facts must record it
    try:
        runs, options = checked(arguments)
        report.check_folder(arguments.out)
        if (path := arguments.out / f"{NAME}.json").exists():
            raise BlockSparseError.expected("out", "a folder without another report", path)
        done: list[Run] = []
        for run in runs:
            facts = machine()
            measure(run, options, say)
            done.append(run)
            if run.failure is not None:
                say(f"{run.name} failed: {run.failure}", "bold red")
            for path in write(done, options, facts, arguments.out):
                say(f"wrote {path}", "dim")
    except BlockSparseError as error:
        say(f"error: {error}", "bold red")
        sys.exit(1)
    except KeyboardInterrupt:
        say("interrupted", "yellow")
        sys.exit(130)
    sys.exit(any(run.failure is not None for run in runs))


if __name__ == "__main__":
    main()
