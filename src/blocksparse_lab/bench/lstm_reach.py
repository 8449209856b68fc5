"""The targets of the recurrent networks: what is measured for each, and when it is met.

`rows` gives all of those on a CPU; those on a GPU are jobs of `bench.gpu`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse.convert import to_dense
from blocksparse.errors import BlockSparseError
from blocksparse.measure import Call, Spread, alternate
from blocksparse.nn import LSTM

from ..models.char_lm import CharLM, CharLMConfig, parameter_count
from .linear import OURS
from .lstm import BOUNDS, LstmBench, LstmProblem, LstmSpec, train_step
from .rows import Row, not_measured, times

# A step at equal parameters takes at most this many times as long as that of the narrower dense net.
EQUAL = LstmSpec(CharLMConfig(width=2048, pattern="barabasi_albert", m=8))
EQUAL_TIME = 1.15
# Layers of this density are this many times as fast as torch.nn.LSTM of the same width.
WIDE_DENSITY, WIDE_SPEEDUP = 0.03, 20.0
WIDTHS = (2048, 4096)
# Dense layers of this width are not measurably slower than torch.nn.LSTM: inference is the same kernel.
DENSE_WIDTH, DENSE_TIME = 512, 1.01
# A net of this width is trained within this much memory.
WIDEST = replace(EQUAL, config=replace(EQUAL.config, width=18432), batch=8, seq=16)
MEMORY = 8 * 2**30


@dataclass(frozen=True)
class LstmTarget:
    """A spec and its target, the least speed-up over a peer."""

    spec: LstmSpec
    peer: str
    ratio: float


# On an H200, against cuDNN. The narrow net is the published one, with as many recurrent weights.
_gpu = replace(WIDEST, batch=128, seq=64, dtype="bfloat16", narrow=3168)
GPU_REACH = (LstmTarget(_gpu, "torch", 0.8), LstmTarget(_gpu, "torch-wide", 10.0))


def rows(budget: float = 8.0, quick: bool = False) -> Iterator[Row]:
    """Measures all targets, one after the other; `quick` uses small sizes, to see that it runs."""
    bench = LstmBench(budget=0.02, rounds=1) if quick else LstmBench(budget=budget)
    equal = sized(EQUAL, 4 if quick else 1)
    yield equal_row(bench, equal, EQUAL_TIME)
    for changes in ({"m": 4}, {"m": 2}, {"cell": "mlstm"}, {"cell": "smallworld"}):
        yield equal_row(bench, replace(equal, config=replace(equal.config, **changes)), None)
    longer = LstmBench(budget=4 * bench.budget, rounds=bench.rounds)  # a dense step of this width takes seconds
    widths = [width // (8 if quick else 1) for width in (*WIDTHS, DENSE_WIDTH)]
    for width in widths[:-1]:
        yield wide_row(longer, equal, width, width, WIDE_SPEEDUP)
    yield wide_row(bench, equal, 64, widths[0], None)
    yield dense_row(bench, equal, widths[-1])
    yield dense_row(bench, replace(equal, pass_="inference"), widths[-1])
    yield memory_row(sized(WIDEST, 16 if quick else 1))


def sized(spec: LstmSpec, shrink: int) -> LstmSpec:
    """A small version of the spec: a model with `shrink` times fewer units, few and short texts."""
    if shrink == 1:
        return spec
    config = replace(spec.config, width=spec.config.width // shrink)
    return replace(spec, config=config, batch=4, seq=3, narrow=spec.narrow and spec.narrow // shrink)


def described(spec: LstmSpec) -> str:
    c = spec.config
    return f"{c.cell} language model, width {c.width}, Barabasi-Albert m = {c.m}, block {c.block_size}"


def equal_row(bench: LstmBench, spec: LstmSpec, target: float | None) -> Row:
    """The time of a training step, as a multiple of that of a dense net with as many parameters."""
    result = bench.run(spec, ["dense"])
    slower = result.samples.ratio(OURS, "dense")
    facts = result.facts
    measured = (
        f"{times(slower)} dense of width {facts['widths']['dense']}, {facts['parameters'][OURS] / 1e6:.3g} M "
        f"parameters, {result.bytes_per_second() / 1e3:.3g} kB/s"
    )
    wanted = "-" if target is None else f"<= {target:g}x dense of equal parameters"
    met = None if target is None else slower.median <= target
    work = f"a step, {described(spec)}, batch {spec.batch}, seq {spec.seq}"
    return Row(work, wanted, measured, met, {**result.as_dict(), "ratio": vars(slower)})


# -- single layers ---------------------------------------------------------------------------------------------------


def wide_row(bench: LstmBench, spec: LstmSpec, inputs: int, width: int, target: float | None) -> Row:
    """A step of one layer against torch.nn.LSTM of the same width; batch and sequence are those of the spec.

    Of as many inputs as units the inputs' weight has the density too; else it is dense, and both spend on it the same.
    """
    torch.manual_seed(bench.seed)
    ours = LSTM(inputs, width, density=WIDE_DENSITY)
    if inputs != width:
        ours = LSTM(inputs, width, layout=ours.weight_hh_l0.layout)  # type: ignore[arg-type]
    samples, details = _layers(bench, spec, ours)
    speedup = samples.ratio("torch", OURS)
    kind = "all weights" if inputs == width else "recurrent weights"
    work = f"a step, one LSTM layer, {inputs} inputs, width {width}, {kind} of density {WIDE_DENSITY:g}"
    wanted = "-" if target is None else f">= {target:g}x torch.nn.LSTM of the same width"
    met = None if target is None else speedup.median >= target
    return Row(work, wanted, f"{times(speedup)} torch.nn.LSTM", met, {**details, "ratio": vars(speedup)})


def dense_row(bench: LstmBench, spec: LstmSpec, width: int) -> Row:
    """A dense layer against torch.nn.LSTM, both with as many inputs as units."""
    torch.manual_seed(bench.seed)
    samples, details = _layers(bench, spec, LSTM(width, width))
    slower = samples.ratio(OURS, "torch")
    what = "a step" if spec.pass_ == "train" else "inference"
    work = f"{what}, one dense LSTM layer, {width} inputs, width {width}"
    details["ratio"] = vars(slower)
    wanted = f"<= 1x torch.nn.LSTM, give or take {DENSE_TIME - 1:.0%}"
    return Row(work, wanted, f"{times(slower)} torch.nn.LSTM", slower.median <= DENSE_TIME, details)


def _layers(bench: LstmBench, spec: LstmSpec, ours: LSTM) -> tuple[Any, dict[str, Any]]:
    """Times a layer and torch.nn.LSTM with the same weights, whose results must be the same."""
    generator = torch.Generator().manual_seed(bench.seed)
    x, grad = (torch.randn(spec.seq, spec.batch, n, generator=generator) for n in (ours.input_size, ours.hidden_size))
    theirs = torchs(ours)
    errors = {}
    bound = BOUNDS["float32"]
    for name, found, expected in zip(("y", "grad_x"), _results(ours, x, grad), _results(theirs, x, grad), strict=True):
        errors[name] = ((found - expected).norm() / expected.norm()).item()
        if not errors[name] <= bound:
            raise BlockSparseError.expected(
                f"{name} of {ours!r}", f"a relative L2 difference from torch.nn.LSTM of at most {bound:g}", errors[name]
            )
    calls = {OURS: _call(ours, x, grad, spec.pass_), "torch": _call(theirs, x, grad, spec.pass_)}
    samples = alternate(calls, rounds=bench.rounds, budget=bench.budget)
    details = {
        "inputs": ours.input_size,
        "width": ours.hidden_size,
        "batch": spec.batch,
        "seq": spec.seq,
        "dtype": "float32",
        "pass": spec.pass_,
        "differences": errors,
        "seconds": {name: vars(samples.time(name)) for name in calls},
    }
    return samples, details


def torchs(ours: LSTM) -> nn.LSTM:
    """torch.nn.LSTM with the same weights, dense."""
    theirs = nn.LSTM(ours.input_size, ours.hidden_size)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            values, layout = ours._weight(name)
            parameter.copy_(values if layout is None else to_dense(values, layout))
    return theirs


def _results(lstm: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = lstm(x)[0]
    return y.detach(), torch.autograd.grad(y, x, grad)[0]


def _call(lstm: nn.Module, x: Tensor, grad: Tensor, pass_: str) -> Call:
    if pass_ == "inference":

        def run() -> Tensor:
            with torch.no_grad():
                return lstm(x)[0]

        return run
    x = x.clone().requires_grad_()  # as the second layer of a net

    def backward() -> Tensor:
        x.grad = None
        y = lstm(x)[0]
        y.backward(grad)
        return y

    return train_step(lstm, backward)


# -- memory ----------------------------------------------------------------------------------------------------------


def memory_row(spec: LstmSpec) -> Row:
    """The peak memory of a process that trains the net, all of it: Python and PyTorch, too."""
    work = f"training, {described(spec)}, batch {spec.batch}, seq {spec.seq}"
    wanted = f"a process below {MEMORY >> 30} GiB"
    program = f"import sys; from {__name__} import peak; peak(*sys.argv[1:])"
    command = [sys.executable, "-c", program, json.dumps(vars(spec.config)), str(spec.batch), str(spec.seq)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return not_measured(work, wanted, (done.stderr.strip().splitlines() or ["it ended"])[-1])
    found = json.loads(done.stdout)
    step = Spread.of(found["seconds"])
    rate = spec.tokens / step.median
    measured = f"{found['peak'] / 2**30:.2f} GiB, {found['parameters'] / 1e6:.3g} M parameters, {rate:.0f} bytes/s"
    details = {**spec.as_dict(), **found, "bytes_per_second": rate}
    return Row(work, wanted, measured, found["peak"] < MEMORY, details)


def peak(config: str, batch: str, seq: str, steps: int = 5) -> None:
    """Prints the peak memory of a few training steps and the seconds of each but the first; runs in its own process.

    It is the process' high-water mark: `ru_maxrss` would begin with that of the process that started it.
    """
    spec = LstmSpec(CharLMConfig(**json.loads(config)), int(batch), int(seq))
    problem = LstmProblem(spec, seed=0)
    model = CharLM(spec.config)
    step, seconds, losses = train_step(model, lambda: problem.backward(model)), [], []
    for _ in range(steps):
        start = perf_counter()
        losses.append(float(step()))  # type: ignore[arg-type]
        seconds.append(perf_counter() - start)
    marks = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    found = {
        "peak": 1024 * int(marks[0].split()[1]),
        "parameters": parameter_count(spec.config),
        "seconds": seconds[1:],
        "losses": losses,
    }
    print(json.dumps(found))
