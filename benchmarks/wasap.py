"""Train a sparse net on Fashion-MNIST with one process and with WASAP-SGD: accuracy, throughput, time.

    python benchmarks/wasap.py --data-dir DATA                            1, 2 and 4 processes, 100 epochs each
    python benchmarks/wasap.py --data-dir DATA --processes 1,2 --seeds 0,1,2 --wassp --threads --rates 0.5,1,2
    python benchmarks/wasap.py --data-dir DATA --epochs 1 --rows 2000 --out /tmp/wasap      a quick check

Each run is a `torchrun` of processes with one thread; --threads adds one process with a thread on each core. Without
--data-dir, Fashion-MNIST is downloaded. The program prints a line for each epoch. After each run it writes
wasap-fashion_mnist.json, .md and .png to the folder --out, so a failure keeps the results before it. A run is ended if
a process dies, or if it prints nothing for --patience seconds. The table names such runs, and the exit status is 1.
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

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored
    # Ctrl-C ends the program at once and silently: during imports, and while the processes of a run wait for messages.
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
from blocksparse_lab.folders import make_folder
from blocksparse_lab.machine import machine, where
from blocksparse_lab.recipes import mlp

NAME = "wasap-fashion_mnist"
ABOUT = (
    "The sparse MLP on Fashion-MNIST, trained by one process with SET or by several with WASAP-SGD. These first train "
    "one network asynchronously (WASSP-SGD: in step, with the mean gradient); then each trains its own copy, and the "
    "copies are averaged"
)
CAPTION = (
    "Accuracy is that of the final network, averaged and pruned. Rows per second are medians over the epochs of a "
    "phase. Figures are means and standard deviations over the seeds; differences compare runs of the same seed, with "
    "p by a paired t-test."
)
# The names of the phases in `Epoch.phase`.
FIRST, SECOND = ("asynchronous", "synchronous"), ("alone",)
# Facts of a run, by their titles in the table.
FACTS = {
    "threads per process": "threads",
    "training rows": "rows",
    "test rows": "tested",
    "rows per batch in each process": "batch",
    "connections": "connections",
}
# Seconds that torchrun has to end its processes, for which it waits 30 seconds itself.
TORCHRUN_TIMEOUT = 60


@dataclass(frozen=True)
class Options:
    """The options that all runs share."""

    epochs: int
    rows: int | None
    data_dir: str | None
    patience: float


@dataclass
class Run:
    """A run and its results."""

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
        """The test accuracy of the newest network, in %."""
        return 100 * self.epochs[-1]["accuracy"]

    def rows_per_second(self, phases: Sequence[str]) -> float | None:
        """Return the median over the epochs of a phase; None if it has no epochs."""
        speeds = [epoch["samples_per_second"] for epoch in self.epochs if epoch["phase"] in phases]
        return statistics.median(speeds) if speeds else None


# -- a process of a run ------------------------------------------------------------------------------------------------


def work(seed: int, synchronous: bool, rate: float, options: Options) -> None:
    """Train, in each process of torchrun; rank 0 prints the results as lines of JSON."""

    def print_json(**content: Any) -> None:
        if int(os.environ["RANK"]) == 0:
            print(json.dumps(content), flush=True)

    recipe, table = mlp.settings_for("fashion_mnist"), tables.load("fashion_mnist", options.data_dir)
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
    print_json(facts=facts)
    begun = time.perf_counter()

    def show(epoch: Epoch) -> None:
        print_json(epoch=asdict(epoch) | {"seconds": time.perf_counter() - begun})

    data, test = (table.train[some], table.train_labels[some]), (table.test, table.test_labels)
    train(model, data, settings, test=test, skip=model.output, report=show)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- a run -------------------------------------------------------------------------------------------------------------


def command(run: Run, options: Options) -> list[str]:
    """Return the `torchrun` command of a run."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.processes}"]
    work = {"seed": run.seed, "synchronous": run.synchronous, "rate": run.rate, "options": asdict(options)}
    return [*launch, __file__, "--work", json.dumps(work)]


