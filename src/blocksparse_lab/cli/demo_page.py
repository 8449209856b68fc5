"""The page of `blocksparse demo`: one HTML file without network, server or script."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blocksparse.layout import BlockLayout
from blocksparse.measure import Spread

from ..bench.linear import CaseResult
from ..bench.report import duration, ratio, short
from ..models.bytes import ByteLayouts
from ..recipes.example_2017 import Example
from ..recipes.next_byte import Curve, Outcome, RaceSettings
from .page import DENSE, INK, SPARSE, axes_for_page, image
from .page import render as filled


@dataclass
class Training:
    """The race of a demo: the text, the models and their progress."""

    text: str
    train_bytes: int
    held_out_bytes: int
    settings: RaceSettings
    layouts: ByteLayouts
    steps: int = 0
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass
class Story:
    """Results of a demo so far; parts that did not run yet are None or empty."""

    machine: dict[str, Any]
    seed: int
    example: Example | None = None
    speedups: list[CaseResult] = field(default_factory=list)
    training: Training | None = None
    interrupted: bool = False


def render(story: Story) -> str:
    """Render the whole page."""
    values: dict[str, Any] = {"story": story, "outcomes": [], "best": None, "example": story.example}
    if story.example is not None:
        values["example_rows"] = example_rows(story.example)
    if story.speedups:
        values |= _speedups(story.speedups)
    if story.training is not None and story.training.outcomes:
        values |= _training(story.training)
    names = ("cpu", "isa", "threads", "load before", "system", "python", "torch", "blocksparse", "commit", "date")
    machine = [(name, [story.machine[name]]) for name in names if story.machine.get(name) is not None]
    machine.append(("seed", [story.seed]))
    return filled("demo.html", {"short": short}, title="blocksparse demo", machine=machine, **values)


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Say which model did better and how long a step of each takes."""
    dense, sparse = outcomes
    gain = 100 * (1 - sparse.held_out / dense.held_out)
    difference = f"{abs(gain):.1f} % {'fewer' if gain > 0 else 'more'}" if abs(gain) >= 0.3 else "no real difference"
    return (
        f"On held-out text the wide block-sparse model needs {sparse.held_out:.3f} bits per byte, "
        f"the dense one {dense.held_out:.3f}: {difference}. "
        f"Its step takes {duration(sparse.step.median)}, the dense one's {duration(dense.step.median)}: "
        f"{sparse.step.median / dense.step.median:.2f} times as long."
    )


def compared(outcomes: Sequence[Outcome]) -> list[tuple[str, list[str]]]:
    """Return the rows of the models' table: a name and a cell per model."""
    return [
        ("hidden width", [f"{o.width:,}" for o in outcomes]),
        ("parameters", [f"{o.parameters:,}" for o in outcomes]),
        ("multiply-adds per byte", [f"{o.multiply_adds:,}" for o in outcomes]),
        ("peak learning rate", [f"{o.learning_rate:g}" for o in outcomes]),
        ("bits per byte, training text", [f"{o.train:.3f}" for o in outcomes]),
        ("bits per byte, held-out text", [f"{o.held_out:.3f}" for o in outcomes]),
        ("ms per step", [_milliseconds(o.step) for o in outcomes]),
    ]


def bits_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the range of the bits-per-byte axis for these curves."""
    seen = [bits for curve in curves for bits in curve.held_out]
    room = 0.06 * (max(seen) - min(seen)) or 0.1
    return min(seen) - room, max(seen) + room


def example_rows(example: Example) -> list[tuple[str, list[str]]]:
    """Return the rows of the 2017 example's table."""
    samples, layout = example.samples, example.layout
    return [
        ("stored", [f"{layout.nnz:,} of {layout.grid[0] * layout.grid[1]:,} blocks, density {layout.density:.2f}"]),
        ("relative error", [f"{example.relative_error:.1e}"]),
        ("largest error", [f"{example.largest_error:.1e}"]),
        ("block-sparse", [_milliseconds(samples.time("block-sparse")) + " ms"]),
        ("dense", [_milliseconds(samples.time("dense")) + " ms"]),
        ("speed-up", [ratio(samples.ratio("dense", "block-sparse"))]),
    ]


def speedup_row(result: CaseResult) -> tuple[str, list[str]]:
    times = [duration(spread.median) for spread in (result.time(), result.time("dense"))]
    return f"{result.density:.3g}", [*times, ratio(result.speedup("dense"))]


