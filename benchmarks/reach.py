"""Every target of a CPU in one run, op by op; each product is checked before it is timed.

    python benchmarks/reach.py                  some minutes on two cores, with nothing else running
    python benchmarks/reach.py --only conv2d    those of one op
    python benchmarks/reach.py --quick          the same on small shapes, to see that it runs

Prints a table per op, and writes it to benchmarks/results/<op>-<machine>-<instruction set>.md, with a JSON file
next to it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

import blocksparse as bs
from blocksparse.measure import Spread, alternate
from blocksparse.ops import cpu_core
from blocksparse.ops.conv import specs as conv_specs
from blocksparse.ops.conv.specs import ConvSpec
from blocksparse.ops.linear.specs import LINE_DENSITIES, LINE_INTERCEPT, REACH, SMALL_BLOCKS, TRAINING, LinearSpec
from blocksparse_lab import machine
from blocksparse_lab.bench import attention, gates, int8, lstm_reach, mlp, models, pixelcnn, rows
from blocksparse_lab.bench.case import OURS, Bench
from blocksparse_lab.bench.conv import ConvBench
from blocksparse_lab.bench.linear import LinearBench
from blocksparse_lab.bench.memory import apart, linear_peak
from blocksparse_lab.bench.rows import Row, judged, not_measured

RESULTS = Path(__file__).parent / "results"
BUDGET = 5.0  # seconds of timing per row
PASSES = ("forward", "dgrad", "wgrad")


def speedup_rows(bench: Bench, name: str, spec: LinearSpec | ConvSpec, targets: dict[str, float]) -> Iterator[Row]:
    """One row per peer: a median ratio at least as large as its target."""
    peers = tuple(targets) or ("dense",)
    result = bench.run(spec, peers)
    for peer in peers:
        least, details = targets.get(peer), result.as_dict()
        if peer in result.refused:
            target = "-" if least is None else f">= {least:.3g}x {peer}"
            yield Row(name, target, f"{peer} refused: {result.refused[peer]}", None, details)
        else:
            rate = f", {result.gflops:.0f} GFLOP/s"
            yield judged(name, result.speedup(peer), peer, least=least, more=rate, details=details)


def target_rows(bench: LinearBench, shrink: int) -> Iterator[Row]:
    """The rows of speed-ups over peers. Where the CPU lacks what a target presumes, it is measured without one."""
    amx = cpu_core.isa() == "amx"
    lacking = "another instruction set was asked for" if cpu_core.isas()["amx"] else "no AMX here"
    for name, target in REACH.items():
        spec, ratios = target.spec.shrunk(shrink), dict(target.ratios)
        title = f"{name}, hidden {spec.out_features}, {spec.tokens} tokens"
        if not name.startswith("break-even"):
            title += f", density {spec.density:g}"
        if target.needs == "amx" and not amx:
            for peer, least in ratios.items():
                yield not_measured(f"{title}, AMX", f">= {least:g}x {peer}", lacking)
            title, ratios = f"{title}, {cpu_core.isa()}", {}
        yield from speedup_rows(bench, title, spec, ratios)


def small_block_rows(bench: LinearBench, shrink: int) -> Iterator[Row]:
    """Small blocks against blocks of 32 at the same shape and density: how much of their speed is left."""
    for pass_ in PASSES:
        specs = {block: replace(TRAINING.shrunk(shrink), block=block, pass_=pass_) for block in (32, *SMALL_BLOCKS)}
        cases = {block: bench.case(spec) for block, spec in specs.items()}
        for case in cases.values():
            case.check(bench.seed)
        calls = {str(block): case.call(OURS) for block, case in cases.items()}
        samples = alternate(calls, rounds=bench.rounds, budget=bench.budget)
        for block, least in SMALL_BLOCKS.items():
            slower = samples.ratio(str(block), "32")
            part = Spread(1 / slower.median, 1 / slower.high, 1 / slower.low, slower.count)
            yield Row(
                f"fp32 {pass_}, blocks of {block} against 32",
                f">= {least:.0%} of the speed",
                f"{part.median:.0%} ({part.low:.0%}-{part.high:.0%})",
                part.median >= least,
                {"part": vars(part), "seconds": {name: vars(samples.time(name)) for name in calls}},
            )


def line_row(bench: Bench, specs: Sequence[LinearSpec] | Sequence[ConvSpec], most: float) -> Row:
    """Fits a line to time against nnz of specs that differ in density; its intercept as a part of the dense time."""
    cases = [bench.case(spec) for spec in specs]
    for case in cases:
        case.check(bench.seed)
    calls = {"dense": cases[0].call("dense")}
    calls |= {f"{case.layout.nnz}": case.call(OURS) for case in cases}
    samples = alternate(calls, rounds=bench.rounds, budget=2 * bench.budget)
    nnz = np.array([case.layout.nnz for case in cases])
    times = np.array([samples.time(str(count)).median for count in nnz])
    # Relative residuals: else the few dense points alone would say where the line meets zero.
    slope, intercept = np.polyfit(nnz, times, 1, w=1 / times)
    part = intercept / samples.time("dense").median
    off = np.abs((slope * nnz + intercept) / times - 1).max()
    return Row(
        f"fp32 {specs[0].pass_}, time against nnz, density {specs[0].density:g} to {specs[-1].density:g}",
        f"a line, intercept < {most:.0%} of dense",
        f"intercept {part:+.1%} of dense, points within {off:.0%} of the line",
        bool(abs(part) < most),
        {"nnz": nnz.tolist(), "seconds": times.tolist(), "dense": vars(samples.time("dense"))},
    )


def int8_rows(shrink: int) -> Iterator[Row]:
    return int8.rows(LinearBench(budget=BUDGET) if shrink == 1 else LinearBench(budget=0.1, rounds=3), shrink)


def memory_row(hidden: int, tokens: int, density: float) -> Row:
    work = f"fp32 memory of forward + backward, hidden {hidden}, {tokens} tokens, density {density:g}"
    try:
        return rows.memory_row(work, apart(linear_peak, hidden, tokens, density), dense=4 * hidden**2)
    except bs.BlockSparseError as error:
        return not_measured(work, "gradient + activations + O(nnz) indices", error)


def linear_rows(shrink: int) -> Iterator[Row]:
    bench = LinearBench(budget=BUDGET) if shrink == 1 else LinearBench(budget=0.1, rounds=3)
    yield from target_rows(bench, shrink)
    yield from small_block_rows(bench, shrink)
    yield line_row(bench, [replace(TRAINING.shrunk(shrink), density=d) for d in LINE_DENSITIES], LINE_INTERCEPT)
    yield from gates.rows(bench, shrink)
    yield memory_row(12288 // shrink, 64, 0.1)
    yield memory_row(131072 // shrink, 64, 0.001)


def conv_rows(shrink: int) -> Iterator[Row]:
    bench = ConvBench(budget=BUDGET) if shrink == 1 else ConvBench(budget=0.1, rounds=3)
    for target in conv_specs.REACH:
        for pass_ in PASSES:
            spec = replace(target.spec.shrunk(shrink), pass_=pass_)
            pattern = spec.pattern if spec.pattern != "random" else f"density {spec.density:g}"
            shape = f"{spec.in_channels} -> {spec.out_channels}, {spec.kernel}x{spec.kernel}, {spec.size}x{spec.size}"
            title = f"fp32 {pass_}, {shape}, {spec.images} images, {pattern}"
            yield from speedup_rows(bench, title, spec, {target.peer: target.ratio})
    for pass_ in PASSES:
        layer = replace(conv_specs.LAYER.shrunk(shrink), pass_=pass_)
        specs = [replace(layer, density=density) for density in conv_specs.LINE_DENSITIES]
        yield line_row(bench, specs, conv_specs.LINE_INTERCEPT)


OPS: dict[str, tuple[str, Callable[[int], Iterator[Row]]]] = {
    "linear": ("targets of the linear op", linear_rows),
    "int8": ("targets of products in 8 bits", int8_rows),
    "conv2d": ("targets of the convolutions", conv_rows),
    "lstm": ("targets of the recurrent networks", lambda shrink: lstm_reach.rows(BUDGET, quick=shrink != 1)),
    "models": ("targets of whole models", lambda shrink: models.rows(2 * BUDGET, quick=shrink != 1)),
    "mlp": ("targets of the truly sparse networks", lambda shrink: mlp.rows(4 * BUDGET, quick=shrink != 1)),
    "pixelcnn": ("targets of PixelCNN++", lambda shrink: pixelcnn.rows(4 * BUDGET, quick=shrink != 1)),
    "attention": ("targets of attention", lambda shrink: attention.rows(4 * BUDGET, quick=shrink != 1)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Every target of a CPU in one run.")
    parser.add_argument("--only", choices=tuple(OPS), help="the rows of one op")
    parser.add_argument("--quick", action="store_true", help="small shapes; writes nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cpu_core.core()  # says how to build it where it is missing
    console, stderr = Console(), Console(stderr=True)
    for op in [arguments.only] if arguments.only else OPS:
        what, measure = OPS[op]
        facts = machine.machine()
        found: list[Row] = []
        with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
            task = progress.add_task("starting", total=None)
            for row in measure(16 if arguments.quick else 1):
                found.append(row)
                progress.update(task, description=f"{row.work}: {row.measured}")
        console.print(rows.table(found, f"{op}: {machine.chip(facts)}, load {facts['load'][0]:g} before"))
        if not arguments.quick:
            path = arguments.out / f"{op}-{machine.slug(facts['cpu'])}-{facts['isa']}.json"
            rows.write(path, found, what, facts, budget=BUDGET)
            console.print(f"wrote {path} and .md", soft_wrap=True)


if __name__ == "__main__":
    main()