def measure(run: Run, options: Options, log: Callable[[str], None]) -> None:
    """Train; `run.failure` records a failure."""
    environment = os.environ | {"OMP_NUM_THREADS": str(run.threads)}
    lines: queue.Queue[str | None] = queue.Queue()
    with tempfile.TemporaryFile("w+") as errors:
        # The process has its own session, so that only this program receives Ctrl-C and ends the process.
        process = subprocess.Popen(
            command(run, options), stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        try:
            while (line := lines.get(timeout=options.patience)) is not None:
                _record(run, line, options, log)
            status = process.wait(options.patience)
        except (queue.Empty, subprocess.TimeoutExpired):
            run.failure = f"no output for {options.patience:g} s"
            return
        finally:
            _end(process)
            reader.join(TORCHRUN_TIMEOUT)
        if status:
            run.failure = _reason(errors, status)
        elif not run.epochs or run.epochs[-1]["epoch"] < options.epochs:
            run.failure = "it ended before its last epoch"


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    """Queue the lines of a process's output, then None."""
    with process.stdout or nullcontext(()) as output:
        for line in output:
            lines.put(line)
    lines.put(None)


def _record(run: Run, line: str, options: Options, log: Callable[[str], None]) -> None:
    try:
        content = json.loads(line)
    except ValueError:  # a line of another program
        return
    if "facts" in content:
        run.facts = content["facts"]
    elif "epoch" in content:
        epoch = content["epoch"]
        run.epochs.append(epoch)
        log(
            f"{run.name}: epoch {epoch['epoch']} of {options.epochs}, {epoch['phase']}: loss {epoch['loss']:.4f}, "
            f"test accuracy {run.accuracy:.2f} %, {epoch['samples_per_second']:,.0f} rows/s"
        )


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that still runs. First ask: a killed torchrun would leave its processes behind."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(TORCHRUN_TIMEOUT)
    if process.poll() is None:
        process.kill()
        process.wait()


def _reason(errors: Any, status: int) -> str:
    """Return the line of torchrun's output that names the error."""
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    named = [line for line in lines if "Signal " in line]  # of a killed process; the others only lost the connection
    named += [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return (named or [f"exit status {status}"])[0]


# -- the report --------------------------------------------------------------------------------------------------------


def write(runs: Sequence[Run], options: Options, facts: dict[str, Any], out: Path) -> list[Path]:
    """Write the results so far as JSON, Markdown and a picture."""
    paths = [out / f"{NAME}.{kind}" for kind in ("json", "md", "png")]
    settings = {"epochs": options.epochs, "rows": options.rows}
    every = [asdict(run) | {"epochs": report.columns(run.epochs)} for run in runs]
    report.write_json(paths[0], {"what": ABOUT, "machine": facts, "settings": settings, "runs": every})
    draw(paths[0])
    return paths


def draw(path: Path) -> None:
    """Write the Markdown and the picture of a JSON file."""
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
    """Draw the test error against the seconds of training: means over the seeds, with deviations as bands."""
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
    axes.set(xlabel="seconds with evaluations", ylabel="test error, %", yscale="log")
    axes.set_xlim(left=0)
    if of:
        report.plain_ticks(axes, "y")
        axes.legend(frameon=False)
    axes.grid(which="major", color="0.9", lw=0.8)
    report.save(figure, path, where(machine), dpi=110)


def contenders(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs that did not fail, by contender."""
    of: dict[str, list[Run]] = {}
    for run in runs:
        if run.failure is None:
            of.setdefault(run.contender, []).append(run)
    return of


def _rows(of: dict[str, list[Run]]) -> Iterator[list[str]]:
    def row(title: str, value: Callable[[Run], Any], digits: int = 0, tested: bool = False) -> list[str]:
        """Return a row of texts, or of means and standard deviations over the seeds; `tested` adds p values."""

        def cell(runs: Sequence[Run]) -> str:
            some = [x for x in map(value, runs) if x is not None]
            if not some or isinstance(some[0], str):
                return some[0] if some else "-"
            return noted(spread(some, digits), chance(some) if tested else "")

        return [title, *map(cell, of.values())]

    def compared(value: Callable[[Run], Any], how: Callable[[Any, Any], float]) -> Callable[[Run], float | None]:
        """Return a comparison of a run's value with that of one process with the same seed."""
        base = {run.seed: value(run) for run in of.get(_processes(1), ())}
        return lambda run: how(value(run), base[run.seed]) if value(run) and base.get(run.seed) else None

    speeds = {
        title: partial(Run.rows_per_second, phases=phases)
        for title, phases in (("first phase", FIRST), ("second phase", SECOND))
    }
    # The processes share the cores.
    yield row("cores per process", lambda run: f"{min(run.threads, run.facts['cores'] / run.processes):.2g}")
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
        row(f"rows per second against 1 process, {phase}", compared(speed, truediv), 2)
        for phase, speed in speeds.items()
    )
    yield row("seconds with evaluations", lambda run: run.epochs[-1]["seconds"])


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


# -- the program -------------------------------------------------------------------------------------------------------


def numbers(name: str, text: str, least: int) -> list[int]:
    """Return different ints from a text with commas between them.

    >>> numbers("processes", "1,2,4", 1)
    [1, 2, 4]
    """
    parsed = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if len(set(parsed)) < len(text.split(",")) or min(parsed) < least:
        raise BlockSparseError.expected(name, f"different ints of {least} or more, with commas between", repr(text))
    return parsed


def checked(arguments: argparse.Namespace) -> tuple[list[Run], Options]:
    """Return the requested runs, with the fewest processes first; refuse runs that could not start."""
    if arguments.epochs < 1:
        raise BlockSparseError.expected("epochs", "a positive int", arguments.epochs)
    if not 0 < arguments.patience < float("inf"):
        raise BlockSparseError.expected("patience", "a positive number of seconds", arguments.patience)
    processes, seeds = numbers("processes", arguments.processes, 1), numbers("seeds", arguments.seeds, 0)
    available = tables.load("fashion_mnist", arguments.data_dir).rows
    rows = available if arguments.rows is None else arguments.rows
    if not max(processes) <= rows <= available:
        raise BlockSparseError.expected("rows", f"{max(processes)}, one for each process, to {available:,}", rows)
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
    parser.add_argument("--data-dir", help="folder of all data, or of Fashion-MNIST; downloaded by default")
    parser.add_argument("--epochs", type=int, default=100, help="epochs of each run, both phases together")
    parser.add_argument("--processes", default="1,2,4", help="numbers of processes, one run each")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--wassp", action="store_true", help="also run WASSP-SGD")
    parser.add_argument("--threads", action="store_true", help="also run one process with a thread on each core")
    parser.add_argument("--rates", default="1", help="learning rates of several processes, as multiples of that of one")
    parser.add_argument("--rows", type=int, help="number of training rows, for a quick check")
    parser.add_argument("--patience", type=float, default=900, help="maximum seconds without output")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the report")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        job = arguments.work
        work(job["seed"], job["synchronous"], job["rate"], Options(**job["options"]))
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on Ctrl-C must clean up
    console = Console()

    def log(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    torch.set_num_threads(1)  # as in each process; the machine's facts record it
    try:
        runs, options = checked(arguments)
        make_folder(arguments.out)
        if (path := arguments.out / f"{NAME}.json").exists():
            raise BlockSparseError.expected("out", "a folder without another report", path)
        finished: list[Run] = []
        for run in runs:
            facts = machine()
            measure(run, options, log)
            finished.append(run)
            if run.failure is not None:
                log(f"{run.name} failed: {run.failure}", "bold red")
            for path in write(finished, options, facts, arguments.out):
                log(f"wrote {path}", "dim")
    except BlockSparseError as error:
        log(f"error: {error}", "bold red")
        sys.exit(1)
    except KeyboardInterrupt:
        log("interrupted", "yellow")
        sys.exit(130)
    sys.exit(any(run.failure is not None for run in runs))


if __name__ == "__main__":
    main()
