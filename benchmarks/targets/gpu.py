"""Targets of linear products, convolutions, recurrent networks, transformers and experts on a GPU.

A job gives the rows of one piece of work. Jobs can be listed without a GPU, and run on any `bench.device.Device`: on
the CPU, to try the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

from blocksparse.errors import BlockSparseError
from blocksparse.measure import Call, Spread, alternate, geometric_mean
from blocksparse.ops.gpu.tiles import FEW_TOKENS
from blocksparse.ops.linear import linear
from blocksparse_lab.bench.case import OURS, Bench, CaseResult
from blocksparse_lab.bench.conv import ConvBench
from blocksparse_lab.bench.conv_specs import GPU_REACH as CONV_REACH
from blocksparse_lab.bench.conv_specs import ConvSpec
from blocksparse_lab.bench.device import Device
from blocksparse_lab.bench.linear import LinearBench
from blocksparse_lab.bench.linear_specs import (
    GPU_BLOCKS,
    GPU_HOST_TIME,
    GPU_HUB_TIME,
    GPU_HUBS,
    GPU_MEAN,
    GPU_MEMORY,
    GPU_REACH,
    GPU_TINY,
    GPU_TRAINING_PART,
    LinearSpec,
    Target,
)
from blocksparse_lab.bench.lstm import LstmBench
from blocksparse_lab.bench.report import short
from targets.layers import LAYERS
from targets.lstm import GPU_REACH as LSTM_REACH
from targets.lstm import LstmTarget, shrink_spec
from targets.memory import measure_step_memory
from targets.rows import (
    MEMORY_TARGET,
    Race,
    Row,
    format_minimum,
    format_ratio,
    memory_row,
    ratio_row,
    refused_row,
    speedup_row,
    unmeasured_row,
)
from targets.transformer import TRANSFORMER


@dataclass(frozen=True)
class Ceilings:
    """Measured peak rates of a device.

    `copy` is the bytes per second that a copy reads and writes, `dense` the operations per second of a large dense
    product by dtype.
    """

    copy: float
    dense: Mapping[str, float]

    @classmethod
    def of(cls, device: Device, copied: int = 2**30, side: int = 8192) -> Ceilings:
        """Measure the rates on random data: a copy of `copied` bytes, and products of matrices with `side` rows and
        columns.
        """
        source = torch.randint(256, (copied,), dtype=torch.uint8, device=device.torch)
        calls: dict[str, Call] = {"copy": partial(torch.empty_like(source).copy_, source)}
        for dtype in ("bfloat16", "float32"):
            a, b, out = (torch.randn(side, side, device=device.torch, dtype=getattr(torch, dtype)) for _ in range(3))
            calls[dtype] = partial(torch.mm, a, b, out=out)
        device.warm_up()
        samples = alternate(calls, rounds=11, budget=3.0, clock=device.clock)
        operations = {name: 2 * side**3 / samples.time(name).median for name in calls if name != "copy"}
        return cls(2 * copied / samples.time("copy").median, operations)

    def least_time(self, result: CaseResult) -> float:
        """Return the seconds that bytes or operations of this case take at these rates, whichever is longer."""
        operations = result.operations / self.dense[result.spec.dtype]
        return max(result.spec.products * result.moved / self.copy, operations)


@dataclass(frozen=True)
class Job:
    """One piece of work, its target, and the function that measures it."""

    work: str
    target: str
    measure: Callable[[], list[Row]]

    def gives(self, work: str) -> bool:
        """Return whether a row of this work belongs to the job."""
        return work == self.work or work.startswith(f"{self.work}, ")

    def run(self) -> list[Row]:
        """Measure the rows; a failure becomes a row too, so that the other jobs still run."""
        try:
            return self.measure()
        except NotImplementedError as error:
            return [unmeasured_row(self.work, self.target, error)]
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return [Row(self.work, self.target, f"FAILED: {text}", False, {"error": text})]


class GpuTargets:
    """All targets on one device.

    Args:
        bench: measures the cases; None for listing the jobs only.
        shrink: divides the number of features, and limits tokens to 128, to try the program.
        known: rows of an earlier run on this device, which are not measured again.
    """

    def __init__(self, bench: LinearBench | None, shrink: int = 1, known: Iterable[Row] = ()):
        self._bench, self.shrink = bench, shrink
        self.rows = {row.work: row for row in known}

    @property
    def bench(self) -> LinearBench:
        """The bench; raises if there is none."""
        if self._bench is None:
            raise BlockSparseError.expected("bench", "one that measures", "None")
        return self._bench

    def known(self, job: Job) -> list[Row]:
        """Return the job's rows that exist already."""
        return [row for work, row in self.rows.items() if job.gives(work)]

    def run(self, job: Job) -> list[Row]:
        """Return the rows of a job, measured now unless they exist already."""
        found = self.known(job)
        if not found:
            found = job.run()
            self.rows |= {row.work: row for row in found}
        return found

    def jobs(self) -> list[Job]:
        """Return the jobs, the most important first."""
        return [Job(work, target, partial(measure, work)) for work, target, measure in self._jobs()]

    def _jobs(self) -> Iterator[tuple[str, str, Callable[[str], list[Row]]]]:
        """Yield work, target and the function that measures the rows of that work."""
        yield _CEILINGS, "-", self._ceiling_rows
        for name, target in sorted(GPU_REACH.items(), key=lambda item: not item[0].startswith("few")):
            yield self._row_title(name, target.spec), target_text(target), partial(self._target_rows, target)
        for block in GPU_BLOCKS:
            yield f"training step, many tokens, block {block}", _OF_FORWARD, partial(self._training_rows, block)
        for name, spec in GPU_HUBS.items():
            title = self._row_title(f"layout with hubs, {name}", spec)
            yield title, f"<= {GPU_HUB_TIME:g}x random", partial(self._hub_rows, spec)
        yield _HOST, f"< {1e6 * GPU_HOST_TIME:g} us eager", self._host_rows
        for spec in map(self._shrink, GPU_MEMORY):
            sizes = f"hidden {spec.out_features}, {spec.tokens} tokens, density {spec.density:g}"
            yield f"training memory, {sizes}", MEMORY_TARGET, partial(self._memory_rows, spec)
        for conv in CONV_REACH:
            for pass_ in ("forward", "dgrad", "wgrad"):
                image = self._shrink_conv(replace(conv.spec, pass_=pass_))
                yield (
                    f"{image!r}",
                    format_minimum(conv.ratio, conv.peer),
                    partial(self._conv_rows, image, conv.peer, conv.ratio),
                )
        for lstm in LSTM_REACH:
            step = replace(lstm, spec=shrink_spec(lstm.spec, self.shrink))
            yield step.work, format_minimum(step.ratio, step.peer), partial(self._lstm_rows, step)
        for kind, full, least in (*TRANSFORMER, *LAYERS):
            part = full if self.shrink == 1 else full.shrunk()
            yield f"{part}", format_minimum(least, "dense"), partial(self._transformer_rows, kind, part, least)
        for peer, ratio in GPU_MEAN.items():
            yield f"geometric mean over {peer}", format_minimum(ratio, peer), partial(self._mean_rows, peer, ratio)

    def details(self, name: str) -> dict[str, Any]:
        """Return the details of the first row with this name in GPU_REACH, measured at the first call."""
        title = self._row_title(name, GPU_REACH[name].spec)
        return self._first_details(next(job for job in self.jobs() if job.work == title))

    def ceiling_details(self) -> dict[str, Any]:
        """Return the details of the peak rates, measured at the first call."""
        return self._first_details(self.jobs()[0])

    def _first_details(self, job: Job) -> dict[str, Any]:
        return self.run(job)[0].details

    @property
    def cases(self) -> dict[str, dict[str, Any]]:
        """The details of the existing rows of GPU_REACH."""
        titles = {name: self._row_title(name, target.spec) for name, target in GPU_REACH.items()}
        return {name: self.rows[title].details for name, title in titles.items() if title in self.rows}

    # -- measuring the rows ----------------------------------------------------------------------------------------

    def _ceiling_rows(self, work: str) -> list[Row]:
        small = {} if self.shrink == 1 else {"copied": 2**22, "side": 256}
        ceilings = Ceilings.of(self.bench.device, **small)
        rates = ", ".join(f"{dtype} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in ceilings.dense.items())
        details = {"copy": ceilings.copy, "dense": dict(ceilings.dense)}
        return [Row(work, "-", f"{ceilings.copy / 1e12:.3g} TB/s; {rates}", None, details)]

    def _target_rows(self, target: Target, work: str) -> list[Row]:
        peers = [*(peer for peer, _ in target.ratios), *target.others]
        result = self.bench.run(self._shrink(target.spec), peers)
        ceilings = self.ceiling_details()
        return case_rows(work, target, result, Ceilings(**ceilings) if "copy" in ceilings else None)

    def _training_rows(self, block: int, work: str) -> list[Row]:
        """Time a training step after its forward pass."""
        name = f"many tokens, block {block}"
        forward = self.details(name).get("speedup", {})
        if "dense" not in forward:
            raise NotImplementedError("the forward pass was not")
        step = self.bench.run(replace(self._shrink(GPU_REACH[name].spec), pass_="train"), ["dense"])
        return [training_row(work, Spread(**forward["dense"]), step)]

    def _hub_rows(self, spec: LinearSpec, work: str) -> list[Row]:
        """Time a layout with hubs against a random one of the same size."""
        hubs = self.bench.case(self._shrink(spec))
        even = self.bench.case(replace(hubs.spec, pattern="random", density=hubs.layout.density))
        if hubs.layout.nnz != even.layout.nnz:
            raise BlockSparseError.expected("random layout", f"{hubs.layout.nnz} blocks", even.layout.nnz)
        cases = {"random": even, "hubs": hubs}
        calls, counts, errors = {}, {}, {}
        for name, case in cases.items():
            errors[name] = case.check(self.bench.seed)
            own: dict[str, int] = {}
            calls[name] = self.bench.prepare(case, OURS, own)
            counts[name] = own[OURS]
        race = Race(self.bench.alternate(calls, counts))
        details = {
            **hubs.spec.as_dict(),
            "nnz": hubs.layout.nnz,
            "errors": errors,
            "calls_per_sample": counts,
            **{name: case.facts() for name, case in cases.items()},
        }
        more = f", {hubs.layout.nnz} blocks each"
        return [race.row(work, "hubs", "random", "random", most=GPU_HUB_TIME, more=more, details=details)]

    def _conv_rows(self, spec: ConvSpec, peer: str, ratio: float, work: str) -> list[Row]:
        result = self._make_bench(ConvBench).run(spec, [peer])
        return [speedup_row(work, result, peer, ratio, lambda: f", {result.gflops / 1e3:.3g} TFLOP/s")]

    def _lstm_rows(self, target: LstmTarget, work: str) -> list[Row]:
        result, peer = self._make_bench(LstmBench).run(target.spec, [target.peer]), target.peer

        def more() -> str:
            ours, theirs = (result.tokens_per_second(name) / 1e3 for name in (OURS, peer))
            return f" of width {result.facts['widths'][peer]}, {ours:.3g} against {theirs:.3g} kB/s"

        return [speedup_row(work, result, peer, target.ratio, more)]

    def _transformer_rows(self, kind: type[Bench], spec: Any, least: float | None, work: str) -> list[Row]:
        _, *others = kind.kind.peers
        result = self._make_bench(kind).run(spec, kind.kind.peers)
        details = result.as_dict()
        del details["bytes_per_second"]  # meant for language models
        more = "".join(f", {_describe_peer(result, peer)}" for peer in others)
        return [speedup_row(work, result, "dense", least, lambda: more, details)]

    def _make_bench(self, kind: type[Bench]) -> Bench:
        return kind(rounds=self.bench.rounds, budget=self.bench.budget, device=self.bench.device)

    def _host_rows(self, work: str) -> list[Row]:
        return [host_row(host_times(self.bench.device, GPU_TINY, self.bench.budget))]

    def _memory_rows(self, spec: LinearSpec, work: str) -> list[Row]:
        """Measure the peak memory of a training step."""
        device = self.bench.device
        if device.torch.type != "cuda":
            raise NotImplementedError("only a GPU counts its memory; reach.py measures the CPU's")

        def before() -> int:
            device.wait()
            torch.cuda.reset_peak_memory_stats(device.torch)
            return torch.cuda.memory_allocated(device.torch)

        def after() -> int:
            device.wait()
            return torch.cuda.max_memory_allocated(device.torch)

        facts = measure_step_memory(
            spec.layout(), spec.tokens, before, after, dtype=spec.torch_dtype, device=device.torch
        )
        return [memory_row(work, facts, spec.out_features * spec.in_features * spec.torch_dtype.itemsize)]

    def _mean_rows(self, peer: str, ratio: float, work: str) -> list[Row]:
        cases = [self.details(name) for name, target in GPU_REACH.items() if _has_peer(target, peer)]
        return [mean_row(work, peer, ratio, cases)]

    # -- names and sizes -------------------------------------------------------------------------------------------

    def _shrink(self, spec: LinearSpec) -> LinearSpec:
        return spec if self.shrink == 1 else replace(spec.shrunk(self.shrink), tokens=min(spec.tokens, 128))

    def _shrink_conv(self, spec: ConvSpec) -> ConvSpec:
        return spec if self.shrink == 1 else replace(spec, out_channels=64, in_channels=64, size=8, images=2)

    def _row_title(self, name: str, spec: LinearSpec) -> str:
        spec = self._shrink(spec)
        density = "" if "density" in name else f", density {spec.density:g}"
        return f"{name}{density}, hidden {spec.out_features}, {spec.tokens} tokens"


_CEILINGS = "bandwidth of a copy, dense peak"
_HOST = "host time per call, nothing to compute"
_OF_FORWARD = f">= {GPU_TRAINING_PART:.0%} of forward"


def _has_peer(target: Target, peer: str) -> bool:
    return peer in target.others or peer in dict(target.ratios)


# -- verdicts ------------------------------------------------------------------------------------------------------


def target_text(target: Target) -> str:
    """Return a target as text.

    >>> target_text(GPU_REACH["few tokens, bf16, density 0.1"])
    '>= 8x dense, >= 75% of a copy'
    """
    parts = [format_minimum(ratio, peer) for peer, ratio in target.ratios]
    if target.bandwidth is not None:
        parts.append(f">= {target.bandwidth:.0%} of a copy")
    return ", ".join(parts)


def case_rows(work: str, target: Target, result: CaseResult, ceilings: Ceilings | None) -> list[Row]:
    """Return the row of a case with its bandwidth, and a row for each further peer with a target.

    If the peer failed or the peak rates are unknown, the row still has our time.
    """
    (first, ratio), *more = target.ratios
    part = result.bandwidth / ceilings.copy if ceilings else None
    details = {**result.as_dict(), "moved": result.moved, "bandwidth": result.bandwidth}
    if ceilings:
        details |= {"part_of_copy": part, "least_time": ceilings.least_time(result)}
    of_copy = f" = {part:.0%} of a copy" if part is not None else ""
    few = target.spec.tokens <= FEW_TOKENS
    rate = f"{result.bandwidth / 1e12:.2f} TB/s{of_copy}" if few else f"{result.gflops / 1e3:.3g} TFLOP/s"
    more_text = "".join(f", {text}" for text in (rate, *(_describe_peer(result, peer) for peer in target.others)))
    goal = target_text(replace(target, ratios=((first, ratio),)))
    if first in result.refused:
        row = refused_row(work, goal, result, first, details)
        row = replace(row, measured=row.measured + more_text)
    else:
        row = ratio_row(work, result.speedup(first), first, least=ratio, target=goal, more=more_text, details=details)
        if target.bandwidth is not None and (part is None or part < target.bandwidth):
            row = replace(row, met=None if part is None and row.met else False)
    return [row, *(speedup_row(f"{work}, {peer}", result, peer, least, details={}) for peer, least in more)]


def _describe_peer(result: CaseResult, peer: str) -> str:
    return f"{peer} refused" if peer in result.refused else f"{short(result.speedup(peer).median)}x {peer}"


def training_row(work: str, forward: Spread, step: CaseResult) -> Row:
    """Return the row of a training step: its speed-up over dense as a fraction of the forward pass' speed-up."""
    if "dense" in step.refused:
        return refused_row(work, _OF_FORWARD, step, "dense", step.as_dict())
    found = step.speedup("dense")
    part = found.median / forward.median
    measured = f"{format_ratio(found)} dense, {part:.0%} of forward's {short(forward.median)}x"
    return Row(work, _OF_FORWARD, measured, part >= GPU_TRAINING_PART, {**step.as_dict(), "part_of_forward": part})


def mean_row(work: str, peer: str, ratio: float, cases: Iterable[Mapping[str, Any]]) -> Row:
    """Return the row of the geometric mean of the speed-ups over a peer, over all cases that the peer could run."""
    cases, text = list(cases), format_minimum(ratio, peer)
    speedups = [case["speedup"][peer]["median"] for case in cases if peer in case.get("speedup", ())]
    if not speedups:
        reasons = dict.fromkeys(case["refused"][peer] for case in cases if peer in case.get("refused", ()))
        return unmeasured_row(work, text, "; ".join(reasons) or "no case")
    mean = geometric_mean(speedups)
    measured = (
        f"{short(mean)}x {peer} ({short(min(speedups))}-{short(max(speedups))}), {len(speedups)} of {len(cases)} cases"
    )
    return Row(work, text, measured, mean >= ratio, {"mean": mean, "ratios": speedups})


def host_row(seconds: Mapping[str, Any]) -> Row:
    """Return the row of host times; the target is on our eager call without gradients."""
    parts = [f"{1e6 * spread.median:.1f} us {name}" for name, spread in seconds.items() if isinstance(spread, Spread)]
    parts += [f"{name} not measured" for name, spread in seconds.items() if isinstance(spread, str)]
    details = {name: vars(spread) if isinstance(spread, Spread) else spread for name, spread in seconds.items()}
    met = seconds["eager"].median < GPU_HOST_TIME
    return Row(_HOST, f"< {1e6 * GPU_HOST_TIME:g} us eager", ", ".join(parts), met, details)


def host_times(device: Device, spec: LinearSpec, budget: float) -> dict[str, Spread | str]:
    """Return host seconds per call, over many calls without waiting for the device, or the reason why a call failed.

    The time "in a graph" is the device's, per call of many replayed ones.
    """
    layout = spec.layout()
    kind: dict[str, Any] = {"dtype": spec.torch_dtype, "device": device.torch}
    x, values = torch.randn(spec.tokens, spec.in_features, **kind), torch.randn(layout.values_shape, **kind)
    weight = torch.randn(spec.out_features, spec.in_features, **kind)
    trained = values.clone().requires_grad_()

    def issue(call: Call, repeat: int) -> float:
        device.wait()
        start = perf_counter()
        for _ in range(repeat):
            call()
        return (perf_counter() - start) / repeat

    calls: dict[str, Call] = {
        "eager": lambda: linear(x, values, layout),
        "eager with gradients": lambda: linear(x, trained, layout),
        "F.linear": lambda: F.linear(x, weight),
    }
    refused: dict[str, Spread | str] = {}
    if device.torch.type == "cuda":
        try:
            compiled = torch.compile(lambda x, values: linear(x, values, layout), fullgraph=True)
            compiled(x, values)
            calls["compiled"] = lambda: compiled(x, values)
        except Exception as error:  # an error of the compiler: the others are still measured
            refused["compiled"] = f"{type(error).__name__}: {error}"
    samples = alternate(calls, budget=budget, clock=issue)
    graph = device.prepare([calls["eager"]], repeats=100)
    replayed = alternate({"graph": graph}, budget=budget, clock=device.clock).per({"graph": 100})
    seconds = {name: samples.time(name) for name in calls}
    return {**seconds, "in a graph" if device.torch.type == "cuda" else "in turn": replayed.time("graph"), **refused}
