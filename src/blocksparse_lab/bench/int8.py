"""Times the product in 8 bits against PyTorch's own dense one, which rounds its inputs in each call too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from blocksparse import patterns
from blocksparse.errors import BlockSparseError
from blocksparse.measure import alternate
from blocksparse.ops.int8_linear import int8_linear, quantized, reference
from blocksparse.ops.linear import linear

from .linear import LinearBench
from .rows import Row, judged, times

HIDDEN, TOKENS, DENSITIES = 4096, (1, 64, 1024), (0.25, 0.1)
LEAST = {0.25: 3.0, 0.1: None}  # times as fast as dense, in 8 bits both
OURS, DENSE, FLOAT32 = "ours", "dense int8", "our float32"


@torch.no_grad()
def rows(bench: LinearBench, shrink: int = 1) -> Iterator[Row]:
    """A row for each density and number of tokens.

    >>> row = next(rows(LinearBench(rounds=3, budget=0.1), shrink=16))
    >>> row.work
    'int8 forward, hidden 256, 1 tokens, density 0.25'
    """
    hidden = HIDDEN // shrink
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization moves to torchao, which needs a package of its own
        dense = torch.ao.quantization.quantize_dynamic(
            nn.Sequential(nn.Linear(hidden, hidden)), {nn.Linear}, torch.qint8
        )
    for density in DENSITIES:
        layout = patterns.random((hidden, hidden), block_size=32, density=density, seed=bench.seed)
        values = torch.randn(layout.values_shape) / (density * hidden) ** 0.5
        rounded = quantized(values)
        for tokens in TOKENS:
            x = torch.randn(tokens, hidden)
            calls = {
                OURS: partial(int8_linear, x, *rounded, layout),
                DENSE: partial(dense, x),
                FLOAT32: partial(linear, x, values, layout),
            }
            some = slice(0, 16)
            expected = reference.int8_linear(x[some], *rounded, layout, None, None)
            error = ((calls[OURS]()[some] - expected).norm() / expected.norm()).item()
            if not error < 1e-6:
                raise BlockSparseError.expected(f"int8 product of {layout!r}", "its definition", f"an error of {error}")
            exact = calls[FLOAT32]()
            rounding = ((calls[OURS]() - exact).norm() / exact.norm()).item()
            samples = alternate(calls, rounds=bench.rounds, budget=bench.budget)
            rate = 2 * tokens * density * hidden**2 / samples.time(OURS).median / 1e9
            yield judged(
                f"int8 forward, hidden {hidden}, {tokens} tokens, density {density:g}",
                samples.ratio(DENSE, OURS),
                DENSE,
                least=LEAST[density],
                more=f", {times(samples.ratio(FLOAT32, OURS))} {FLOAT32}, {rate:.0f} GOP/s, rounding {rounding:.1%}",
                details={
                    "seconds": {name: vars(samples.time(name)) for name in calls},
                    "engine": torch.backends.quantized.engine,
                    "error": error,
                    "rounding": rounding,
                },
            )
