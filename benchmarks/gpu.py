"""Measure every target on a GPU; writes a table, JSON, Markdown and a chart in two runs of a few minutes.

It needs PyTorch, numpy, `pip install rich safetensors typer`, and matplotlib for the chart.

    python benchmarks/gpu.py --check                  check results on this GPU without timing: a minute
    python benchmarks/gpu.py                          all rows, the most important first
    python benchmarks/gpu.py --predict --gpu h200     predict the rows with a model of that GPU; needs no GPU
    python benchmarks/gpu.py --predict --gpu h200 --linear 3072x768 --tokens 12608      ... for a layer of yours
    python benchmarks/gpu.py --list                   the rows and their targets; needs no GPU
    python benchmarks/gpu.py --only "few,hubs"        some rows by words of their names, or one row by its whole name
    python benchmarks/gpu.py --quick                  small shapes, to try the program
    python benchmarks/gpu.py --quick --device cpu     the same without a GPU; the times mean nothing

    compute-sanitizer --tool memcheck python benchmarks/gpu.py --check       check that kernels stay inside their memory

From a copy of the sources on another machine, with compiled kernels and tiles brought along:

    export PYTHONPATH=src BLOCKSPARSE_COMMIT=0123abc BLOCKSPARSE_TILES=out
    python -m blocksparse_lab tune --minutes 4 --out out
    python benchmarks/gpu.py --out out --cache out/cache

Each case is checked against float64 before it is timed. Copies of the weights, more than the L2 cache holds, take turns
in one CUDA graph per contender; the replays alternate. Peers that refuse are recorded with their reason. Files are
written after every row, to benchmarks/results/linear-<GPU>.json, .md and, at the end, .png. If the file is of this
commit, GPU and settings, only missing rows are measured.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console

from blocksparse import BlockSparseError
from blocksparse.checked import number
from blocksparse_lab import machine
from blocksparse_lab.bench import report
from blocksparse_lab.bench.device import Cuda, Device, Host
from blocksparse_lab.bench.linear import LinearBench
from blocksparse_lab.bench.linear_specs import LinearSpec
from blocksparse_lab.cli.bench import parts
from blocksparse_lab.cli.terminal import bar
from blocksparse_lab.folders import make_folder
from prediction import model as prediction
from targets import rows
from targets.contract import checks
from targets.gpu import GpuTargets, Job
from targets.gpu_chart import write_chart
from targets.rows import Row

RESULTS = Path(__file__).parent / "results"
DTYPES = ("bfloat16", "float16", "float32")  # of a predicted layer


def main() -> None:
    parser = argparse.ArgumentParser(description="Every target on a GPU.")
    parser.add_argument("--list", action="store_true", help="list the rows and their targets, and stop")
    parser.add_argument("--check", action="store_true", help="check some results without timing, and stop")
    parser.add_argument(
        "--predict", action="store_true", help="predict times with a model of a GPU, and stop; needs no GPU"
    )
    parser.add_argument("--gpu", choices=tuple(prediction.CHIPS), default="h200", help="the GPU to predict for")
    parser.add_argument("--linear", metavar="OUTxIN", help="with --predict: this linear layer instead of the rows")
    parser.add_argument("--tokens", type=int, help="tokens per call of that layer (4096)")
    parser.add_argument("--density", type=float, help="density of that layer (0.1)")
    parser.add_argument("--block", type=int, help="block size of that layer (32)")
    parser.add_argument("--dtype", help="dtype of that layer: bfloat16 (the default), float16 or float32")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="the row of this name, or rows whose names contain one of these words, separated by commas; repeatable",
    )
    parser.add_argument("--quick", action="store_true", help="small shapes; writes nothing without --out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, with --quick")
    parser.add_argument("--out", type=Path, help="folder for the files")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels, for later runs")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of timing per row")
    parser.add_argument("--tuning", type=float, default=3.0, help="seconds per shape for PyTorch's tuner")
    parser.add_argument("--minutes", type=float, default=7.5, help="do not start rows after this many minutes")
    arguments = parser.parse_args()
    if arguments.cache:
        os.environ["TRITON_CACHE_DIR"] = str(arguments.cache.resolve())
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 150, highlight=False)
    try:
        failed = run(arguments, console)
    except BlockSparseError as error:
        Console(stderr=True).print(f"error: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        failed = True
    sys.exit(int(failed))


def run(arguments: argparse.Namespace, console: Console) -> bool:
    """Run the program and return whether a row failed, which is more than a target that is not met."""
    number("--budget", arguments.budget, 0)
    number("--minutes", arguments.minutes, 0)
    number("--tuning", arguments.tuning, 0)
    layer = parse_layer(arguments)
    if arguments.list:
        jobs = select_jobs(GpuTargets(None).jobs(), arguments.only)
        console.print(rows.table([Row(job.work, job.target, "", None) for job in jobs], "targets on a GPU"))
        return False
    if arguments.predict:
        predict(arguments, layer, console)
        return False
    quick = arguments.quick
    if arguments.device == "cpu" and not (quick or arguments.check):
        raise BlockSparseError.expected("--device cpu", "--quick or --check with it", "full sizes")
    device: Device = Cuda() if arguments.device == "cuda" else Host(copies=4)
    if arguments.check:
        return False in list(run_checks(device))
    timing: dict[str, Any] = {"rounds": 1 if quick else 51, "budget": 0.01 if quick else arguments.budget}
    bench = LinearBench(tuning=2.0 if quick else arguments.tuning, device=device, **timing)
    settings: dict[str, Any] = {**timing, "seed": bench.seed, "tuning": bench.tuning, "shrink": 16 if quick else 1}
    facts = machine.machine(arguments.device)
    chip = facts["gpu"]["name"] if facts["gpu"] else facts["cpu"]
    folder = arguments.out or (None if quick else RESULTS)
    path = folder and folder / f"linear-{machine.slug(chip)}.json"
    if folder:
        make_folder(folder)  # before measuring for minutes
    reach = GpuTargets(bench, settings["shrink"], rows.read_earlier_rows(path, facts, settings) if path else ())
    every = reach.jobs()
    jobs = select_jobs(every, arguments.only)

    known_rows, what = reach.rows, "targets on a GPU" + (", small shapes: numbers that mean nothing" if quick else "")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the rows so far are drawn and shown
    try:
        for of_job in measure_jobs(reach, jobs, 60 * arguments.minutes):
            known_rows |= {row.work: row for row in of_job}
            if path:
                ordered = [row for job in every for row in known_rows.values() if job.gives(row.work)]
                rows.write(path, ordered, what, facts, **settings)
    finally:
        console.print(rows.table(list(known_rows.values()), f"{what}; {machine.where(facts)}"), highlight=True)
        if path:
            drawn = draw_chart(path.with_suffix(".png"), reach, machine.where(facts))
            console.print(f"wrote {path}, .md{drawn}", soft_wrap=True)
    return any(row.measured.startswith("FAILED") for row in known_rows.values())


def parse_layer(arguments: argparse.Namespace) -> LinearSpec | None:
    """Return the layer that --linear names, or None.

    Raises:
        BlockSparseError: it names no layer, or its other options come without it.
    """
    names = ("tokens", "density", "block", "dtype")
    layer_options: dict[str, Any] = {
        name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None
    }
    if arguments.linear is None:
        if layer_options:
            raise BlockSparseError.expected(f"--{next(iter(layer_options))}", "--linear OUTxIN with it", "none")
        return None
    if not arguments.predict:
        raise BlockSparseError.expected("--linear", "--predict with it", "none")
    sizes = re.fullmatch(r"(\d+)x(\d+)", arguments.linear)
    if not sizes:
        raise BlockSparseError.expected("--linear", "OUTxIN, as in 3072x768", repr(arguments.linear))
    if layer_options.get("dtype", "bfloat16") not in DTYPES:
        raise BlockSparseError.expected("--dtype", f"one of {', '.join(DTYPES)}", repr(arguments.dtype))
    options: dict[str, Any] = {"tokens": 4096, "dtype": "bfloat16"} | layer_options
    spec = LinearSpec(int(sizes[1]), int(sizes[2]), **options)
    blocks = spec.out_features * spec.in_features / spec.block**2
    if spec.density * blocks < 1:
        raise BlockSparseError.expected("--density", f"a block of {blocks:g}, 1, or more", f"{spec.density:g} of them")
    return spec


def predict(arguments: argparse.Namespace, layer: LinearSpec | None, console: Console) -> None:
    """Print the table of predictions with the times measured on such a GPU, and write it as Markdown with --out."""
    chip = prediction.CHIPS[arguments.gpu]
    found = prediction.compiled(chip, *([prediction.layer_name(layer)] if layer else []))
    results = [] if layer else [rows.read(path) for path in RESULTS.glob(f"linear-*{arguments.gpu}*.json")]
    lines = prediction.table(found, chip, [row for _, of_run in results for row in of_run])
    names = [(line[0], prediction.label(line[0])) for line in lines]
    lines = [lines[nth] for nth in select(names, arguments.only, "--predict")]
    commits = ", ".join(str(facts["machine"].get("commit", "")) for facts, _ in results)
    error = prediction.LARGEST_ERROR
    title = f"predicted for {chip.name}: a model fitted to an H100, off by {error} on the H100 and the H200"
    if layer:
        shape = f"{layer.out_features}x{layer.in_features}, {layer.tokens} tokens, block {layer.block}"
        title = f"{shape}, density {layer.density:g}, {layer.dtype}, {title}"
    if commits:
        title += f"; measured at {commits}, whose kernels may have been others"
    head, shown = prediction.without_empty_columns(lines)
    brief = [(prediction.label(line[0]), *line[1:]) for line in shown]
    console.print(report.table(head, brief, title, text=3))
    if arguments.out:
        path = arguments.out / f"predicted-{arguments.gpu}.md"
        made = "\n".join(report.markdown(head, shown, text=3))
        report.write_text(path, f"{made}\n\n{title}; {machine.where(machine.machine())}\n")
        console.print(f"wrote {path}", soft_wrap=True)


def run_checks(device: Device) -> Iterator[bool]:
    """Print a line for each check, and yield whether it holds."""
    start = monotonic()
    for what, check in checks(device):
        try:
            errors = (f"{name} {error:.1e} of at most {most:.0e}" for name, (error, most) in check().items())
            text, holds = ", ".join(errors), True
        except Exception as error:  # the other checks still run
            text, holds = f"{type(error).__name__}: {error}", False
        print(f"[{monotonic() - start:4.0f} s] {'right' if holds else 'WRONG'} {what}: {text}", flush=True)
        yield holds


def select(names: Sequence[tuple[str, ...]], only: list[str], by: str) -> list[int]:
    """Return the indices of the names that `only` selects: by a whole name, or else by words of it."""
    lower = [[name.lower() for name in of] for of in names]
    some: set[int] = set()
    for layer_name in only or [""]:
        words = [word.lower() for word in parts(layer_name)]
        exact = {nth for nth, of in enumerate(lower) if layer_name.strip().lower() in of}
        matches = exact or {
            nth for nth, of in enumerate(lower) if not words or any(word in name for word in words for name in of)
        }
        if not matches:
            raise BlockSparseError.expected("--only", f"words of the rows that {by} shows", repr(layer_name))
        some |= matches
    return sorted(some)


def select_jobs(jobs: list[Job], only: list[str]) -> list[Job]:
    return [jobs[nth] for nth in select([(job.work,) for job in jobs], only, "--list")]


def measure_jobs(reach: GpuTargets, jobs: list[Job], seconds: float) -> Iterator[list[Row]]:
    """Yield the rows of each job as they come, with a bar on a terminal, or else a line after the caller has written
    each row.
    """
    start = monotonic()
    with bar(Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=job.work)
            late = monotonic() - start > seconds and not reach.known(job)
            new_rows = [Row(job.work, job.target, rows.OUT_OF_TIME, None)] if late else reach.run(job)
            yield new_rows
            for row in new_rows if progress.disable else ():
                print(f"[{monotonic() - start:4.0f} s] {row.work}: {row.measured}", file=sys.stderr, flush=True)
            progress.advance(task)


def draw_chart(path: Path, reach: GpuTargets, where: str) -> str:
    """Draw the chart; return how the list of written files ends."""
    if not reach.cases:
        return ""
    try:
        write_chart(path, reach.cases, reach.ceiling_details(), where)
    except KeyError as row:
        return f"; no chart without the row {row}"
    except Exception as error:  # the results are written anyway
        return f"; no chart: {error}"
    return " and .png"


if __name__ == "__main__":
    main()
