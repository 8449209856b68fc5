"""Times inference with gates that are 0: the gated product against that of the compacted layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from blocksparse.errors import BlockSparseError
from blocksparse.measure import alternate
from blocksparse.ops.linear import linear
from blocksparse.ops.linear.specs import LinearSpec

from .linear import LinearBench
from .rows import Row, judged, times

HIDDEN = (1024, 4096)
CLOSED = (0.5, 0.9)  # part of the gates
MOST = 1.1  # times the compacted layout with its gates

COMPACTED, GATED_COMPACTED, GATED, FULL = "compacted", "compacted, gated", "gated", "full"


def rows(bench: LinearBench, shrink: int = 1) -> Iterator[Row]:
    """A row for each shape and each part of gates that is 0.

    >>> row = next(rows(LinearBench(rounds=3, budget=0.1), shrink=16))
    >>> row.work
    'fp32 forward, hidden 64, 64 tokens, density 0.2, 50% of the gates 0'
    """
    for hidden in HIDDEN:
        spec = LinearSpec(hidden // shrink, hidden // shrink, tokens=64, block=max(32 // shrink, 4), density=0.2)
        problem = bench.case(spec)
        x, values, layout = problem.x, problem.values, problem.layout
        draw = torch.Generator().manual_seed(bench.seed)
        order = torch.rand(layout.nnz, generator=draw).argsort()
        for closed in CLOSED:
            gate = 0.5 + torch.rand(layout.nnz, generator=draw)
            gate[order[: round(closed * layout.nnz)]] = 0
            keep = gate != 0
            smaller, kept, scale = layout.select(keep), values[keep], gate[keep]
            folded = kept * scale[:, None, None]
            calls = {
                COMPACTED: partial(linear, x, folded, smaller),
                GATED_COMPACTED: partial(linear, x, kept, smaller, gate=scale),
                GATED: partial(linear, x, values, layout, gate=gate),
                FULL: partial(linear, x, values, layout),
            }
            if not torch.equal(calls[GATED](), calls[COMPACTED]()):
                raise BlockSparseError.expected(f"{spec!r} with gates", "the bits of the compacted layout", "others")
            samples = alternate(calls, rounds=bench.rounds, budget=bench.budget)
            ratio, compacted, full = (
                samples.ratio(*pair) for pair in ((GATED, GATED_COMPACTED), (GATED, COMPACTED), (FULL, COMPACTED))
            )
            yield judged(
                f"fp32 forward, hidden {spec.out_features}, 64 tokens, density 0.2, {closed:.0%} of the gates 0",
                ratio,
                "the compacted layout with its gates",
                most=MOST,
                more=f"; {times(compacted)} without gates; all blocks without gates {times(full)}",
                details={
                    "seconds": {name: vars(samples.time(name)) for name in calls},
                    "ratio": {GATED_COMPACTED: vars(ratio), COMPACTED: vars(compacted)},
                },
            )
