"""Measure the ONNX files of a block-sparse MLP in onnxruntime: dense weights against `sparse="gather"`.

python benchmarks/onnx_files.py        writes benchmarks/results/onnx-<CPU>.json and .md
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from rich.console import Console
from torch import nn

import blocksparse as bs
from blocksparse_lab.machine import chip, machine, slug
from targets.rows import Row, race, table, timing_options, write

RESULTS = Path(__file__).parent / "results"
LAYERS, BLOCK = 4, 32
DENSITIES, THREADS, BATCHES = (0.1, 0.25, 0.5), (1, 2), (1, 32, 256)
# At density 0.1: the largest fraction of the dense file's size, and the least speed-up.
SIZE, SPEEDUP = 0.12, 2


def rows(folder: Path, width: int, budget: float, quick: bool) -> Iterator[Row]:
    """Yield the row of the files' sizes, then those of times, for each density."""
    for density in DENSITIES:
        torch.manual_seed(0)
        layers = [bs.nn.Linear(width, width, density=density, block_size=BLOCK) for _ in range(LAYERS)]
        net = nn.Sequential(*itertools.chain.from_iterable((layer, nn.ReLU()) for layer in layers)).eval()
        files = {}
        for name, sparse in (("dense", None), ("gather", "gather")):
            files[name] = bs.export_onnx(
                net,
                torch.randn(32, width),
                folder / f"{name}.onnx",
                dynamic_shapes=({0: "batch"},),
                input_names=["input"],
                sparse=sparse,
            )
        sizes = {name: path.stat().st_size for name, path in files.items()}
        fraction, is_target = sizes["gather"] / sizes["dense"], density == DENSITIES[0]
        yield Row(
            f"size of the file, density {density:g}", f"<= {SIZE:g} of dense" if is_target else "-",
            f"{fraction:.3f} of dense, {sizes['gather'] / 1e6:.4g} MB", fraction <= SIZE if is_target else None, sizes,
        )  # fmt: skip
        for threads, batch in itertools.product(THREADS, BATCHES):
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            # Threads that wait for work would slow the other file's.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            calls = {}
            for name, path in files.items():
                session = onnxruntime.InferenceSession(str(path), options)
                calls[name] = partial(session.run, None, {"input": torch.randn(batch, width).numpy()})
            work = f"density {density:g}, {threads} {'thread' if threads == 1 else 'threads'}, batch {batch}"
            goal: dict[str, Any] = {"least": SPEEDUP} if is_target else {}
            yield race(calls, **timing_options(budget, quick)).row(work, "dense", "gather", "dense file", **goal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of each row of times")
    parser.add_argument("--quick", action="store_true", help="only try the program")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=bs.SparsityWarning)
    facts = {**machine(), "onnxruntime": onnxruntime.__version__}
    with tempfile.TemporaryDirectory() as folder:
        measured = list(rows(Path(folder), arguments.width, arguments.budget, arguments.quick))
    path = arguments.out / f"onnx-{slug(facts['cpu'])}-{facts['isa']}.json"
    what = f"MLP of {LAYERS} linear layers of {arguments.width} with ReLU in onnxruntime, float32, blocks of {BLOCK}"
    write(path, measured, what, facts, width=arguments.width, budget=arguments.budget)
    console = Console()
    console.print(table(measured, f"{what}: {chip(facts)}, load {facts['load'][0]:g} before"))
    console.print(f"wrote {path} and .md", soft_wrap=True)


if __name__ == "__main__":
    main()
