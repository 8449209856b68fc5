"""Families of models from the libraries transformers, timm and peft, made block-sparse: do they compute the same?

    python benchmarks/families.py                       all families that are not in the table yet
    python benchmarks/families.py --only bert,llama     these, again
    python benchmarks/families.py --again               all of them again

Each is a small model with random weights, half of whose blocks `sparsify` keeps. The sparse model has to compute what
the one does that `densify` makes of it, and each weight has to get a gradient where the dense one gets one. Writes
families.json and families.md into docs/results after each family. Exit status 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from blocksparse.checkpoint import read_json
from blocksparse_lab.bench import report
from blocksparse_lab.bench.families import FAMILIES
from blocksparse_lab.bench.family_trial import content, rows_of, texts, tried

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families, with commas between them")
    parser.add_argument("--again", action="store_true", help="also those that are in the table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the directory to write to")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(FAMILIES)
    unknown = [name for name in chosen if name not in FAMILIES]
    if unknown:
        raise SystemExit(f"families: --only: expected names out of {', '.join(FAMILIES)}, got {', '.join(unknown)}")
    path = options.out / "families.json"
    rows = {row.name: row for row in rows_of(read_json(path))} if path.is_file() else {}
    for name in chosen:
        if name in rows and rows[name].passed and not options.again and not options.only:
            continue
        row = rows[name] = tried(name)
        print(f"{name:24} {row.taken:4} weights, error {row.error:.1e}  {row.failed or row.refused or row.passed}")
        ordered = [rows[each] for each in FAMILIES if each in rows]
        report.write(path, content(ordered), *texts(ordered))
    return int(not all(row.passed for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
