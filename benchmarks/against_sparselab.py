"""Time training steps of a GPT whose feed-forward layers are sparse, against SparseLab on CPUs.

    pip install sparselab==0.2.2
    python benchmarks/against_sparselab.py
    python benchmarks/against_sparselab.py --layers 1 --rounds 2 --out /tmp/sparselab          a quick check

The net has 40 million parameters if it is dense, as in SparseLab's own demo: 8 layers of 640 features with 2,560
inside, context 128. Its feed-forward layers store a tenth of their weights. A step is forward, backward and AdamW on
--batch windows. Contenders take turns in one process, first on the whole net, then on its feed-forward layers alone.
Writes sparselab-CPU-SET.json and .md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse import BlockSparseError
from blocksparse import nn as sparse
from blocksparse_lab.bench import report
from blocksparse_lab.machine import machine, slug, where

WIDTH, INNER, HEADS, CONTEXT, VOCABULARY, DENSITY = 640, 2560, 10, 128, 65, 0.1
TARGETS = {"blocks of 16": 0.3}  # of SparseLab's time
Make = Callable[[int, int], nn.Module]


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each added to its normalized input."""

    def __init__(self, linear: Make):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.queries_keys_values, self.heads_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(linear(WIDTH, INNER), nn.GELU(), linear(INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.norms[0](x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.heads_out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def contenders() -> dict[str, Make]:
    """Return a function that makes a feed-forward weight, for each contender; SparseLab's is the baseline."""
    try:
        import sparselab
    except ImportError as error:
        raise BlockSparseError(f"this needs SparseLab ({error}): pip install sparselab==0.2.2") from error
    ours = {
        name: partial(sparse.Linear, density=DENSITY, block_size=size)
        for name, size in (("blocks of 1", 1), ("blocks of 8", 8), ("blocks of 16", 16), ("blocks of 32", 32))
    }
    return {"SparseLab": partial(sparselab.SparseLinear, sparsity=1 - DENSITY), "dense": nn.Linear, **ours}


class Training:
    """A net, or only its feed-forward layers, an optimizer and data."""

    def __init__(self, linear: Make, layers: int, batch: int, whole: bool):
        torch.manual_seed(0)
        blocks = [Block(linear) for _ in range(layers)]
        ends = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.net = nn.Sequential(ends[0], *blocks, ends[1]) if whole else nn.Sequential(*(each.mlp for each in blocks))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-4)
        self.text = torch.randint(VOCABULARY, (batch, CONTEXT + 1)) if whole else torch.randn(batch, CONTEXT, WIDTH)

    def step(self) -> float:
        """Train a step; return its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        if self.text.is_floating_point():
            loss = self.net(self.text).square().mean()
        else:
            loss = F.cross_entropy(self.net(self.text[:, :-1]).flatten(0, 1), self.text[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - start


def timed(whole: bool, layers: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Time steps of all contenders in turn; return a row for each."""
    trainings = {name: Training(make, layers, batch, whole) for name, make in contenders().items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for training in trainings.values():
        training.step()
    for _ in range(rounds):
        for name, training in trainings.items():
            seconds[name].append(training.step())
    rows: list[dict[str, Any]] = []
    for name, own in seconds.items():
        ratios = [ours / theirs for ours, theirs in zip(own, seconds["SparseLab"], strict=True)]
        median, quartiles = statistics.median(ratios), statistics.quantiles(ratios)
        target = None if whole else TARGETS.get(name)
        rows.append(
            {
                "work": f"a training step, {'the net' if whole else 'its feed-forward layers'}, {name}",
                "target": "-" if target is None else f"<= {target:g}x SparseLab's time",
                "measured": f"{median:.3f}x ({quartiles[0]:.3f}-{quartiles[2]:.3f}) SparseLab's time",
                "met": None if target is None else median <= target,
                "details": {"median seconds": statistics.median(own), "least seconds": min(own)},
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    facts = machine()
    rows = [row for whole in (True, False) for row in timed(whole, arguments.layers, arguments.batch, arguments.rounds)]
    what = f"GPT of {arguments.layers} layers, {WIDTH} features, feed-forward layers at density {DENSITY:g}"
    settings = {"batch": arguments.batch, "context": CONTEXT, "rounds": arguments.rounds, "sparselab": "0.2.2"}
    result = {"what": what, "machine": facts, "settings": settings, "rows": rows}
    lines = report.markdown(
        ("work", "target", "measured", "seconds"),
        [
            (*(row[key] for key in ("work", "target", "measured")), f"{row['details']['median seconds']:.3f}")
            for row in rows
        ],
    )
    note = f"{what}, {arguments.batch} x {CONTEXT} tokens. {where(facts)}. "
    note += f"Ratios: median of {arguments.rounds} rounds (quartiles)."
    name = f"sparselab-{slug(facts['cpu'])}-{facts['isa']}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    report.write(arguments.out / f"{name}.json", result, lines, note)


if __name__ == "__main__":
    main()
