"""The targets of linear op, convolutions and recurrent networks on a GPU: what is measured, and when they are met.

A job gives the rows of one piece of work. It needs no GPU to be listed, and runs on any `bench.device.Device`: on the
CPU to see that it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.measure import Call, Spread, alternate, geometric_mean
from blocksparse.ops.conv.specs import GPU_REACH as CONV_REACH
from blocksparse.ops.conv.specs import ConvSpec
from blocksparse.ops.gpu.tiles import FEW_TOKENS
from blocksparse.ops.linear import linear
from blocksparse.ops.linear.specs import (
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

from .case import OURS, Bench, CaseResult
from .conv import ConvBench
from .device import Device
from .linear import LinearBench
from .lstm import LstmBench
from .lstm_reach import GPU_REACH as LSTM_REACH
from .lstm_reach import LstmTarget, described, sized
from .memory import train_step
from .report import short
from .rows import Row, judged, memory_row, not_measured, times
from .transformer import TRANSFORMER


@dataclass(frozen=True)
class Ceilings:
    """The device's measured peak rates: bytes per second of a copy, read and written, and operations per second
    of a large dense product, by dtype."""

    copy: float
    dense: Mapping[str, float]

    @classmethod
    def of(cls, device: Device, copied: int = 2**30, side: int = 8192) -> Ceilings:
        """Measures them on random data: one copy of `copied` bytes, products of square matrices of `side`."""
        source = torch.randint(256, (copied,), dtype=torch.uint8, device=device.torch)
        target = torch.empty_like(source)
        calls: dict[str, Call] = {"copy": lambda: target.copy_(source)}
        for dtype in ("bfloat16", "float32"):
            a, b = (torch.randn(side, side, device=device.torch, dtype=getattr(torch, dtype)) for _ in range(2))
            calls[dtype] = _product(a, b)
        device.settle()
        samples = alternate(calls, rounds=11, budget=3.0, clock=device.clock)
        operations = {name: 2 * side**3 / samples.time(name).median for name in calls if name != "copy"}
        return cls(2 * copied / samples.time("copy").median, operations)

    def least_time(self, result: CaseResult) -> float:
        """The seconds that bytes and operations of this case take at these rates, whichever take longer."""
        operations = result.operations / self.dense[result.spec.dtype]
        return max(result.spec.products * result.moved / self.copy, operations)


def _product(a: Tensor, b: Tensor) -> Call:
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


@dataclass(frozen=True)
class Job:
    """One piece of work, its target, and how to measure it."""

    work: str
    target: str
    measure: Callable[[], list[Row]]

    def gives(self, work: str) -> bool:
        """Whether a row of this work is one of its rows."""
        return work == self.work or work.startswith(f"{self.work}, ")

    def run(self) -> list[Row]:
        """Measures its rows; a failure becomes a row too, so that the others are still measured."""
        try:
            return self.measure()
        except NotImplementedError as error:
            return [not_measured(self.work, self.target, error)]
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            return [Row(self.work, self.target, f"FAILED: {said}", False, {"error": said})]


class GpuReach:
    """All targets on one device.

    Args:
        bench: measures the cases; None, to list the jobs only.
        shrink: how many times fewer features, and tokens up to 256, to see that it runs.
        known: rows of an earlier run on this device, which are not measured again.
    """

    def __init__(self, bench: LinearBench | None, shrink: int = 1, known: Iterable[Row] = ()):
        self._bench, self.shrink = bench, shrink
        self.rows = {row.work: row for row in known}

    @property
    def bench(self) -> LinearBench:
        if self._bench is None:
            raise BlockSparseError.expected("bench", "one that measures", "None")
        return self._bench

    def run(self, job: Job) -> list[Row]:
        """The rows of a job: those known, or measured now."""
        found = [row for work, row in self.rows.items() if job.gives(work)]
        if not found:
            found = job.run()
            self.rows |= {row.work: row for row in found}
        return found

    def jobs(self) -> list[Job]:
        """The jobs, the most important first."""
        out = [Job(_CEILINGS, "-", self._ceiling_rows)]
        for name, target in sorted(GPU_REACH.items(), key=lambda item: not item[0].startswith("few")):
            out.append(self._target_job(name, target))
        for block in GPU_BLOCKS:
            work = f"training step, many tokens, block {block}"
            out.append(Job(work, _PART, partial(self._training, block, work)))
        for name, spec in GPU_HUBS.items():
            work = self._title(f"layout with hubs, {name}", spec)
            out.append(Job(work, f"<= {GPU_HUB_TIME:g}x random", partial(self._hubs, spec, work)))
        out.append(Job(_HOST, f"< {1e6 * GPU_HOST_TIME:g} us eager", self._host))
        for spec in map(self._sized, GPU_MEMORY):
            work = f"training memory, hidden {spec.out_features}, {spec.tokens} tokens, density {spec.density:g}"
            out.append(Job(work, "gradient + activations + O(nnz) indices", partial(self._memory, spec, work)))
        for conv_target in CONV_REACH:
            for pass_ in ("forward", "dgrad", "wgrad"):
                image = self._sized_conv(replace(conv_target.spec, pass_=pass_))
                wants = f">= {conv_target.ratio:g}x {conv_target.peer}"
                out.append(Job(f"{image!r}", wants, partial(self._conv, image, conv_target.peer, conv_target.ratio)))
        for lstm_target in LSTM_REACH:
            step = sized(lstm_target.spec, self.shrink)
            work = f"a step, {described(step)}, {lstm_target.peer}"
            wants = f">= {lstm_target.ratio:g}x {lstm_target.peer}"
            out.append(Job(work, wants, partial(self._lstm, replace(lstm_target, spec=step), work)))
        for kind, full, least in TRANSFORMER:
            part = full if self.shrink == 1 else full.shrunk()
            wants = "-" if least is None else f">= {least:g}x dense"
            out.append(Job(f"{part}", wants, partial(self._part, kind, part, least)))
        for peer, ratio in GPU_MEAN.items():
            work = f"geometric mean over {peer}"
            out.append(Job(work, f">= {ratio:g}x {peer}", partial(self._mean, peer, ratio, work)))
        return out

    def details(self, name: str) -> dict[str, Any]:
        """The details of the first row of GPU_REACH of this name, measured at the first call."""
        return self.run(self._target_job(name, GPU_REACH[name]))[0].details

    @property
    def ceilings(self) -> Ceilings:
        """Measured at the first call."""
        return Ceilings(**self.ceiling_details())

    def ceiling_details(self) -> dict[str, Any]:
        """The details of their row."""
        return self.run(self.jobs()[0])[0].details

    @property
    def cases(self) -> dict[str, dict[str, Any]]:
        """The details of the rows of GPU_REACH that are there."""
        titles = {name: self._title(name, target.spec) for name, target in GPU_REACH.items()}
        return {name: self.rows[title].details for name, title in titles.items() if title in self.rows}

    # -- the jobs --------------------------------------------------------------------------------------------------

    def _ceiling_rows(self) -> list[Row]:
        small = {} if self.shrink == 1 else {"copied": 2**22, "side": 256}
        found = Ceilings.of(self.bench.device, **small)
        rates = ", ".join(f"{dtype} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in found.dense.items())
        details = {"copy": found.copy, "dense": dict(found.dense)}
        return [Row(_CEILINGS, "-", f"{found.copy / 1e12:.3g} TB/s; {rates}", None, details)]

    def _target_job(self, name: str, target: Target) -> Job:
        return Job(self._title(name, target.spec), target_text(target), partial(self._target_rows, name, target))

    def _target_rows(self, name: str, target: Target) -> list[Row]:
        peers = [*(peer for peer, _ in target.ratios), *target.others]
        result = self.bench.run(self._sized(target.spec), peers)
        return case_rows(self._title(name, target.spec), target, result, self.ceilings)

    def _training(self, block: int, work: str) -> list[Row]:
        name = f"many tokens, block {block}"
        forward = self.details(name).get("speedup", {})
        if "dense" not in forward:
            raise NotImplementedError("the forward pass was not")
        step = self.bench.run(replace(self._sized(GPU_REACH[name].spec), pass_="train"), ["dense"])
        return [training_row(work, Spread(**forward["dense"]), step)]

    def _hubs(self, spec: LinearSpec, work: str) -> list[Row]:
        hubs = self.bench.case(self._sized(spec))
        even = self.bench.case(replace(hubs.spec, pattern="random", density=hubs.layout.density))
        if hubs.layout.nnz != even.layout.nnz:
            raise BlockSparseError.expected("random layout", f"{hubs.layout.nnz} blocks", even.layout.nnz)
        calls, counts = {}, {}
        errors = {}
        for name, problem in (("random", even), ("hubs", hubs)):
            errors[name] = problem.check(self.bench.seed)
            own: dict[str, int] = {}
            calls[name] = self.bench.ready(problem, OURS, own)
            counts[name] = own[OURS]
        samples = self.bench.alternate(calls, counts)
        slower = samples.ratio("hubs", "random")
        details = {
            **hubs.spec.as_dict(),
            "nnz": hubs.layout.nnz,
            "errors": errors,
            "seconds": {name: vars(samples.time(name)) for name in calls},
            "ratio": vars(slower),
            "calls_per_sample": counts,
            **{name: problem.facts() for name, problem in (("random", even), ("hubs", hubs))},
        }
        more = f", {hubs.layout.nnz} blocks each"
        return [judged(work, slower, "random", most=GPU_HUB_TIME, more=more, details=details)]

    def _conv(self, spec: ConvSpec, peer: str, ratio: float) -> list[Row]:
        result = self._sized_bench(ConvBench).run(spec, [peer])
        return [against(f"{spec!r}", result, peer, ratio, lambda: f", {result.gflops / 1e3:.3g} TFLOP/s")]

    def _lstm(self, target: LstmTarget, work: str) -> list[Row]:
        result, peer = self._sized_bench(LstmBench).run(target.spec, [target.peer]), target.peer

        def more() -> str:
            ours, theirs = (result.tokens_per_second(name) / 1e3 for name in (OURS, peer))
            return f" of width {result.facts['widths'][peer]}, {ours:.3g} against {theirs:.3g} kB/s"

        return [against(work, result, peer, target.ratio, more)]

    def _part(self, kind: type[Bench], spec: Any, least: float | None) -> list[Row]:
        bench = self._sized_bench(kind)
        result = bench.run(spec, bench.kind.peers)
        if "dense" in result.refused:
            return [not_measured(f"{spec}", "-", result.refused["dense"])]
        others = "".join(f", {_against(result, peer)}" for peer in bench.kind.peers[1:])
        speedup, details = result.speedup("dense"), result.as_dict()
        del details["bytes_per_second"]  # of language models
        return [judged(f"{spec}", speedup, "dense", least=least, more=others, details=details)]

    def _sized_bench(self, kind: type[Bench]) -> Bench:
        return kind(rounds=self.bench.rounds, budget=self.bench.budget, device=self.bench.device)

    def _host(self) -> list[Row]:
        device = self.bench.device
        return [host_row(host_times(device, GPU_TINY, self.bench.budget))]

    def _memory(self, spec: LinearSpec, work: str) -> list[Row]:
        if self.bench.device.torch.type != "cuda":
            raise NotImplementedError("only a GPU counts its memory; of the CPU's, see reach.py")
        dense = spec.out_features * spec.in_features * spec.torch_dtype.itemsize
        return [memory_row(work, training_memory(spec, self.bench.device), dense)]

    def _mean(self, peer: str, ratio: float, work: str) -> list[Row]:
        cases = [self.details(name) for name, target in GPU_REACH.items() if _has(target, peer)]
        return [mean_row(work, peer, ratio, cases)]

    # -- names and sizes -------------------------------------------------------------------------------------------

    def _sized(self, spec: LinearSpec) -> LinearSpec:
        return spec if self.shrink == 1 else replace(spec.shrunk(self.shrink), tokens=min(spec.tokens, 256))

    def _sized_conv(self, spec: ConvSpec) -> ConvSpec:
        if self.shrink == 1:
            return spec
        return replace(spec, out_channels=64, in_channels=64, size=8, images=2)

    def _title(self, name: str, spec: LinearSpec) -> str:
        spec = self._sized(spec)
        density = "" if "density" in name else f", density {spec.density:g}"
        return f"{name}{density}, hidden {spec.out_features}, {spec.tokens} tokens"


_CEILINGS = "bandwidth of a copy, dense peak"
_HOST = "host time per call, nothing to compute"
_PART = f">= {GPU_TRAINING_PART:.0%} of forward"


def _has(target: Target, peer: str) -> bool:
    return peer in target.others or peer in dict(target.ratios)


# -- verdicts ------------------------------------------------------------------------------------------------------


def target_text(target: Target) -> str:
    """A target in words.

    >>> target_text(GPU_REACH["few tokens, bf16, density 0.1"])
    '>= 8x dense, >= 75% of a copy'
    """
    parts = [f">= {ratio:g}x {peer}" for peer, ratio in target.ratios]
    if target.bandwidth is not None:
        parts.append(f">= {target.bandwidth:.0%} of a copy")
    return ", ".join(parts)


def case_rows(work: str, target: Target, result: CaseResult, ceilings: Ceilings) -> list[Row]:
    """The row of a case, with its bandwidth; one more for each further peer that there is a target for."""
    (first, ratio), *more = target.ratios
    details = {**result.as_dict(), "moved": result.moved, "bandwidth": result.bandwidth}
    details |= {"part_of_copy": result.bandwidth / ceilings.copy, "least_time": ceilings.least_time(result)}
    others = [_against(result, peer) for peer in target.others]
    if first in result.refused:
        return [not_measured(work, target_text(target), result.refused[first])]
    speedup, part = result.speedup(first), result.bandwidth / ceilings.copy
    met = speedup.median >= ratio and (target.bandwidth is None or part >= target.bandwidth)
    rate = f"{result.bandwidth / 1e12:.2f} TB/s = {part:.0%} of a copy" if target.spec.tokens <= FEW_TOKENS else ""
    rate = rate or f"{result.gflops / 1e3:.3g} TFLOP/s"
    measured = ", ".join([f"{times(speedup)} {first}", rate, *others])
    rows = [Row(work, target_text(replace(target, ratios=((first, ratio),))), measured, met, details)]
    return [*rows, *(against(f"{work}, {peer}", result, peer, least, details=False) for peer, least in more)]


def against(
    work: str, result: CaseResult, peer: str, least: float, more: Callable[[], str] = str, details: bool = True
) -> Row:
    """The row of a speed-up over a peer, which may have refused."""
    if peer in result.refused:
        return not_measured(work, f">= {least:g}x {peer}", result.refused[peer])
    found = result.as_dict() if details else {}
    return judged(work, result.speedup(peer), peer, least=least, more=more(), details=found)


def _against(result: CaseResult, peer: str) -> str:
    return f"{peer} refused" if peer in result.refused else f"{short(result.speedup(peer).median)}x {peer}"


def training_row(work: str, forward: Spread, step: CaseResult) -> Row:
    """The speed-up of a training step over dense, as a part of the forward pass' one."""
    if "dense" in step.refused:
        return not_measured(work, _PART, step.refused["dense"])
    found = step.speedup("dense")
    part = found.median / forward.median
    measured = f"{times(found)} dense, {part:.0%} of forward's {short(forward.median)}x"
    return Row(work, _PART, measured, part >= GPU_TRAINING_PART, {**step.as_dict(), "part_of_forward": part})


