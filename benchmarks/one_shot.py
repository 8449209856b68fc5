"""What one shot costs: accuracy of trained nets of unequal layers, made block-sparse without training.

    python benchmarks/one_shot.py --data DIR                    all nets; those of packages that are not installed not
    python benchmarks/one_shot.py --data DIR --only mlp,lstm    some; the others keep what was measured before

Trains the nets that are not pretrained, in about half an hour on one core, and keeps them in a folder. The table goes
to docs/results/one_shot.md, with JSON next to it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console

from blocksparse_lab.bench import one_shot
from blocksparse_lab.bench.nets import nets

OUT = Path(__file__).parent.parent / "docs" / "results" / "one_shot.json"


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of trained nets after one shot.")
    parser.add_argument("--data", type=Path, help="a folder with fashion_mnist, cifar-10-batches-py and text")
    parser.add_argument("--only", default="", help="names of nets with commas between")
    parser.add_argument("--way", choices=tuple(one_shot.WAYS), help="one of the ways only")
    parser.add_argument("--kept", type=Path, default=Path(tempfile.gettempdir()) / "one_shot", help="for trained nets")
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON file")
    arguments = parser.parse_args()
    arguments.kept.mkdir(parents=True, exist_ok=True)
    console = Console(soft_wrap=True, highlight=False)
    only = tuple(name for name in arguments.only.split(",") if name)
    ways = (arguments.way,) if arguments.way else tuple(one_shot.WAYS)
    found = one_shot.read(arguments.out)
    for net in nets(arguments.data, arguments.kept, only):
        found = one_shot.merged(found, one_shot.outcomes(net, ways=ways))
        console.print("\n".join(one_shot.table([each for each in found if each.net == net.name])))
        one_shot.write(arguments.out, found)


if __name__ == "__main__":
    main()
