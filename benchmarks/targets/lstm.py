"""The targets of the recurrent networks: what is measured for each, and when it is met.

`rows` gives all of those on a CPU; those on a GPU are jobs of `bench.gpu`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse.convert import to_dense
from blocksparse.errors import BlockSparseError
from blocksparse.measure import Call, Spread
from blocksparse.nn import LSTM
from blocksparse_lab.bench.case import OURS, check_errors, forward, relative_error
from blocksparse_lab.bench.lstm import BOUNDS, LstmBench, LstmCase, LstmSpec, train_step
from blocksparse_lab.models.char_lm import CharLM, CharLMConfig, parameter_count
from targets.memory import process_bytes, run_in_process
from targets.rows import Race, Row, RowIterator, race, ratio_row, timing_options, unmeasured_row

# A step at equal parameters takes at most this many times as long as that of the narrower dense net.
EQUAL = LstmSpec(CharLMConfig(width=2048, pattern="barabasi_albert", m=8))
EQUAL_TIME = 1.15
# Layers of this density are this many times as fast as torch.nn.LSTM of the same width.
WIDE_DENSITY, WIDE_SPEEDUP = 0.03, 20.0
WIDTHS = (2048, 4096)
# Dense layers of this width are not measurably slower than torch.nn.LSTM: inference is the same kernel.
DENSE_WIDTH, DENSE_TIME = 512, 1.01
# Layers of these widths and this density, of some sequences and steps, without gradients: one call of a service.
FEW_WIDTHS, FEW_DENSITY = (4096, 1024), 0.1
FEW = ((1, 1), (1, 32), (8, 1), (8, 32), (32, 1), (32, 32))  # sequences and steps
# A net of this width is trained within this much memory.
WIDEST = replace(EQUAL, config=replace(EQUAL.config, width=18432), batch=8, seq=16)
MEMORY = 8 * 2**30


@dataclass(frozen=True)
class LstmTarget:
    """A spec and its target, the least speed-up over a peer."""

    spec: LstmSpec
    peer: str
    ratio: float

    @property
    def work(self) -> str:
        return f"a step, {describe(self.spec)}, {self.peer}"


# On an H200, against cuDNN. The narrow net is the published one, with as many recurrent weights.
_gpu = replace(WIDEST, batch=128, seq=64, dtype="bfloat16", narrow=3168)
GPU_REACH = (LstmTarget(_gpu, "torch", 0.8), LstmTarget(_gpu, "torch-wide", 10.0))


def rows(budget: float = 8.0, quick: bool = False) -> RowIterator:
    """Measures all targets, one after the other; `quick` uses small sizes, to see that it runs."""
    # A dense step of these widths takes seconds.
    bench, longer = LstmBench(**timing_options(budget, quick)), LstmBench(**timing_options(4 * budget, quick))
    equal = sized(EQUAL, 4 if quick else 1)
    yield equal_row(bench, equal, EQUAL_TIME)
    for changes in ({"m": 4}, {"m": 2}, {"cell": "mlstm"}, {"cell": "smallworld"}):
        yield equal_row(bench, replace(equal, config=replace(equal.config, **changes)), None)
    *widths, dense = (width // (8 if quick else 1) for width in (*WIDTHS, DENSE_WIDTH))
    for width in widths:
        yield wide_row(longer, equal, width, width, WIDE_SPEEDUP)
    yield wide_row(bench, equal, 64, widths[0], None)
    yield dense_row(bench, equal, dense)
    yield dense_row(bench, replace(equal, pass_="inference"), dense)
    for width in FEW_WIDTHS:
        yield from few_rows(bench, width // (32 if quick else 1))
    yield memory_row(sized(WIDEST, 16 if quick else 1))


def sized(spec: LstmSpec, shrink: int) -> LstmSpec:
    """A small version of the spec: a model with `shrink` times fewer units, few and short texts."""
    if shrink == 1:
        return spec
    config = replace(spec.config, width=spec.config.width // shrink)
    return replace(spec, config=config, batch=4, seq=3, narrow=spec.narrow and spec.narrow // shrink)


def describe(spec: LstmSpec) -> str:
    c = spec.config
    return f"{c.cell} language model, width {c.width}, Barabasi-Albert m = {c.m}, block {c.block_size}"


def equal_row(bench: LstmBench, spec: LstmSpec, target: float | None) -> Row:
    """The time of a training step, as a multiple of that of a dense net with as many parameters."""
    result = bench.run(spec, ["dense"])
    slower, facts = result.samples.ratio(OURS, "dense"), result.facts
    work = f"a step, {describe(spec)}, batch {spec.batch}, seq {spec.seq}"
    more = f" of width {facts['widths']['dense']}, {facts['parameters'][OURS] / 1e6:.3g} M parameters, "
    more += f"{result.tokens_per_second() / 1e3:.3g} kB/s"
    goal = f"<= {target:g}x dense of equal parameters" if target else None
    details = {**result.as_dict(), "ratio": vars(slower)}
    return ratio_row(work, slower, "dense", most=target, target=goal, more=more, details=details)


# -- single layers ---------------------------------------------------------------------------------------------------


def wide_row(bench: LstmBench, spec: LstmSpec, inputs: int, width: int, target: float | None) -> Row:
    """A step of one layer against torch.nn.LSTM of the same width; batch and sequence are those of the spec.

    Of as many inputs as units the inputs' weight has the density too; else it is dense, and both spend on it the same.
    """
    torch.manual_seed(bench.seed)
    ours = LSTM(inputs, width, density=WIDE_DENSITY)
    if inputs != width:
        ours = LSTM(inputs, width, layout=ours.weight_hh_l0.layout)  # type: ignore[arg-type]
    found, details = _layers(bench, spec, ours)
    kind = "all weights" if inputs == width else "recurrent weights"
    work = f"a step, one LSTM layer, {inputs} inputs, width {width}, {kind} of density {WIDE_DENSITY:g}"
    goal = f">= {target:g}x torch.nn.LSTM of the same width" if target else None
    return found.row(work, "torch", OURS, "torch.nn.LSTM", least=target, target=goal, details=details)


def dense_row(bench: LstmBench, spec: LstmSpec, width: int) -> Row:
    """A dense layer against torch.nn.LSTM, both with as many inputs as units."""
    torch.manual_seed(bench.seed)
    found, details = _layers(bench, spec, LSTM(width, width))
    what = "a step" if spec.pass_ == "train" else "inference"
    work = f"{what}, one dense LSTM layer, {width} inputs, width {width}"
    goal = f"<= 1x torch.nn.LSTM, give or take {DENSE_TIME - 1:.0%}"
    return found.row(work, OURS, "torch", "torch.nn.LSTM", most=DENSE_TIME, target=goal, details=details)


def few_rows(bench: LstmBench, width: int) -> RowIterator:
    """Inference of one layer, with as many inputs as units, against torch.nn.LSTM of as many parameters."""
    torch.manual_seed(bench.seed)
    ours = LSTM(width, width, density=FEW_DENSITY)
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    narrow = max(isqrt(parameters // 8), 1)  # 8 narrow^2 weights
    theirs, cell = nn.LSTM(narrow, narrow), nn.LSTMCell(narrow, narrow)
    for batch, steps in FEW:
        calls = {
            OURS: forward(ours, torch.randn(steps, batch, width)),
            "torch.nn.LSTM": forward(theirs, torch.randn(steps, batch, narrow)),
        }
        if steps == 1:  # of one step it takes a tenth of the layer's time
            calls["torch.nn.LSTMCell"] = forward(cell, torch.randn(batch, narrow))
        found = race(calls, bench.rounds, bench.budget)
        best = min((name for name in calls if name != OURS), key=lambda name: found.samples.time(name).median)
        work = f"inference, one LSTM layer of {width} units, density {FEW_DENSITY:g}, {batch} sequences, {steps} steps"
        more = f" of {narrow} units; {1e3 * found.samples.time(OURS).median:.3g} ms"
        goal = ">= 1x torch's LSTM of as many parameters"
        yield found.row(work, best, OURS, best, least=1.0, target=goal, more=more)


def _layers(bench: LstmBench, spec: LstmSpec, ours: LSTM) -> tuple[Race, dict[str, Any]]:
    """Times a layer and torch.nn.LSTM with the same weights, whose results must be the same; further facts."""
    generator = torch.Generator().manual_seed(bench.seed)
    x, grad = (torch.randn(spec.seq, spec.batch, n, generator=generator) for n in (ours.input_size, ours.hidden_size))
    theirs = torchs(ours)
    errors = [relative_error(*pair) for pair in zip(_results(ours, x, grad), _results(theirs, x, grad), strict=True)]
    differences = {"y": errors[0], "grad_x": errors[1]}
    check_errors(BOUNDS["float32"], differences, ours, "torch.nn.LSTM")
    calls = {name: _call(of, x, grad, spec.pass_) for name, of in ((OURS, ours), ("torch", theirs))}
    sizes = {"inputs": ours.input_size, "width": ours.hidden_size, "batch": spec.batch, "seq": spec.seq}
    facts = {**sizes, "dtype": "float32", "pass": spec.pass_, "differences": differences}
    return race(calls, bench.rounds, bench.budget), facts


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
        return forward(lstm, x)
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
    work = f"training, {describe(spec)}, batch {spec.batch}, seq {spec.seq}"
    goal = f"a process below {MEMORY >> 30} GiB"
    try:
        found = run_in_process(peak, vars(spec.config), spec.batch, spec.seq)
    except BlockSparseError as error:
        return unmeasured_row(work, goal, error)
    step = Spread.of(found["seconds"])
    rate = spec.tokens / step.median
    measured = f"{found['peak'] / 2**30:.2f} GiB, {found['parameters'] / 1e6:.3g} M parameters, {rate:.0f} bytes/s"
    details = {**spec.as_dict(), **found, "bytes_per_second": rate}
    return Row(work, goal, measured, found["peak"] < MEMORY, details)


def peak(config: dict[str, Any], batch: int, seq: int, steps: int = 5) -> dict[str, Any]:
    """The peak memory of a few training steps, and the seconds of each but the first; in a process of its own.

    It is the process' high-water mark: `ru_maxrss` would begin with that of the process that started it.
    """
    spec = LstmSpec(CharLMConfig(**config), batch, seq)
    case = LstmCase(spec, seed=0)
    model = CharLM(spec.config)
    step, seconds, losses = train_step(model, lambda: case.backward(model)), [], []
    for _ in range(steps):
        start = perf_counter()
        losses.append(float(step()))  # type: ignore[arg-type]
        seconds.append(perf_counter() - start)
    parameters = parameter_count(spec.config)
    return {"peak": process_bytes("VmHWM"), "parameters": parameters, "seconds": seconds[1:], "losses": losses}
