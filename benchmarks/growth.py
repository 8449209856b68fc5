"""Measure the loss of a small GPT around changes of its pattern: with Adam's one count of steps, and with clocks.

    python benchmarks/growth.py --data-dir DATA
    python benchmarks/growth.py --data-dir DATA --steps 150 --every 75 --out /tmp/growth          a quick check

All runs start from the same net, trained for --every steps, and read the same bytes of Wikipedia. SET then moves a
fifth of the blocks to random places every --every steps, with values 0; with a ramp, it moves fewer at first. The loss
is that of one batch that is never trained, after each step from 10 before a change to 60 after it.

The program writes growth-gpt.json, .md and .png after each seed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse import BlockSparseError, sparsity
from blocksparse.nn import optimizer_watch
from blocksparse.topology.drawings.style import COLORS, figure_and_axes
from blocksparse_lab.bench import report
from blocksparse_lab.data import corpora
from blocksparse_lab.folders import make_folder
from blocksparse_lab.machine import machine, where
from blocksparse_lab.models.gpt import GPT, GPTConfig

NAME = "growth-gpt"
CONFIG = GPTConfig(width=128, layers=2, density=0.25, block_size=16)
BEFORE, AFTER = 10, 60  # steps around a change in which the loss is measured
BATCH, EVALUATED = 16, 32  # windows of a step and of the measured loss
RATE, ZETA, WARMUP, CLIP = 0.004, 0.2, 100, 1.0


def forget(optimizer: torch.optim.Optimizer, module: Any, source: Tensor) -> None:
    """Set the moments of new blocks to 0 although the count of steps stays, as a plain port of SET to Adam does."""
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[module.values][name][source < 0] = 0
    optimizer_watch._before_next.pop(module.values, None)


def plain(model: GPT, optimizer: Any, **options: Any) -> sparsity.SET:
    return sparsity.SET(model, optimizer, ZETA, init="zeros", **options)


def forgetful(model: GPT, optimizer: torch.optim.Optimizer, **options: Any) -> sparsity.SET:
    return plain(model, optimizer, on_layout_change=partial(forget, optimizer), **options)


def with_clock(model: GPT, optimizer: torch.optim.Optimizer, **options: Any) -> sparsity.SET:
    return plain(model, sparsity.BlockClock(optimizer, WARMUP), **options)


# For each row of the result, the method, whose blocks move; None for fixed ones.
METHODS: dict[str, Callable[..., sparsity.SET] | None] = {
    "fixed blocks": None,
    "moments 0, one count of steps": forgetful,
    "mean second moment (default)": plain,
    "clock per block": with_clock,
    "clock per block, ramp of 4 changes": partial(with_clock, ramp=4),
}


def windows(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw windows of a text, `[context + 1, count]`."""
    starts = torch.randint(len(text) - CONFIG.context - 1, (count,), generator=generator)
    return torch.stack([text[start : start + CONFIG.context + 1] for start in starts.tolist()], 1)


def loss_of(model: GPT, chunk: Tensor) -> Tensor:
    """Return the cross entropy of a chunk in bits per byte."""
    logits, _ = model(chunk[:-1])
    return F.cross_entropy(logits.flatten(0, 1), chunk[1:].flatten().long()) / torch.log(torch.tensor(2.0))


