"""Measure memory and time of training truly sparse networks with up to 100 million neurons; both grow linearly.

    python benchmarks/extreme.py                        all sizes, hours on two cores
    python benchmarks/extreme.py --neurons 1M,5M        some sizes; results of the others are kept
    python benchmarks/extreme.py --seeds 0,1,2          several seeds for each size
    python benchmarks/extreme.py --quick                a small one, to try the program; writes nothing

Sizes that do not fit into memory are refused, with the bytes that they need. After each run the table is written to
docs/results/extreme.md, with JSON and a picture next to it. Runs that are in that file are not repeated.

A run is that of `blocksparse train mlp --neurons N`: 65,536 synthetic inputs, of which 512 carry the class, four hidden
layers, two classes, SET with epsilon 1, batches of 4 rows; two epochs, between which the topology evolves. It has a
process of its own. Memory is recorded per phase, as the system's high-water mark, including Python and PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from blocksparse.checkpoint import read_json
from blocksparse.errors import BlockSparseError
from blocksparse.sparsity import erdos_renyi_density
from blocksparse.topology.drawings.style import COLORS
from blocksparse_lab.bench import report
from blocksparse_lab.bench.report import duration
from blocksparse_lab.cli.train import parse_count
from blocksparse_lab.folders import make_folder
from blocksparse_lab.machine import available_memory, commits, machine, where
from blocksparse_lab.recipes import mlp
from blocksparse_lab.training.trainer import Callback, Trainer
from targets.memory import process_bytes, reset_peak
from targets.rows import Line

OUT = Path(__file__).parents[1] / "docs" / "results" / "extreme.json"
NEURONS = (1_000_000, 5_000_000, 10_000_000, 20_000_000, 50_000_000, 100_000_000)
PHASES = ("build", "save", "train", "evaluate", "evolve")

# MIN_BYTES: a process without a net takes a third of it, and small nets leave holes in its heap. Beyond it, runs of 10
# to 100 million neurons took at most 71 bytes per connection, including half a neuron for each.
MIN_BYTES, BYTES_PER_CONNECTION = 3 * 2**28, 72
# Two checkpoints: the new one is written before the old one is deleted.
DISK_PER_CONNECTION = 2 * 18
SECONDS_BETWEEN_LINES = 10.0

Say = Callable[[str], object]


@dataclass(frozen=True)
class ExtremeRun:
    """One run: the approximate number of inputs, hidden neurons and outputs, and the rows to train and to test on.

    >>> ExtremeRun(50_000_000).sizes, ExtremeRun(50_000_000).connections
    ((65536, 12483616, 12483616, 12483616, 12483616, 2), 99934466)
    """

    neurons: int
    rows: int = 128
    epochs: int = 2
    batch: int = 4
    seed: int = 0
    tested: int = 128

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the layers."""
        return mlp.EXTREME_FEATURES, *mlp.extreme_hidden(self.neurons), 2

    @property
    def connections(self) -> int:
        """The expected number of connections."""
        pairs = zip(self.sizes, self.sizes[1:], strict=False)
        return round(sum(erdos_renyi_density((n_out, n_in), 1) * n_in * n_out for n_in, n_out in pairs))

    @property
    def predicted(self) -> int:
        """An upper bound on the peak memory in bytes."""
        return MIN_BYTES + BYTES_PER_CONNECTION * self.connections


@dataclass
class RunResult:
    """The result of one run, for JSON.

    Args:
        neurons, connections, sizes: of the net as it was built.
        predicted: bytes.
        peak: largest bytes by phase; `resident` are the bytes after it.
        seconds: median by phase; "train" is a step, "epoch" an epoch with its evolution.
        losses: means over the first and the last quarter of the steps.
        held_out: errors in % after each epoch.
    """

    neurons: int
    connections: int
    sizes: list[int]
    predicted: int
    peak: dict[str, int]
    resident: dict[str, int]
    seconds: dict[str, float]
    losses: list[float]
    held_out: list[float]
    run: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """The largest bytes of all phases."""
        return max(self.peak.values())

    @property
    def key(self) -> tuple[int, int]:
        """The size and the seed, which identify a run."""
        return self.run["neurons"], self.run["seed"]


# -- one run, in a process of its own --------------------------------------------------------------------------------


