"""Write the table of the demo's headline from several runs, one per seed.

for seed in 0 1 2; do blocksparse demo --seed $seed --out build/demo-$seed; done
python benchmarks/demo.py build/demo-*        writes benchmarks/results/demo-<CPU>.json and .md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from blocksparse.errors import BlockSparseError
from blocksparse.files import read_json
from blocksparse.measure import Spread
from blocksparse_lab.machine import slug
from blocksparse_lab.recipes.three_ways import DENSE, SMALL, SPARSE, SPARSIFIED, WIDE
from targets.rows import Row, ratio_row, write

RESULTS = Path(__file__).parent / "results"
NET = "MLP 1024-3072-3072-47 on drawn letters"

Model = dict[str, Any]


def rows(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of the table; each run has the demo's four nets."""
    models = [{model["name"]: model for model in run["training"]["models"]} for run in runs]

    def times(name: str, value: Callable[[Model], float]) -> Spread:
        return Spread.of([value(run[DENSE]) / value(run[name]) for run in models])

    def accuracy(name: str) -> Row:
        right = [100 * run[name]["accuracy"] for run in models]
        work = f"test accuracy, %, {name}, rate {models[0][name]['rate']:g}"
        return Row(work, "-", f"{mean(right):.2f} ± {stdev(right):.2f}", None, {"seeds": right})

    def bits(name: str) -> Row:
        values = [run[name]["bits"] for run in models]
        return Row(
            f"test loss, bits per label, {name}",
            "-",
            f"{mean(values):.3f} ± {stdev(values):.3f}",
            None,
            {"seeds": values},
        )

    step = Spread.of([run[WIDE]["step"]["median"] / run[SMALL]["step"]["median"] for run in models])
    return [
        ratio_row("a training step, block-sparse", times(SPARSE, lambda m: m["step"]["median"]), "dense"),
        ratio_row("memory to train, block-sparse", times(SPARSE, lambda m: m["memory"]), "dense"),
        ratio_row("inference of 64 rows, block-sparse", times(SPARSE, lambda m: m["inference"]["median"]), "dense"),
        *(accuracy(name) for name in (DENSE, SPARSE, SPARSIFIED, WIDE, SMALL)),
        *(bits(name) for name in (WIDE, SMALL)),
        ratio_row(f"a step, {WIDE}", step, "small dense net of equal multiply-adds", most=1.15),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="two output folders of `blocksparse demo` or more")
    folders = parser.parse_args().folders
    runs = [read_json(folder / "demo.json", "folders") for folder in folders]
    settings = [{**run["training"]["settings"], "seed": None} for run in runs]
    if len(runs) < 2 or any(each != settings[0] for each in settings):
        raise BlockSparseError.expected("folders", "two complete runs or more that differ in the seed only", folders)
    facts = runs[0]["machine"]
    path = RESULTS / f"demo-{slug(facts['cpu'])}-{facts['isa']}.json"
    write(path, rows(runs), NET, facts, ratios=f"median of {len(runs)} seeds (quartiles)", **settings[0])


if __name__ == "__main__":
    main()
