"""Targets of recurrent networks.

`rows` measures those on a CPU; those on a GPU (`GPU_REACH`) are jobs of `targets.gpu`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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

# A training step takes at most this many times as long as that of a narrower dense net with equal parameters.
EQUAL = LstmSpec(CharLMConfig(width=2048, pattern="barabasi_albert", m=8))
EQUAL_TIME = 1.15
# Layers of this density must be this many times as fast as torch.nn.LSTM of the same width.
WIDE_DENSITY, WIDE_SPEEDUP = 0.03, 20.0
WIDTHS = (2048, 4096)
# Dense layers of this width must not be measurably slower than torch.nn.LSTM; inference uses the same kernel.
DENSE_WIDTH, DENSE_TIME = 512, 1.01
# Training a net of this width must fit into this much memory.
WIDEST = replace(EQUAL, config=replace(EQUAL.config, width=18432), batch=8, seq=16)
MEMORY = 8 * 2**30


@dataclass(frozen=True)
class LstmTarget:
    """A spec and the target speed-up over a peer."""

    spec: LstmSpec
    peer: str
    ratio: float

    @property
    def work(self) -> str:
        return f"a step, {describe(self.spec)}, {self.peer}"


# Targets on an H200 against cuDNN. The narrow net is the published one, which has the same number of recurrent weights.
_gpu = replace(WIDEST, batch=128, seq=64, dtype="bfloat16", narrow=3168)
GPU_REACH = (LstmTarget(_gpu, "torch", 0.8), LstmTarget(_gpu, "torch-wide", 10.0))


def rows(budget: float = 8.0, quick: bool = False) -> RowIterator:
    """Measure all targets one after the other; `quick` uses small sizes, to try the program."""
    # A dense step of WIDTHS takes seconds, so it needs a longer budget.
    bench, longer = LstmBench(**timing_options(budget, quick)), LstmBench(**timing_options(4 * budget, quick))
    equal = shrink_spec(EQUAL, 4 if quick else 1)
    yield equal_row(bench, equal, EQUAL_TIME)
    for changes in ({"m": 4}, {"m": 2}, {"cell": "mlstm"}, {"cell": "smallworld"}):
        yield equal_row(bench, replace(equal, config=replace(equal.config, **changes)), None)
    *widths, dense = (width // (8 if quick else 1) for width in (*WIDTHS, DENSE_WIDTH))
    for width in widths:
        yield wide_row(longer, equal, width, width, WIDE_SPEEDUP)
    yield wide_row(bench, equal, 64, widths[0], None)
    yield dense_row(bench, equal, dense)
    yield dense_row(bench, replace(equal, pass_="inference"), dense)
    yield memory_row(shrink_spec(WIDEST, 16 if quick else 1))


def shrink_spec(spec: LstmSpec, shrink: int) -> LstmSpec:
    """Return a smaller spec: a model with `shrink` times fewer units, and few short texts."""
    if shrink == 1:
        return spec
    config = replace(spec.config, width=spec.config.width // shrink)
    return replace(spec, config=config, batch=4, seq=3, narrow=spec.narrow and spec.narrow // shrink)


def describe(spec: LstmSpec) -> str:
    c = spec.config
    return f"{c.cell} language model, width {c.width}, Barabasi-Albert m = {c.m}, block {c.block_size}"


def equal_row(bench: LstmBench, spec: LstmSpec, target: float | None) -> Row:
    """Return the row of a training step's time, as a multiple of that of a dense net with equal parameters."""
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
    """Return the row of one layer's step against torch.nn.LSTM of the same width, with batch and sequence of the spec.

    With as many inputs as units, the input weight is sparse too; otherwise it is dense and costs both the same.
    """
    torch.manual_seed(bench.seed)
    ours = LSTM(inputs, width, density=WIDE_DENSITY)
    if inputs != width:
        ours = LSTM(inputs, width, layout=ours.weight_hh_l0.layout)  # type: ignore[arg-type]
    timed, details = _time_layers(bench, spec, ours)
    kind = "all weights" if inputs == width else "recurrent weights"
    work = f"a step, one LSTM layer, {inputs} inputs, width {width}, {kind} of density {WIDE_DENSITY:g}"
    goal = f">= {target:g}x torch.nn.LSTM of the same width" if target else None
    return timed.row(work, "torch", OURS, "torch.nn.LSTM", least=target, target=goal, details=details)


