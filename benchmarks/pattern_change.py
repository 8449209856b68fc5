"""Time a change of the pattern of ten million weights, in training steps of the same layer.

    python benchmarks/pattern_change.py
    python benchmarks/pattern_change.py --weights 100000 --rounds 2 --out /tmp/change          a quick check

A step is forward, backward and AdamW (not fused) of one square layer at density 0.01 on 128 rows. A change drops and
grows the fraction of blocks that each method takes at first. Steps and changes take turns. Writes
pattern-change-CPU-SET.json and .md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from blocksparse import nn, sparsity
from blocksparse_lab.bench import report
from blocksparse_lab.machine import machine, slug, where

DENSITY, ROWS, TARGET = 0.01, 128, 2.0
EVERY = 3  # steps between changes
METHODS: dict[str, Callable[..., Any]] = {
    "SET": lambda layer, optimizer: sparsity.SET(layer, optimizer, every=EVERY),
    "SMET": lambda layer, optimizer: sparsity.SMET(layer, optimizer, end=1000, every=EVERY),
    "SMET without a clock": lambda layer, optimizer: sparsity.SMET(
        layer, optimizer, end=1000, every=EVERY, warmup=None
    ),
    "CHTs": lambda layer, optimizer: sparsity.CHTs(layer, optimizer, end=1000, every=EVERY),
    "RigL": lambda layer, optimizer: sparsity.RigL(layer, optimizer, end=1000, every=EVERY),
}
ALL_PLACES = {"CHTs", "RigL"}  # methods that score all places, too many for single connections


def timed(method: str, weights: int, size: int, rounds: int) -> dict[str, Any]:
    """Time steps and changes in turn; return a row of the result."""
    torch.manual_seed(0)
    side = round((weights / DENSITY) ** 0.5 / size) * size
    layer = nn.Linear(side, side, density=DENSITY, block_size=size, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    x, moves = torch.randn(ROWS, side), METHODS[method](layer, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()

    def seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    steps, changes = [], []
    for _ in range(rounds):
        step()  # the first one after a change makes plans
        moves.step()
        steps.append(seconds(step))
        moves.step()
        step()  # RigL records gradients
        changes.append(seconds(moves.step))
    ratios = [change / each for change, each in zip(changes, steps, strict=True)]
    median = statistics.median(ratios)
    row = {
        "work": f"a change by {method}, {weights:,} weights in blocks of {size}",
        "target": f"<= {TARGET:g} steps",
        "measured": f"{median:.2f} ({min(ratios):.2f}-{max(ratios):.2f}) steps",
        "met": median <= TARGET,
        "details": {"seconds of a step": statistics.median(steps), "seconds of a change": statistics.median(changes)},
    }
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    facts = machine()
    cases = [(name, size) for size in (1, 8) for name in METHODS if size > 1 or name not in ALL_PLACES]
    rows = [timed(name, arguments.weights, size, arguments.rounds) for name, size in cases]
    settings = {"rows": ROWS, "density": DENSITY, "rounds": arguments.rounds}
    result = {"what": "changes of the pattern of a layer", "machine": facts, "settings": settings, "rows": rows}
    keys = ("work", "target", "measured")
    times = ("seconds of a step", "seconds of a change")
    cells = [(*(row[key] for key in keys), *(f"{row['details'][key]:.3f}" for key in times)) for row in rows]
    note = f"A square layer at density {DENSITY:g}, {ROWS} rows. {where(facts)}. "
    note += f"Medians of {arguments.rounds} rounds (least and most)."
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"pattern-change-{slug(facts['cpu'])}-{facts['isa']}"
    report.write(arguments.out / f"{name}.json", result, report.markdown((*keys, *times), cells), note)


if __name__ == "__main__":
    main()
