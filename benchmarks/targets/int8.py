"""Time the int8 product against PyTorch's dense int8 product, which also rounds its inputs in each call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from blocksparse import patterns
from blocksparse.layout import BlockLayout
from blocksparse.ops import cpu_core
from blocksparse.ops.int8_linear import int8_linear, quantized, reference
from blocksparse.ops.linear import linear
from blocksparse_lab.bench.case import check_errors, relative_error
from targets.rows import Race, Row, RowIterator, format_ratio, race, timing_options

Product = Callable[[], Tensor]

HIDDEN, TOKENS, DENSITIES = 4096, (1, 64, 1024), (0.25, 0.1)
# Least speed-up over the dense int8 product, by density; with tiles, that of 1,024 tokens with a scale per row.
MIN_RATIO = {0.25: 3.0, 0.1: None}
MIN_TILED_RATIO = {0.25: 5.0, 0.1: 11.0}
BLOCK, ROW, DENSE, FLOAT32 = "ours", "ours, scale per row", "dense int8", "our float32"
BFLOAT16 = "our bfloat16"


@torch.no_grad()
def rows(budget: float, quick: bool = False) -> RowIterator:
    """Yield two rows for each density and number of tokens: a scale per row and block of the weights, and one per row.

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
        rounded = {BLOCK: quantized(values), ROW: quantized(values, layout)}
        for tokens in TOKENS:
            x = torch.randn(tokens, hidden)
            calls: dict[str, Product] = {
                BLOCK: partial(int8_linear, x, *rounded[BLOCK], layout),
                ROW: partial(int8_linear, x, *rounded[ROW], layout),
                DENSE: partial(dense, x),
                FLOAT32: partial(linear, x, values, layout),
                BFLOAT16: partial(linear, x.bfloat16(), values.bfloat16(), layout),
            }
            timed = race(calls, **timing_options(budget, quick))
            for name in rounded:
                yield _row(timed, name, calls, rounded[name], x, layout)


def _row(
    timed: Race,
    name: str,
    calls: Mapping[str, Product],
    rounded: tuple[Tensor, Tensor],
    x: Tensor,
    layout: BlockLayout,
) -> Row:
    """Check a product and return its row."""
    tokens, hidden, density = len(x), layout.shape[1], layout.density
    some = slice(0, 16)
    error = relative_error(calls[name]()[some], reference.int8_linear(x[some], *rounded, None, layout, None))
    check_errors(1e-6, {"y": error}, layout, "the definition of the int8 product")
    rounding = relative_error(calls[name](), calls[FLOAT32]())
    rate = 2 * tokens * density * hidden**2 / timed.samples.time(name).median / 1e9
    others = ", ".join(f"{format_ratio(timed.samples.ratio(of, name))} {of}" for of in (FLOAT32, BFLOAT16))
    asked = min(MIN_RATIO, key=lambda each: abs(each - density))
    least = MIN_RATIO[asked] if name == BLOCK else None
    if name == ROW and cpu_core.isa() == "amx" and tokens == TOKENS[-1]:
        least = MIN_TILED_RATIO[asked]
    return timed.row(
        f"int8 forward, hidden {hidden}, {tokens} tokens, density {asked:g}{', scale per row' * (name == ROW)}",
        DENSE,
        name,
        DENSE,
        least=least,
        more=f", {others}, {rate:.0f} GOP/s, rounding {rounding:.1%}",
        details={"engine": torch.backends.quantized.engine, "error": error, "rounding": rounding},
    )