def dense_row(bench: LstmBench, spec: LstmSpec, width: int) -> Row:
    """Return the row of a dense layer against torch.nn.LSTM, with as many inputs as units."""
    torch.manual_seed(bench.seed)
    timed, details = _time_layers(bench, spec, LSTM(width, width))
    what = "a step" if spec.pass_ == "train" else "inference"
    work = f"{what}, one dense LSTM layer, {width} inputs, width {width}"
    goal = f"<= 1x torch.nn.LSTM, give or take {DENSE_TIME - 1:.0%}"
    return timed.row(work, OURS, "torch", "torch.nn.LSTM", most=DENSE_TIME, target=goal, details=details)


def _time_layers(bench: LstmBench, spec: LstmSpec, ours: LSTM) -> tuple[Race, dict[str, Any]]:
    """Check that a layer and torch.nn.LSTM with the same weights agree, and time both; return times and facts."""
    generator = torch.Generator().manual_seed(bench.seed)
    x, grad = (torch.randn(spec.seq, spec.batch, n, generator=generator) for n in (ours.input_size, ours.hidden_size))
    theirs = to_torch_lstm(ours)
    errors = [
        relative_error(*pair)
        for pair in zip(_output_and_gradient(ours, x, grad), _output_and_gradient(theirs, x, grad), strict=True)
    ]
    differences = {"y": errors[0], "grad_x": errors[1]}
    check_errors(BOUNDS["float32"], differences, ours, "torch.nn.LSTM")
    calls = {name: _step_call(of, x, grad, spec.pass_) for name, of in ((OURS, ours), ("torch", theirs))}
    sizes = {"inputs": ours.input_size, "width": ours.hidden_size, "batch": spec.batch, "seq": spec.seq}
    facts = {**sizes, "dtype": "float32", "pass": spec.pass_, "differences": differences}
    return race(calls, bench.rounds, bench.budget), facts


def to_torch_lstm(ours: LSTM) -> nn.LSTM:
    """Return a torch.nn.LSTM with the layer's weights, made dense."""
    theirs = nn.LSTM(ours.input_size, ours.hidden_size)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            values, layout = ours._weight(name)
            parameter.copy_(values if layout is None else to_dense(values, layout))
    return theirs


def _output_and_gradient(lstm: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = lstm(x)[0]
    return y.detach(), torch.autograd.grad(y, x, grad)[0]


def _step_call(lstm: nn.Module, x: Tensor, grad: Tensor, pass_: str) -> Call:
    if pass_ == "inference":
        return forward(lstm, x)
    x = x.clone().requires_grad_()  # as in the second layer of a net, which needs this gradient

    def backward() -> Tensor:
        x.grad = None
        y = lstm(x)[0]
        y.backward(grad)
        return y

    return train_step(lstm, backward)


# -- memory ----------------------------------------------------------------------------------------------------------


def memory_row(spec: LstmSpec) -> Row:
    """Return the row of the peak memory of a whole process, including Python and PyTorch, that trains the net."""
    work = f"training, {describe(spec)}, batch {spec.batch}, seq {spec.seq}"
    goal = f"a process below {MEMORY >> 30} GiB"
    try:
        facts = run_in_process(measure_peak, vars(spec.config), spec.batch, spec.seq)
    except BlockSparseError as error:
        return unmeasured_row(work, goal, error)
    step = Spread.of(facts["seconds"])
    rate = spec.tokens / step.median
    measured = f"{facts['peak'] / 2**30:.2f} GiB, {facts['parameters'] / 1e6:.3g} M parameters, {rate:.0f} bytes/s"
    details = {**spec.as_dict(), **facts, "bytes_per_second": rate}
    return Row(work, goal, measured, facts["peak"] < MEMORY, details)


def measure_peak(config: dict[str, Any], batch: int, seq: int, steps: int = 5) -> dict[str, Any]:
    """Return the peak memory of a few training steps and the seconds of all but the first; runs in its own process.

    The peak is the high-water mark of /proc/self/status: `ru_maxrss` starts at that of the parent process.
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