def mean_row(work: str, peer: str, ratio: float, cases: Iterable[Mapping[str, Any]]) -> Row:
    """The geometric mean of the speed-ups over a peer, over the cases that it could run, by their rows' details."""
    cases, text = list(cases), f">= {ratio:g}x {peer}"
    found = [case["speedup"][peer]["median"] for case in cases if peer in case.get("speedup", ())]
    if not found:
        reasons = dict.fromkeys(case["refused"][peer] for case in cases if peer in case.get("refused", ()))
        return not_measured(work, text, "; ".join(reasons) or "no case")
    mean = geometric_mean(found)
    measured = f"{short(mean)}x {peer} ({short(min(found))}-{short(max(found))}), {len(found)} of {len(cases)} cases"
    return Row(work, text, measured, mean >= ratio, {"mean": mean, "ratios": found})


def host_row(seconds: Mapping[str, Any]) -> Row:
    """Our eager call without gradients has the target; the others are listed with it."""
    parts = [f"{1e6 * spread.median:.1f} us {name}" for name, spread in seconds.items() if isinstance(spread, Spread)]
    parts += [f"{name} not measured" for name, spread in seconds.items() if isinstance(spread, str)]
    details = {name: vars(spread) if isinstance(spread, Spread) else spread for name, spread in seconds.items()}
    met = seconds["eager"].median < GPU_HOST_TIME
    return Row(_HOST, f"< {1e6 * GPU_HOST_TIME:g} us eager", ", ".join(parts), met, details)


