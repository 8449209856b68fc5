"""Time the int8 product against PyTorch's dense int8 product, which also rounds its inputs in each call."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import nn

from blocksparse import patterns
from blocksparse.ops.int8_linear import int8_linear, quantized, reference
from blocksparse.ops.linear import linear
from blocksparse_lab.bench.case import check_errors, relative_error
from targets.rows import RowIterator, format_ratio, race, timing_options

HIDDEN, TOKENS, DENSITIES = 4096, (1, 64, 1024), (0.25, 0.1)
MIN_RATIO = {0.25: 3.0, 0.1: None}  # speed-up over the dense int8 product, by density
OURS, DENSE, FLOAT32 = "ours", "dense int8", "our float32"


@torch.no_grad()
def rows(budget: float, quick: bool = False) -> RowIterator:
    """Yield a row for each density and number of tokens.

    >>> next(rows(0.1, quick=True)).work
    'int8 forward, hidden 256, 1 tokens, density 0.25'
    """
    hidden = HIDDEN // 16 if quick else HIDDEN
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated for torchao, another package
        dense = torch.ao.quantization.quantize_dynamic(
            nn.Sequential(nn.Linear(hidden, hidden)), {nn.Linear}, torch.qint8
        )
    for density in DENSITIES:
        layout = patterns.random((hidden, hidden), block_size=32, density=density, seed=0)
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
            error = relative_error(calls[OURS]()[some], reference.int8_linear(x[some], *rounded, None, layout, None))
            check_errors(1e-6, {"y": error}, layout, "the definition of the int8 product")
            rounding = relative_error(calls[OURS](), calls[FLOAT32]())
            timed = race(calls, **timing_options(budget, quick))
            rate = 2 * tokens * density * hidden**2 / timed.samples.time(OURS).median / 1e9
            float32 = format_ratio(timed.samples.ratio(FLOAT32, OURS))
            yield timed.row(
                f"int8 forward, hidden {hidden}, {tokens} tokens, density {density:g}",
                DENSE,
                OURS,
                DENSE,
                least=MIN_RATIO[density],
                more=f", {float32} {FLOAT32}, {rate:.0f} GOP/s, rounding {rounding:.1%}",
                details={"engine": torch.backends.quantized.engine, "error": error, "rounding": rounding},
            )
