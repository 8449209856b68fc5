"""Time products on a CPU as fractions of hardware bounds that are measured in the same rounds.

For a few tokens the bound is memory: the time in which PyTorch sums the bytes of the weights, read from the caches (the
same weights in each call) or from memory (weights in turn). For many tokens the bound is arithmetic: the time of the
same number of operations at the rate of PyTorch's fastest dense product of 2,048 rows and columns.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse.measure import Call, Spread
from blocksparse.ops import cpu_core
from blocksparse_lab.bench.case import OURS
from blocksparse_lab.bench.conv import ConvBench
from blocksparse_lab.bench.conv_specs import ConvSpec
from blocksparse_lab.bench.device import Device
from blocksparse_lab.bench.linear import LinearBench
from blocksparse_lab.bench.linear_specs import TRAINING, LinearSpec
from blocksparse_lab.bench.peers import onednn
from blocksparse_lab.bench.report import duration
from targets.rows import Row, RowIterator, race, timing_options

# Bytes of weights that take turns: more than the caches of any CPU hold for two cores.
COLD_BYTES = 256 << 20
DENSE = 2048


@dataclass(frozen=True)
class Work:
    """A product and its target: the smallest fraction of its bound, or the least 10^9 operations per second with
    AVX-512.
    """

    spec: LinearSpec | ConvSpec
    fraction: float | None = None
    gflops: float | None = None


MEMORY = {
    "fp32 forward": replace(TRAINING, tokens=1),
    "bf16 forward": replace(TRAINING, tokens=1, dtype="bfloat16"),
}
MIN_BANDWIDTH = 0.85  # their target fraction of the bound
ARITHMETIC = {
    "fp32 forward, few tokens": Work(replace(TRAINING, tokens=64)),
    "fp32 forward": Work(TRAINING),
    "fp32 dgrad": Work(replace(TRAINING, pass_="dgrad")),
    "fp32 wgrad": Work(replace(TRAINING, pass_="wgrad")),
    "fp32 wgrad, a gradient of 58 MiB": Work(
        LinearSpec(12288, 12288, tokens=1024, density=0.1, pass_="wgrad"), None, 250
    ),
    "fp32 forward, x larger than the caches": Work(LinearSpec(131072, 131072, tokens=64, density=0.001), None, 200),
    "fp32 convolution, 3x3, 256 channels, 56x56, 1 image": Work(
        ConvSpec(256, 256, kernel=3, size=56, images=1, density=0.1), None, 250
    ),
}


@torch.no_grad()
def rows(budget: float, quick: bool = False) -> RowIterator:
    """Yield a row for each product; `quick` uses small shapes, to try the program.

    >>> next(rows(0.1, quick=True)).work
    'fp32 forward, hidden 256, 1 token, density 0.1, weights in the caches'
    """
    shrink = 16 if quick else 1
    for name, spec in MEMORY.items():
        for cold in (False, True):
            yield _memory_bound_row(name, spec.shrunk(shrink), cold, budget, quick)
    for name, work in ARITHMETIC.items():
        yield _arithmetic_bound_row(name, replace(work, spec=work.spec.shrunk(shrink)), budget, quick)


def _memory_bound_row(name: str, spec: LinearSpec, cold: bool, budget: float, quick: bool) -> Row:
    """Time a product of one token against reading its weights."""
    bench = LinearBench(**timing_options(budget, quick))
    case = bench.checked_case(spec)
    size = case.weight_bytes(OURS)
    copies = 2 if cold and quick else -(-COLD_BYTES // size) if cold else 1
    device = Device(copies)
    calls: dict[str, Call] = {
        OURS: device.prepare([case.call(OURS, copy) for copy in range(copies)]),
        "reading": device.prepare([partial(sum_bytes, case.copy_of_values(copy)) for copy in range(copies)]),
    }
    samples = race(calls, **timing_options(budget, quick)).samples.per(dict.fromkeys(calls, copies))
    part, rate = samples.ratio("reading", OURS), size / samples.time("reading").median
    title = f"{name}, hidden {spec.out_features}, 1 token, density {spec.density:g}, weights in "
    text = f"of reading the weights at {rate / 1e9:.3g} GB/s; {duration(samples.time(OURS).median)}"
    return _row(title + ("memory" if cold else "the caches"), Work(spec, MIN_BANDWIDTH), part, text, {"copies": copies})


def sum_bytes(values: Tensor) -> Tensor:
    """Read all bytes of the values, as a sum."""
    # Read 16-bit numbers in pairs: sums in 16 bits would be bound by arithmetic.
    return values.view(-1).view(torch.float32).sum()


def _arithmetic_bound_row(name: str, work: Work, budget: float, quick: bool) -> Row:
    """Time a product against the fastest dense product."""
    spec, size = work.spec, DENSE // 16 if quick else DENSE
    bench = (LinearBench if isinstance(spec, LinearSpec) else ConvBench)(**timing_options(budget, quick))
    case = bench.checked_case(spec)
    x, weight = torch.randn(size, size), torch.randn(size, size)
    calls: dict[str, Call] = {OURS: case.call(OURS), "MKL": partial(F.linear, x, weight)}
    if torch.backends.mkldnn.is_available():
        calls["oneDNN"] = partial(onednn(weight, size), x)
    samples = race(calls, **timing_options(budget, quick)).samples
    operations = 2 * case.layout.nnz * spec.block**2 * spec.tokens
    scale = operations / (2 * size**3)
    best = min(set(calls) - {OURS}, key=lambda peer: samples.time(peer).median)
    part = samples.ratio(best, OURS)
    part = Spread(scale * part.median, scale * part.low, scale * part.high, part.count)
    peak, rate = 2e-9 * size**3 / samples.time(best).median, 1e-9 * operations / samples.time(OURS).median
    shape = f", hidden {spec.out_features}, {spec.tokens} tokens" if isinstance(spec, LinearSpec) else ""
    title = f"{name}{shape}, density {spec.density:g}"
    text = f"of {best}'s dense rate, {peak:.0f} GFLOP/s; {rate:.0f} GFLOP/s"
    wide = cpu_core.isa() not in ("portable", "avx2")
    return _row(title, work, part, text, {"gflops": rate, "peak": peak}, rate if wide else None)


def _row(title: str, work: Work, part: Spread, text: str, details: dict[str, Any], rate: float | None = None) -> Row:
    """Return the row of a fraction of a bound; `rate` decides a target in GFLOP/s, unless None."""
    met = None
    target = "-"
    if work.fraction is not None:
        met, target = part.median >= work.fraction, f">= {work.fraction:.0%} of the bound"
    elif work.gflops is not None:
        target = f">= {work.gflops:g} GFLOP/s with AVX-512"
        met = None if rate is None else rate >= work.gflops
    measured = f"{part.median:.0%} ({part.low:.0%}-{part.high:.0%}) {text}"
    return Row(title, target, measured, met, {**asdict(work.spec), **details, "part": vars(part)})
