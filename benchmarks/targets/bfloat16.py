"""Time products in bfloat16 against the fastest dense one on a CPU; the targets are for CPUs with AMX.

Some CPUs run their tiles at a quarter of the rate for seconds at a time. So each row also compares the fastest calls,
which must meet the target too, and says how fast a dense product in the caches was just before.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from blocksparse.ops import cpu_core
from blocksparse_lab.bench.case import OURS, Bench
from blocksparse_lab.bench.conv import ConvBench
from blocksparse_lab.bench.conv_specs import ConvSpec
from blocksparse_lab.bench.linear import LinearBench
from blocksparse_lab.bench.linear_specs import TRAINING, LinearSpec
from targets.rows import RowIterator, ratio_row, timing_options

BF16 = replace(TRAINING, dtype="bfloat16")
CONV = ConvSpec(256, 256, kernel=3, size=28, images=16, density=0.1, dtype="bfloat16")
# The least speed-up of each product over the fastest dense one, None without a target.
TARGETS: dict[LinearSpec | ConvSpec, float | None] = {
    replace(BF16, tokens=8): 8.0,
    replace(BF16, tokens=64): 15.0,
    BF16: 7.0,
    replace(BF16, pass_="dgrad"): None,
    replace(BF16, pass_="wgrad"): None,
    replace(BF16, pass_="train"): 6.0,
    replace(BF16, density=0.25): 3.6,
    replace(BF16, density=1.0): 1.0,
    replace(BF16, tokens=2): None,
    replace(BF16, tokens=4): None,
    replace(BF16, tokens=16): None,
    CONV: 9.0,
    replace(CONV, size=56, images=1): 7.0,
}


def rows(budget: float, quick: bool = False) -> RowIterator:
    """Yield a row for each product; `quick` uses small shapes, to try the program.

    >>> next(rows(0.1, quick=True)).work
    'bf16 forward, hidden 256, 8 tokens, density 0.1'
    """
    options = timing_options(budget, quick)
    benches: dict[type[Any], Bench] = {LinearSpec: LinearBench(**options), ConvSpec: ConvBench(**options)}
    has_onednn = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # without instructions for it, it would take seconds
    for full, least in TARGETS.items():
        spec = full.shrunk(16 if quick else 1)
        rates = _dense_rates(1 if quick else 50)
        linear = isinstance(spec, LinearSpec)
        peers = ["dense", "onednn"] if linear and spec.pass_ == "forward" and has_onednn else ["dense"]
        result = benches[type(spec)].run(spec, peers)
        peer = min((each for each in peers if each not in result.refused), key=lambda each: result.time(each).median)
        fastest = result.samples.least(peer) / result.samples.least(OURS)
        row = ratio_row(
            _describe(spec),
            result.speedup(peer),
            peer,
            least=least if cpu_core.isa() == "amx" else None,
            more=f", fastest calls {fastest:.3g}x; {1e3 * result.time(OURS).median:.3g} ms, {result.gflops:.0f} GFLOP/s"
            f"; a dense product in the caches {statistics.median(rates):.0f} to {max(rates):.0f} GFLOP/s",
            details={**result.as_dict(), "fastest": fastest, "dense rates": [min(rates), max(rates)]},
        )
        yield replace(row, met=row.met and (least is None or fastest >= least))


def _dense_rates(count: int) -> list[float]:
    """Return the rates of some dense products that fit the caches, in GFLOP/s."""
    a, b = torch.randn(2, 512, 512, dtype=torch.bfloat16)
    rates = []
    for _ in range(count):
        begin = time.perf_counter()
        a @ b
        rates.append(2 * 512**3 / (time.perf_counter() - begin) / 1e9)
    return rates


def _describe(spec: LinearSpec | ConvSpec) -> str:
    if isinstance(spec, LinearSpec):
        shape = f"hidden {spec.out_features}, {spec.tokens} tokens"
    else:
        shape = f"3x3, {spec.in_channels} channels, {spec.size}x{spec.size}, {spec.images} images"
    return f"bf16 {spec.pass_}, {shape}, density {spec.density:g}"