# -- measurements --------------------------------------------------------------------------------------------------


def host_times(device: Device, spec: LinearSpec, budget: float) -> dict[str, Spread | str]:
    """Seconds of the host per call: many calls in a row, without waiting for the device. Where a call fails,
    the reason. In a CUDA graph it is the device's time, of one of many replayed calls."""
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
        except Exception as error:  # of the compiler: the others are still measured
            refused["compiled"] = f"{type(error).__name__}: {error}"
    samples = alternate(calls, rounds=21, budget=budget, clock=issue)
    graph = device.ready([calls["eager"]], laps=100)
    replayed = alternate({"graph": graph}, rounds=21, budget=budget, clock=device.clock).per({"graph": 100})
    found = {name: samples.time(name) for name in calls}
    return {**found, "in a graph" if device.torch.type == "cuda" else "in turn": replayed.time("graph"), **refused}


def training_memory(spec: LinearSpec, device: Device) -> dict[str, int]:
    """The peak of GPU memory that one forward and backward allocates, its plans included."""
    kind: dict[str, Any] = {"dtype": spec.torch_dtype, "device": device.torch}

    small = BlockLayout([[True]], spec.block)
    sides = (4, spec.block), (1, spec.block, spec.block), (4, spec.block)
    train_step(small, *(torch.randn(side, **kind) for side in sides))  # loads libraries
    layout = spec.layout()
    x = torch.randn(spec.tokens, spec.in_features, **kind)
    values = torch.randn(layout.values_shape, **kind)
    grad = torch.randn(spec.tokens, spec.out_features, **kind)
    device.wait()
    torch.cuda.reset_peak_memory_stats(device.torch)
    before = torch.cuda.memory_allocated(device.torch)
    train_step(layout, x, values, grad)
    device.wait()
    return {
        "nnz": layout.nnz,
        "peak": torch.cuda.max_memory_allocated(device.torch) - before,
        "gradient": values.numel() * values.itemsize,
        "activations": (x.numel() + grad.numel()) * x.itemsize,
    }