def _speedups(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Draw speed-up against density."""
    by_density = sorted(results, key=lambda result: result.density)
    density = [result.density for result in by_density]
    medians = [result.speedup("dense").median for result in by_density]
    figure, axes = axes_for_page((4.6, 3.0))
    axes.plot(density, [1 / d for d in density], color=INK, lw=1.5, ls="--", label="1 / density")
    axes.axhline(1, color=INK, lw=1)
    axes.plot(density, medians, color=SPARSE, lw=2, marker="o", ms=4, label="measured")
    for x, y in zip(density, medians, strict=True):
        axes.annotate(short(y), (x, y), (0, 6), textcoords="offset points", ha="center", color=SPARSE, size=9)
    axes.set(xscale="log", yscale="log", xlabel="density", ylabel="times as fast as dense")
    axes.set_ylim(min(0.8, *medians) * 0.9, max(*medians, 1 / density[0]) * 1.3)
    axes.set_xticks(density, [f"{d:.2g}" for d in density])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    return {
        "best": min(results, key=lambda result: abs(result.density - 0.1)),
        "spec": results[0].spec,
        "error": max(error for result in results for error in result.errors.values()),
        "speedup_chart": image(figure, "times as fast as dense against density"),
        "speedup_rows": [speedup_row(result) for result in results],
    }


def _training(training: Training) -> dict[str, Any]:
    """Return what the page shows of the race."""
    outcomes = training.outcomes
    dense, sparse = outcomes
    return {
        "training": training,
        "settings": training.settings,
        "outcomes": outcomes,
        "dense": dense,
        "sparse": sparse,
        "hidden": training.layouts.hidden[0],
        "verdict": verdict(outcomes),
        "compared": compared(outcomes),
        "curves": _curves(training) if dense.curve.held_out else None,
        "weights": _weights(training.layouts, dense.width),
    }


def _curves(training: Training) -> Any:
    """Draw bits per byte of held-out text against steps and against seconds; return the picture for the page."""
    figure, (by_step, by_time) = axes_for_page((9.4, 3.2), columns=2, sharey=True)
    for outcome, color in zip(training.outcomes, (DENSE, SPARSE), strict=True):
        curve = outcome.curve
        every = max(1, len(curve.bits) // 150)
        running = list(itertools.accumulate(curve.bits, lambda mean, bits: 0.95 * mean + 0.05 * bits))[::every]
        by_step.plot(range(1, len(curve.bits) + 1, every), running, color=color, lw=1, alpha=0.5)
        by_step.plot(curve.evaluated_at, curve.held_out, color=color, lw=2, label=outcome.name)
        seconds = [step * outcome.step.median for step in curve.evaluated_at]
        by_time.plot(seconds, curve.held_out, color=color, lw=2)
    by_step.set(xlabel="steps (thin: training batches, running mean)", ylabel="bits per byte")
    by_step.set(xlim=(0, training.steps), ylim=bits_range([outcome.curve for outcome in training.outcomes]))
    by_time.set(xlabel="seconds, at the median time per step")
    by_time.set_xlim(left=0)
    by_step.legend(frameon=False, labelcolor=INK, fontsize=9)
    return image(figure, "bits per byte of held-out text against steps and seconds")


def _weights(layouts: ByteLayouts, narrow: int) -> Any:
    """Draw the weights of both models to scale."""
    hidden = layouts.hidden[0]
    shown: list[tuple[str, tuple[int, int], BlockLayout | None]] = [
        ("dense", (narrow, narrow), None),
        ("block-sparse, hidden", hidden.shape, hidden),
        ("inlet", layouts.inlet.shape, layouts.inlet),
        ("outlet", layouts.outlet.shape, layouts.outlet),
    ]
    widths, height = [shape[1] for _, shape, _ in shown], max(shape[0] for _, shape, _ in shown)
    figure, axes = axes_for_page((9.4, 9.4 * height / sum(widths) + 0.5), columns=4, width_ratios=widths)
    for one, (name, shape, layout) in zip(axes, shown, strict=True):
        mask = np.ones((1, 1)) if layout is None else layout.mask().numpy()
        colour = np.array([0x2F, 0x86, 0xCF, 0] if layout is not None else [0xD9, 0x74, 0x2B, 0], np.uint8)
        picture = np.tile(colour, (*mask.shape, 1))
        picture[..., 3] = np.where(mask, 255, 24)
        one.imshow(picture, extent=(0, shape[1], shape[0], 0), interpolation="nearest")
        one.set(xticks=[], yticks=[], xlabel=f"{name}\n{shape[0]} x {shape[1]}", anchor="S")
        one.spines[:].set_visible(False)
    return image(figure, "the weights of both models, to scale")


def _milliseconds(spread: Spread) -> str:
    return f"{short(1e3 * spread.median)} ({short(1e3 * spread.low)}-{short(1e3 * spread.high)})"
