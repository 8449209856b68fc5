"""Measure every target on a CPU in one run, op by op; each product is checked before it is timed.

    python benchmarks/reach.py                  some minutes on two cores, with nothing else running
    python benchmarks/reach.py --only conv2d    the targets of one op
    python benchmarks/reach.py --quick          small shapes, to try the program
    python benchmarks/reach.py --seconds 2      less time per row than 5 seconds

Prints a table per op, and writes it to benchmarks/results/<op>-<machine>-<instruction set>.md, with a JSON file next to
it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from blocksparse.ops import cpu_core
from blocksparse_lab import machine
from targets import (
    attention,
    bfloat16,
    bounds,
    calibration,
    cold,
    experts,
    gpt,
    int8,
    libxsmm,
    lstm,
    mlp,
    models,
    pixelcnn,
    products,
    recurrent,
    rows,
    windows,
)
from targets.rows import Row

RESULTS = Path(__file__).parent / "results"
BUDGET = 5.0  # seconds of timing per row of an op

# Title, function that yields the rows, and its budget as a multiple of BUDGET.
OPS: dict[str, tuple[str, Callable[[float, bool], rows.RowIterator], int]] = {
    "linear": ("targets of the linear op", products.linear_rows, 1),
    "bfloat16": ("products in bfloat16", bfloat16.rows, 1),
    "bounds": ("products as parts of their bounds", bounds.rows, 1),
    "cold": ("single calls with weights outside the caches", cold.rows, 1),
    "int8": ("targets of products in 8 bits", int8.rows, 1),
    "libxsmm": ("the linear op against libxsmm", libxsmm.rows, 1),
    "conv2d": ("targets of the convolutions", products.conv_rows, 1),
    "lstm": ("targets of the recurrent networks", lstm.rows, 1),
    "recurrent": ("single recurrent layers", recurrent.rows, 1),
    "models": ("targets of whole models", models.rows, 2),
    "gpt": ("training steps of a small transformer", gpt.rows, 4),
    "mlp": ("targets of the truly sparse networks", mlp.rows, 4),
    "pixelcnn": ("targets of PixelCNN++", pixelcnn.rows, 4),
    "attention": ("targets of attention", attention.rows, 4),
    "windows": ("targets of attention in a window", windows.rows, 1),
    "decoding": ("targets of decoding with a cache", windows.decoding_rows, 1),
    "experts": ("targets of the experts of a mixture", experts.rows, 2),
    "calibration": ("seconds of a fit to calibration data", calibration.rows, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Every target of a CPU in one run.")
    parser.add_argument("--only", choices=tuple(OPS), help="measure one op")
    parser.add_argument("--quick", action="store_true", help="small shapes; writes nothing")
    parser.add_argument("--seconds", type=float, default=BUDGET, help="seconds of timing per row of an op")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cpu_core.core()  # raises with instructions if it is not built
    console, stderr = Console(), Console(stderr=True)
    for op in [arguments.only] if arguments.only else OPS:
        title, measure, factor = OPS[op]
        facts = machine.machine()
        op_rows: list[Row] = []
        with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
            task = progress.add_task("starting", total=None)
            for row in measure(factor * arguments.seconds, arguments.quick):
                op_rows.append(row)
                progress.update(task, description=f"{row.work}: {row.measured}")
        console.print(rows.table(op_rows, f"{op}: {machine.chip(facts)}, load {facts['load'][0]:g} before"))
        if not arguments.quick:
            path = arguments.out / f"{op}-{machine.slug(facts['cpu'])}-{facts['isa']}.json"
            rows.write(path, op_rows, title, facts, budget=arguments.seconds)
            console.print(f"wrote {path} and .md", soft_wrap=True)


if __name__ == "__main__":
    main()