class Phases(Callback):
    """Records memory and seconds of the phases of a training; an outer phase does not count its inner ones.

    >>> phases = Phases()
    >>> with phases.phase("build"):
    ...     net = [0] * 1000
    >>> list(phases.seconds), phases.peak["build"] >= phases.resident["build"] > 0
    (['build'], True)
    """

    def __init__(self) -> None:
        self.peak: dict[str, int] = {}
        self.resident: dict[str, int] = {}
        self.seconds: dict[str, list[float]] = {}
        self._open: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record memory and seconds of a phase."""
        self._mark()
        self._open.append(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds.setdefault(name, []).append(time.perf_counter() - start)
            self._mark()
            self._open.pop()

    def _mark(self) -> None:
        """Count the high-water mark since the last call for the innermost open phase."""
        if self._open:
            name = self._open[-1]
            self.resident[name] = process_bytes("VmRSS")
            self.peak[name] = max(self.peak.get(name, 0), self.resident[name], process_bytes("VmHWM"))
        reset_peak()


def train(spec: ExtremeRun, run: str | Path, say: Say = lambda text: None) -> RunResult:
    """Train in a folder, and measure this process meanwhile."""
    phases = Phases()
    recipe = replace(mlp.extreme(spec.neurons), epochs=spec.epochs, batch=spec.batch, seed=spec.seed)
    data = mlp.extreme_data(spec.rows, spec.tested, spec.seed)
    with phases.phase("build"):
        model = mlp.network(recipe, data)
    connections = mlp.size_of(model).connections
    say(f"built in {duration(phases.seconds['build'][0])}: {connections:,} connections")
    task = mlp.task(recipe, model, data)
    trainer = Trainer(task, run, mlp.paced(recipe, task, save_minutes=0.0))
    task.methods["set"].step = phases.phase("evolve")(task.methods["set"].step)  # type: ignore[method-assign]
    losses: list[float] = []
    held_out: list[float] = []
    last_line = time.monotonic()
    for step in trainer.steps(phases):
        losses.append(trainer.loss)
        at = f"step {step:,} of {task.steps:,}"
        if len(phases.seconds.get("evaluate", ())) > len(held_out):
            held_out.append(float(trainer.held_out))  # type: ignore[arg-type]
            say(f"{at}: {held_out[-1]:.1f} % of the held-out rows wrong")
        if time.monotonic() - last_line >= SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            last = f"{duration(phases.seconds['train'][-1])} a step, {process_bytes('VmRSS') / 2**30:.2f} GiB"
            say(f"{at}: loss {losses[-1]:.3f}, {last}")
    quarter = max(1, len(losses) // 4)
    # The median of many steps ignores the one after an evolution.
    seconds = {name: float(np.median(phases.seconds.get(name, [0.0]))) for name in PHASES}
    seconds["epoch"] = seconds["train"] * task.steps_per_epoch + seconds["evolve"]
    return RunResult(
        neurons=sum(model.sizes),
        connections=connections,
        sizes=list(model.sizes),
        predicted=spec.predicted,
        peak=phases.peak,
        resident=phases.resident,
        seconds=seconds,
        losses=[float(np.mean(part)) for part in (losses[:quarter], losses[-quarter:])],
        held_out=held_out,
        run=asdict(spec),
        machine=machine(),
    )


def run_here(spec: str, out: str) -> None:
    """Run in the process of a run: write the result to a file and progress to the standard output."""
    with tempfile.TemporaryDirectory(dir=Path(out).parent) as run:
        result = train(ExtremeRun(**json.loads(spec)), run, lambda text: print(text, flush=True))
    Path(out).write_text(json.dumps(asdict(result)))


# -- all of them -----------------------------------------------------------------------------------------------------


def measure(spec: ExtremeRun, folder: Path, say: Say = lambda text: None, force: bool = False) -> RunResult:
    """Make one run in a process of its own, with a temporary folder inside `folder`.

    Args:
        say: receives a line of progress now and then.
        force: run even if memory or disk seem too small.

    Raises:
        BlockSparseError: memory or disk are too small, or the process died.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for what, needed, there in (
        ("memory", spec.predicted, available_memory()),
        ("disk", DISK_PER_CONNECTION * spec.connections, _free_disk_bytes(folder)),
    ):
        if needed > there and not force:
            size = f"{needed / 2**30:.1f} GiB free for {spec.connections:,} connections"
            raise BlockSparseError.expected(what, f"{size}, or --force", f"{there / 2**30:.1f} GiB")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        out = f"{place}/found.json"
        command = [sys.executable, __file__, "--run-here", json.dumps(asdict(spec)), out]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                say(line.rstrip())
        if process.returncode:
            reason = "killed, likely for memory" if process.returncode == -9 else f"status {process.returncode}"
            raise BlockSparseError.expected(f"{spec.neurons:,} neurons", "a run to its end", reason)
        return RunResult(**read_json(Path(out)))


