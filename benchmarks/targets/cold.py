"""Time single cold calls of linear layers on a CPU, which is how a service calls them.

Before each call the caches are filled with other data, and the program sleeps for 10 ms, so that weights and inputs are
in memory only. For a few tokens the bound is the time in which PyTorch sums the bytes of the weights from memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter, sleep

import torch

from blocksparse.measure import Call
from blocksparse_lab.bench.case import OURS
from blocksparse_lab.bench.linear import LinearBench
from blocksparse_lab.bench.linear_specs import TRAINING, LinearSpec
from targets.bounds import sum_bytes
from targets.rows import Row, RowIterator, race, timing_options

# Bytes that are read between calls: more than the caches of most CPUs hold.
EVICTED_BYTES = 128 << 20
PAUSE = 0.01  # seconds
TOKENS = (1, 2, 4, 8, 16, 64)
PEERS = ("dense", "onednn")
# Least speed-up over the fastest dense product, at 64 tokens.
MIN_SPEEDUPS = {"float32": 8.0, "bfloat16": 7.0}


@torch.no_grad()
def rows(budget: float, quick: bool = False) -> RowIterator:
    """Yield a row for each dtype and number of tokens; `quick` uses small shapes, to try the program."""
    evicted = torch.zeros((1 << 20 if quick else EVICTED_BYTES) // 4)
    for dtype, least in MIN_SPEEDUPS.items():
        for tokens in TOKENS:
            spec = replace(TRAINING, tokens=tokens, dtype=dtype).shrunk(16 if quick else 1)
            yield _cold_row(spec, evicted, least if tokens == TOKENS[-1] else None, budget, quick)


def _cold_row(spec: LinearSpec, evicted: torch.Tensor, least: float | None, budget: float, quick: bool) -> Row:
    """Time a product against the fastest dense one, and against reading the weights."""
    options = timing_options(budget, quick)
    case = LinearBench(**options).checked_case(spec)
    size, calls = case.weight_bytes(OURS), {name: case.call(name) for name in (OURS, *PEERS) if _is_served(name, spec)}
    calls["reading"] = partial(sum_bytes, case.copy_of_values(0))
    timed = race(calls, **options, clock=partial(_cold_clock, evicted))
    samples = timed.samples
    best = min((name for name in PEERS if name in calls), key=lambda name: samples.time(name).median)
    bound = samples.ratio("reading", OURS).median
    rate = size / samples.time("reading").median / 1e9
    work = f"{spec.dtype} forward, hidden {spec.out_features}, {spec.tokens} tokens, density {spec.density:g}, cold"
    more = f"; {1e6 * samples.time(OURS).median:.0f} us, {bound:.0%} of reading the weights at {rate:.3g} GB/s"
    return timed.row(work, best, OURS, best, least=least, more=more, details={**spec.as_dict(), "bound": bound})


def _is_served(name: str, spec: LinearSpec) -> bool:
    """Return whether a product runs in sensible time: oneDNN in bfloat16 only where the CPU has instructions for it."""
    return name != "onednn" or spec.dtype == "float32" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _cold_clock(evicted: torch.Tensor, call: Call, repeat: int) -> float:
    """Return the seconds of one call after other data was read and a pause; `repeat` is ignored."""
    evicted.sum()
    sleep(PAUSE)
    start = perf_counter()
    call()
    return perf_counter() - start
