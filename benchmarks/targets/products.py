"""Targets of linear products and convolutions on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from blocksparse.errors import BlockSparseError
from blocksparse.nn.linear import Linear
from blocksparse.ops import cpu_core
from blocksparse.ops.linear import linear
from blocksparse_lab.bench import conv_specs
from blocksparse_lab.bench.case import OURS, Bench
from blocksparse_lab.bench.conv import ConvBench
from blocksparse_lab.bench.conv_specs import ConvSpec
from blocksparse_lab.bench.linear import LinearBench
from blocksparse_lab.bench.linear_specs import LINE_DENSITIES, LINE_INTERCEPT, REACH, SMALL_BLOCKS, TRAINING, LinearSpec
from targets.memory import measure_linear_memory, run_in_process
from targets.rows import (
    MEMORY_TARGET,
    Line,
    Race,
    Row,
    RowIterator,
    format_minimum,
    format_ratio,
    memory_row,
    race,
    speedup_row,
    timing_options,
    unmeasured_row,
)

PASSES = ("forward", "dgrad", "wgrad")


def linear_rows(budget: float, quick: bool = False) -> RowIterator:
    """Measure all targets of the linear op; `quick` uses small shapes, to try the program."""
    bench, shrink = LinearBench(**timing_options(budget, quick)), 16 if quick else 1
    yield from _targets(bench, shrink)
    yield from _small_blocks(bench, TRAINING.shrunk(shrink))
    yield line_row(bench, [replace(TRAINING.shrunk(shrink), density=d) for d in LINE_DENSITIES], LINE_INTERCEPT)
    yield from gate_rows(bench, shrink)
    yield from module_rows(budget, quick)
    yield _memory_row(12288 // shrink, 64, 0.1)
    yield _memory_row(131072 // shrink, 64, 0.001)


def conv_rows(budget: float, quick: bool = False) -> RowIterator:
    """Measure all targets of the convolutions."""
    bench, shrink = ConvBench(**timing_options(budget, quick)), 16 if quick else 1
    for target in conv_specs.REACH:
        for pass_ in PASSES:
            spec = replace(target.spec.shrunk(shrink), pass_=pass_)
            pattern = spec.pattern if spec.pattern != "random" else f"density {spec.density:g}"
            shape = f"{spec.in_channels} -> {spec.out_channels}, {spec.kernel}x{spec.kernel}, {spec.size}x{spec.size}"
            title = f"fp32 {pass_}, {shape}, {spec.images} images, {pattern}"
            yield from _speedups(bench, title, spec, {target.peer: target.ratio})
    for pass_ in PASSES:
        layer = replace(conv_specs.LAYER.shrunk(shrink), pass_=pass_)
        specs = [replace(layer, density=density) for density in conv_specs.LINE_DENSITIES]
        yield line_row(bench, specs, conv_specs.LINE_INTERCEPT)


def _speedups(bench: Bench, work: str, spec: LinearSpec | ConvSpec, targets: dict[str, float | None]) -> RowIterator:
    """Yield a row for each peer."""
    result = bench.run(spec, list(targets))
    for peer, least in targets.items():
        if peer in result.refused:
            refused = f"{peer} refused: {result.refused[peer]}"
            yield Row(work, format_minimum(least, peer), refused, None, result.as_dict())
        else:
            yield speedup_row(work, result, peer, least, lambda: f", {result.gflops:.0f} GFLOP/s")


def _targets(bench: Bench, shrink: int) -> RowIterator:
    """Yield the rows of speed-ups over peers; a CPU that lacks what a target presumes is timed without a target."""
    amx = cpu_core.isa() == "amx"
    lacking = "another instruction set was asked for" if cpu_core.isas().get("amx") else "no AMX here"
    for name, target in REACH.items():
        spec = target.spec.shrunk(shrink)
        ratios: dict[str, float | None] = dict(target.ratios)
        title = f"{name}, hidden {spec.out_features}, {spec.tokens} tokens"
        if not name.startswith("break-even"):
            title += f", density {spec.density:g}"
        if target.needs == "amx" and not amx:
            for peer, least in ratios.items():
                yield unmeasured_row(f"{title}, AMX", format_minimum(least, peer), lacking)
            title, ratios = f"{title}, {cpu_core.isa()}", {"dense": None}
        yield from _speedups(bench, title, spec, ratios)


def _small_blocks(bench: Bench, shape: LinearSpec) -> RowIterator:
    """Yield the speed of small blocks as a fraction of that of blocks of 32, at the same shape and density."""
    for pass_ in PASSES:
        specs = {f"{block}": replace(shape, block=block, pass_=pass_) for block in (32, *SMALL_BLOCKS)}
        samples = bench.alternate({name: bench.checked_case(spec).call(OURS) for name, spec in specs.items()})
        for block, least in SMALL_BLOCKS.items():
            part = samples.ratio("32", f"{block}")
            yield Row(
                f"fp32 {pass_}, blocks of {block} against 32",
                f">= {least:.0%} of the speed",
                f"{part.median:.0%} ({part.low:.0%}-{part.high:.0%})",
                part.median >= least,
                {"part": vars(part), **Race(samples).details},
            )


def line_row(bench: Bench, specs: Sequence[LinearSpec] | Sequence[ConvSpec], most: float) -> Row:
    """Fit a line to time against nnz over specs of rising density; the row has its intercept as a fraction of the dense
    time.
    """
    cases = [bench.checked_case(spec) for spec in specs]
    calls = {"dense": cases[0].call("dense")} | {f"{case.layout.nnz}": case.call(OURS) for case in cases}
    samples = race(calls, bench.rounds, 2 * bench.budget).samples
    nnz = [case.layout.nnz for case in cases]
    seconds = [samples.time(f"{count}").median for count in nnz]
    line, dense = Line.of(nnz, seconds), samples.time("dense")
    part = line.intercept / dense.median
    return Row(
        f"fp32 {specs[0].pass_}, time against nnz, density {specs[0].density:g} to {specs[-1].density:g}",
        f"a line, intercept < {most:.0%} of dense",
        f"intercept {part:+.1%} of dense, points within {line.off:.0%} of the line",
        abs(part) < most,
        {"nnz": nnz, "seconds": seconds, "dense": vars(dense)},
    )


# Inference with gates that are 0: the gated product against the product on a layout without these blocks.
GATED_HIDDEN = (1024, 4096)
CLOSED = (0.5, 0.9)  # fraction of gates that are 0
GATED_MOST = 1.1  # largest time, as a multiple of the compacted layout with its gates

COMPACTED, GATED_COMPACTED, GATED, FULL = "compacted", "compacted, gated", "gated", "full"


def gate_rows(bench: LinearBench, shrink: int = 1) -> RowIterator:
    """Yield a row for each shape and each fraction of gates that are 0.

    >>> next(gate_rows(LinearBench(rounds=3, budget=0.1), shrink=16)).work
    'fp32 forward, hidden 64, 64 tokens, density 0.2, 50% of the gates 0'
    """
    for hidden in GATED_HIDDEN:
        spec = LinearSpec(hidden // shrink, hidden // shrink, tokens=64, block=max(32 // shrink, 4), density=0.2)
        case = bench.case(spec)
        x, values, layout = case.x, case.values, case.layout
        draw = torch.Generator().manual_seed(bench.seed)
        order = torch.rand(layout.nnz, generator=draw).argsort()
        for closed in CLOSED:
            gate = 0.5 + torch.rand(layout.nnz, generator=draw)
            gate[order[: round(closed * layout.nnz)]] = 0
            keep = gate != 0
            smaller, open_values, scale = layout.select(keep), values[keep], gate[keep]
            calls = {
                COMPACTED: partial(linear, x, open_values * scale[:, None, None], smaller),
                GATED_COMPACTED: partial(linear, x, open_values, smaller, gate=scale),
                GATED: partial(linear, x, values, layout, gate=gate),
                FULL: partial(linear, x, values, layout),
            }
            if not torch.equal(calls[GATED](), calls[COMPACTED]()):
                raise BlockSparseError.expected(f"{spec!r} with gates", "the bits of the compacted layout", "others")
            timed = race(calls, bench.rounds, bench.budget)
            compacted, full, gated = (
                timed.samples.ratio(*pair) for pair in ((GATED, COMPACTED), (FULL, COMPACTED), (GATED, GATED_COMPACTED))
            )
            yield timed.row(
                f"fp32 forward, hidden {spec.out_features}, 64 tokens, density 0.2, {closed:.0%} of the gates 0",
                GATED,
                GATED_COMPACTED,
                "the compacted layout with its gates",
                most=GATED_MOST,
                more=f"; {format_ratio(compacted)} without gates; all blocks without gates {format_ratio(full)}",
                details={"ratio": {GATED_COMPACTED: vars(gated), COMPACTED: vars(compacted)}},
            )


# Features of layers so small that a call spends more time in Python than in its product.
SMALL_MODULES = (256, 512)


@torch.no_grad()
def module_rows(budget: float, quick: bool = False) -> RowIterator:
    """Yield a row for a call of each small module on one token.

    >>> next(module_rows(0.1, quick=True)).work
    'a call of nn.Linear, 256 features, 1 token, density 0.1'
    """
    for features in SMALL_MODULES:
        ours, dense, x = (
            Linear(features, features, density=0.1),
            nn.Linear(features, features),
            torch.randn(1, features),
        )
        timed = race({OURS: partial(ours, x), "torch.nn.Linear": partial(dense, x)}, **timing_options(budget, quick))
        yield timed.row(
            f"a call of nn.Linear, {features} features, 1 token, density 0.1",
            "torch.nn.Linear",
            OURS,
            "torch.nn.Linear",
            least=1.0,
            more=f", {1e6 * timed.samples.time(OURS).median:.3g} us",
        )


def _memory_row(hidden: int, tokens: int, density: float) -> Row:
    work = f"fp32 memory of forward + backward, hidden {hidden}, {tokens} tokens, density {density:g}"
    try:
        return memory_row(work, run_in_process(measure_linear_memory, hidden, tokens, density), dense=4 * hidden**2)
    except BlockSparseError as error:
        return unmeasured_row(work, MEMORY_TARGET, error)