def _free_disk_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def lines(results: Sequence[RunResult]) -> dict[str, Line]:
    """Return the lines of peak memory in bytes and of seconds of a step against connections; none for fewer than three
    sizes.
    """
    if _count_sizes(results) < 3:
        return {}
    x = [one.connections for one in results]
    memory, seconds = [one.most for one in results], [one.seconds["train"] for one in results]
    return {"memory": Line.of(x, memory), "step": Line.of(x, seconds)}


def merged(path: Path, new: RunResult) -> list[RunResult]:
    """Return the runs of a file, by size, with this one in place of the one with the same size and seed."""
    return sorted([*(one for one in read(path) if one.key != new.key), new], key=lambda one: one.key)


def read(path: Path) -> list[RunResult]:
    """Return the runs of a file; none if it does not exist."""
    try:
        return [RunResult(**one) for one in read_json(path)["runs"]] if path.exists() else []
    except (KeyError, TypeError) as error:
        raise BlockSparseError.expected(str(path), "the report of extreme.py", f"{error!r:.99}") from None


def _count_sizes(results: Sequence[RunResult]) -> int:
    return len({one.run["neurons"] for one in results})


def write(path: Path, results: Sequence[RunResult]) -> None:
    """Write the runs as JSON, tables in Markdown and, for several sizes, a picture."""
    fits = lines(results)
    content = {
        "what": "truly sparse MLPs of many neurons: memory and time",
        "lines": {name: asdict(line) for name, line in fits.items()},
        "runs": [asdict(one) for one in results],
    }
    parts = ["# Extreme networks", CAPTION, report.markdown(list(COLUMNS), _table_cells(results), text=0)]
    if fits:
        memory, step = fits["memory"], fits["step"]
        rows = [
            ("peak memory", f"{memory.slope:.1f} bytes", f"{format_gib(memory.intercept)} GiB", f"{memory.off:.0%}"),
            ("a step", f"{step.slope * 1e9:.1f} ns", f"{step.intercept:.2f} s", f"{step.off:.0%}"),
        ]
        parts.append(report.markdown(("line", "for each connection", "and", "the runs are within"), rows))
    if _count_sizes(results) > 1:
        parts.append(f"![Memory and time of a step against connections]({path.stem}.png)")
    by_size: dict[str, list[dict[str, Any]]] = {}
    for one in results:
        by_size.setdefault(f"{one.neurons:,} neurons", []).append(one.machine)
    report.write(path, content, *parts, where(results[-1].machine) + commits(by_size))
    if _count_sizes(results) > 1:
        _draw(path.with_suffix(".png"), results, fits)


CAPTION = """`blocksparse train mlp --neurons N` on a CPU: 65,536 inputs, four hidden layers of equal size, two classes.
Such sizes can be trained; the task is too easy to show what they gain, since a linear rule solves it too.

- Layouts are Erdos-Renyi graphs with epsilon 1, which SET changes between epochs. Training uses All-ReLU with slope
  0.05, He's initialization by each neuron's real inputs, and momentum SGD whose learning rate decays to 0.
- A row is normal noise; 512 of its inputs are shifted by +2 or -2 according to the class.
- Peak is the largest resident memory of the process in any phase, with about 0.25 GiB for Python and PyTorch.
- Loss is the mean of the first and of the last quarter of the steps, in nats. Held-out error is measured on other rows
  after each epoch. An epoch includes its evolution.
- Slope, learning rate, dropout and shift were chosen so that networks of 1 million neurons learn the task in as many
  steps, with another seed. Other programs ran at the same time, so seconds say little."""
COLUMNS: dict[str, Callable[[RunResult], str]] = {
    "neurons": lambda one: f"{one.neurons:,}",
    "connections": lambda one: f"{one.connections:,}",
    "seed": lambda one: f"{one.run['seed']}",
    "rows per epoch": lambda one: f"{one.run['rows']:,}",
    "held-out rows": lambda one: f"{one.run['tested']:,}",
    "rows per batch": lambda one: f"{one.run['batch']:,}",
    "peak, GiB": lambda one: format_gib(one.most),
    "bytes per connection": lambda one: f"{one.most / one.connections:.1f}",
    "built, GiB": lambda one: format_gib(one.resident["build"]),
    "training, GiB": lambda one: format_gib(one.peak.get("train", 0)),
    "evaluating, GiB": lambda one: format_gib(one.peak.get("evaluate", 0)),
    "evolving, GiB": lambda one: format_gib(one.peak.get("evolve", 0)),
    "saving, GiB": lambda one: format_gib(one.peak.get("save", 0)),
    "build": lambda one: duration(one.seconds["build"]),
    "a step": lambda one: duration(one.seconds["train"]),
    "an evolution": lambda one: duration(one.seconds["evolve"]),
    "saving": lambda one: duration(one.seconds["save"]),
    "an epoch": lambda one: duration(one.seconds["epoch"]),
    "loss": lambda one: f"{one.losses[0]:.3f} to {one.losses[1]:.3f}",
    "instruction set": lambda one: one.machine["isa"],
    "held-out error, %": lambda one: ", ".join(f"{error:.1f}" for error in one.held_out),
}