def run(name: str, text: Tensor, steps: int, every: int, seed: int) -> dict[str, Any]:
    """Train a net; return the loss after each step near a change, in bits, and the largest update of a new block."""
    model = GPT(GPTConfig(**{**vars(CONFIG), "seed": seed}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    make = METHODS[name]
    method = None if make is None else make(model, optimizer, every=every, end=steps, seed=seed)
    held_out, trained = text[-100_000:], text[:-100_000]
    generator = torch.Generator().manual_seed(seed)
    measured = windows(held_out, EVALUATED, torch.Generator().manual_seed(1))
    curves: list[list[float]] = []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, step / 100)
        optimizer.zero_grad()
        loss_of(model, windows(trained, BATCH, generator)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if method is not None:
            method.step()
        since = (step + BEFORE) % every - BEFORE  # 0 at a change
        if step >= every - BEFORE and -BEFORE <= since <= AFTER:
            if since == -BEFORE:
                curves.append([])
            with torch.no_grad():
                curves[-1].append(float(loss_of(model, measured)))
    with torch.no_grad():
        held = statistics.fmean(
            float(loss_of(model, chunk)) for chunk in windows(held_out, 512, generator).split(64, 1)
        )
    return {"curves": [curve for curve in curves if len(curve) == BEFORE + AFTER + 1], "held_out": held}


def mean_curve(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Average over runs and changes the loss minus its mean over the steps before a change."""
    curves = [curve for each in runs for curve in each["curves"]]
    levelled = [[loss - statistics.fmean(curve[:BEFORE]) for loss in curve] for curve in curves]
    return [statistics.fmean(column) for column in zip(*levelled, strict=True)]


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the measured figures of a method."""
    curve = mean_curve(runs)
    return {
        "at once": curve[BEFORE],
        "jump": max(curve[BEFORE + 1 :]),
        "noise": statistics.fmean(statistics.stdev(each[:BEFORE]) for one in runs for each in one["curves"]),
        "changes": sum(len(one["curves"]) for one in runs),
        "held_out": [one["held_out"] for one in runs],
        "curve": curve,
    }


def rows_of(by_method: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of a result: the mean loss at a change, the highest one within 60 steps, and the loss at the end."""
    bound = 2 * by_method["fixed blocks"]["noise"]
    rows = []
    for key, when in (("at once", "before the next step"), ("jump", "after a step or more")):
        for name, own in by_method.items():
            target, met = ("-", None) if name == "fixed blocks" else (f"<= {bound:.3f}", own[key] <= bound)
            details = {each: own[each] for each in ("noise", "changes", "curve")} if key == "jump" else {}
            row = {"work": f"loss against before the change, {when}, {name}", "target": target}
            rows.append(row | {"measured": f"{own[key]:+.3f}", "met": met, "details": details})
    for name, own in by_method.items():
        rows.append({"work": f"held-out bits per byte, {name}", "target": "-", "met": None, "details": {}})
        rows[-1]["measured"] = report.spread(own["held_out"], 3)
    return rows


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the mean loss around a change."""
    figure, axes = figure_and_axes((7, 4))
    for (name, row), color in zip(rows.items(), COLORS, strict=False):
        axes.plot(range(-BEFORE, AFTER + 1), row["curve"], label=name, color=color)
    axes.axvline(0, color="gray", linewidth=0.8, linestyle=":")
    axes.set_xlabel("steps after a fifth of the blocks moved")
    axes.set_ylabel("bits per byte, against before the change")
    axes.legend(frameon=False)
    report.save(figure, path, "Loss around changes of the pattern")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--every", type=int, default=100, help="steps between changes, more than 70")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    if arguments.every <= BEFORE + AFTER or arguments.steps < 2 * arguments.every:
        raise BlockSparseError.expected("--every", f"more than {BEFORE + AFTER}, and two per run", arguments.every)
    torch.set_num_threads(1)
    text = torch.frombuffer(bytearray(corpora.load("wikipedia", arguments.data_dir)), dtype=torch.uint8)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    settings = {"steps": arguments.steps, "every": arguments.every, "seeds": arguments.seeds, "zeta": ZETA}
    settings |= {"learning_rate": RATE, "warmup": WARMUP, "bytes_per_step": BATCH * CONFIG.context} | vars(CONFIG)
    what = "GPT on Wikipedia's bytes whose blocks move by SET: the loss around the changes"
    here = machine()
    for seed in range(arguments.seeds):
        for name in METHODS:
            runs[name].append(run(name, text, arguments.steps, arguments.every, seed))
            print(name, seed, {key: value for key, value in figures(runs[name]).items() if key != "curve"}, flush=True)
        by_method = {name: figures(own) for name, own in runs.items()}
        rows = rows_of(by_method)
        result = {"what": what, "machine": here, "settings": settings | {"seeds": seed + 1}, "rows": rows}
        lines = report.markdown(
            ("work", "target", "measured"), [[row[key] for key in ("work", "target", "measured")] for row in rows]
        )
        path = make_folder(arguments.out) / f"{NAME}.json"
        about = f"{what}, the mean of all changes. In bits per byte, against the mean of {BEFORE} steps before."
        picture = f"![Loss around changes]({NAME}.png)"
        report.write(path, result, f"# {NAME}", about, lines, picture, f"{where(here)}.")
        draw(by_method, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
