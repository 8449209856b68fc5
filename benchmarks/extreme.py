"""Networks of up to 100 million neurons, trained one after the other: memory and time, and that both grow linearly.

    python benchmarks/extreme.py                        all sizes, hours on two cores
    python benchmarks/extreme.py --neurons 1M,5M        some; the file keeps its other sizes
    python benchmarks/extreme.py --seeds 0,1,2          several of each
    python benchmarks/extreme.py --quick                a small one, to see that it runs; writes nothing

Refuses sizes that do not fit into memory, with numbers. After each run the table is written: to
docs/results/extreme.md, with JSON and a picture next to it. Runs that are in that file are not made again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from blocksparse import BlockSparseError
from blocksparse_lab.bench import extreme, report
from blocksparse_lab.bench.extreme import Extreme
from blocksparse_lab.cli.train import parse_count
from blocksparse_lab.machine import available_memory

OUT = Path(__file__).parent.parent / "docs" / "results" / "extreme.json"


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time of networks of up to 100 million neurons.")
    parser.add_argument("--neurons", help="sizes with commas between, as 1M,50M")
    parser.add_argument("--seeds", default="0", help="with commas between")
    parser.add_argument("--rows", type=int, default=Extreme.rows, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=Extreme.epochs)
    parser.add_argument("--force", action="store_true", help="try what does not seem to fit into memory too")
    parser.add_argument("--quick", action="store_true", help="a small one; writes nothing")
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON file")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="for checkpoints")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    try:
        sys.exit(measure(arguments, console))
    except BlockSparseError as error:
        console.print(f"error: {error}", style="red", markup=False)
        sys.exit(1)


def measure(arguments: argparse.Namespace, console: Console) -> int:
    """Trains the nets, one after the other; gives the status to exit with."""
    sizes = [parse_count(text, "neurons") for text in (arguments.neurons or "").split(",") if text]
    if not all(text.isdecimal() for text in arguments.seeds.split(",")):
        raise BlockSparseError.expected("seeds", "ints of 0 or more, with commas between", repr(arguments.seeds))
    seeds = [int(text) for text in arguments.seeds.split(",")]
    if not arguments.quick:
        report.check_folder(arguments.out.parent)
    specs = [
        Extreme(n, arguments.rows, arguments.epochs, seed=seed) for n in sizes or extreme.NEURONS for seed in seeds
    ]
    done = [] if arguments.quick else [one.run for one in extreme.read(arguments.out)]
    specs = [spec for spec in specs if asdict(spec) not in done]
    if arguments.quick:
        specs = [Extreme(100_000, rows=16)]
    status = 0
    for spec in specs:
        head = f"{spec.neurons / 1e6:g} million neurons, seed {spec.seed}"
        console.print(
            f"[bold]{head}[/]: about {spec.connections:,} connections, {spec.predicted / 2**30:.1f} GiB at most; "
            f"{available_memory() / 2**30:.1f} GiB are available"
        )
        try:
            found = extreme.measure(spec, arguments.scratch, lambda text: console.print(f"  {text}"), arguments.force)
        except BlockSparseError as error:
            console.print(f"  {error}", style="red", markup=False)
            status = 1
            continue
        console.print(
            f"  {found.most / 2**30:.2f} GiB at the peak, {found.most / found.connections:.1f} bytes per connection, "
            f"{found.seconds['train']:.2f} s a step, {found.seconds['epoch']:.0f} s an epoch, "
            f"{found.held_out[-1]:.1f} % of the held-out rows wrong"
        )
        if not arguments.quick:
            extreme.write(arguments.out, extreme.merged(arguments.out, found))
            console.print(f"  wrote {arguments.out}")
    return status


if __name__ == "__main__":
    main()