def format_gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _table_cells(results: Sequence[RunResult]) -> list[list[str]]:
    return [[cell(one) for cell in COLUMNS.values()] for one in results]


def _draw(path: Path, results: Sequence[RunResult], fits: Mapping[str, Line]) -> None:
    """Draw memory and the time of a step against connections, with their lines."""
    figure, axes = report.figure_and_axes((9.0, 4.0), columns=2)
    x = [one.connections / 1e6 for one in results]
    panels = (
        ("memory", "GiB", "Memory grows linearly with the connections", [one.most / 2**30 for one in results], 2**30),
        ("step", "seconds", "The time of a step of 4 rows does too", [one.seconds["train"] for one in results], 1),
    )
    for ax, (key, unit, title, y, scale) in zip(axes, panels, strict=True):
        ax.plot(x, y, "o", color=COLORS[0], ms=5)
        if key in fits:
            line = fits[key]
            label = f"within {line.off:.0%} of a line"
            points = np.geomspace(x[0], x[-1], 100)
            ax.plot(points, (line.slope * points * 1e6 + line.intercept) / scale, color=COLORS[1], lw=1.2, label=label)
            ax.legend(frameon=False)
        report.log_axes(ax, title, "million connections", unit)
    report.save(figure, path, where(results[-1].machine))


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time of networks of up to 100 million neurons.")
    parser.add_argument("--neurons", help="sizes, separated by commas, such as 1M,50M")
    parser.add_argument("--seeds", default="0", help="random seeds, separated by commas")
    parser.add_argument("--rows", type=int, default=ExtremeRun.rows, help="rows per epoch")
    parser.add_argument("--epochs", type=int, default=ExtremeRun.epochs)
    parser.add_argument("--force", action="store_true", help="try sizes that seem too large for memory too")
    parser.add_argument("--quick", action="store_true", help="a small one; writes nothing")
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON file")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="folder of checkpoints")
    parser.add_argument("--run-here", nargs=2, metavar=("SPEC", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_here:
        run_here(*arguments.run_here)
        return
    console = Console(soft_wrap=True, highlight=False)
    try:
        sys.exit(measure_all(arguments, console))
    except BlockSparseError as error:
        console.print(f"error: {error}", style="red", markup=False)
        sys.exit(1)


def measure_all(arguments: argparse.Namespace, console: Console) -> int:
    """Train the nets one after the other, and return the exit status."""
    sizes = [parse_count(text, "neurons") for text in (arguments.neurons or "").split(",") if text]
    if not all(text.isdecimal() for text in arguments.seeds.split(",")):
        raise BlockSparseError.expected("seeds", "ints of 0 or more, with commas between", repr(arguments.seeds))
    seeds = [int(text) for text in arguments.seeds.split(",")]
    if not arguments.quick:
        make_folder(arguments.out.parent)
    specs = [ExtremeRun(n, arguments.rows, arguments.epochs, seed=seed) for n in sizes or NEURONS for seed in seeds]
    done = [] if arguments.quick else [one.run for one in read(arguments.out)]
    specs = [spec for spec in specs if asdict(spec) not in done]
    if arguments.quick:
        specs = [ExtremeRun(100_000, rows=16)]
    status = 0
    for spec in specs:
        head = f"{spec.neurons / 1e6:g} million neurons, seed {spec.seed}"
        console.print(
            f"[bold]{head}[/]: about {spec.connections:,} connections, {spec.predicted / 2**30:.1f} GiB at most; "
            f"{available_memory() / 2**30:.1f} GiB are available"
        )
        try:
            result = measure(spec, arguments.scratch, lambda text: console.print(f"  {text}"), arguments.force)
        except BlockSparseError as error:
            console.print(f"  {error}", style="red", markup=False)
            status = 1
            continue
        console.print(
            f"  {result.most / 2**30:.2f} GiB at the peak, "
            f"{result.most / result.connections:.1f} bytes per connection, "
            f"{result.seconds['train']:.2f} s a step, {result.seconds['epoch']:.0f} s an epoch, "
            f"{result.held_out[-1]:.1f} % of the held-out rows wrong"
        )
        if not arguments.quick:
            write(arguments.out, merged(arguments.out, result))
            console.print(f"  wrote {arguments.out}")
    return status


if __name__ == "__main__":
    main()
