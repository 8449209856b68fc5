"""The page of `blocksparse demo`: one HTML file without network, server or script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blocksparse.measure import Spread

from ..bench.linear import CaseResult
from ..bench.report import duration, ratio, short
from ..recipes.example_2017 import Example
from ..recipes.three_ways import DENSE, SMALL, SPARSE, SPARSIFIED, WIDE, ThreeWays
from . import page
from .page import INK, axes_for_page, image
from .terminal import short as in_three_digits

COLORS = {DENSE: page.DENSE, SPARSE: page.SPARSE, SPARSIFIED: "#8a6fd1"}

# A difference in accuracy below this is chance, with a test set of 4,000.
CHANCE = 0.01


@dataclass
class Story:
    """Results of a demo so far; parts that did not run yet are None or empty."""

    machine: dict[str, Any]
    seed: int
    comparison: ThreeWays | None = None
    speedups: list[CaseResult] = field(default_factory=list)
    example: Example | None = None
    interrupted: bool = False


def render(story: Story) -> str:
    """Render the whole page."""
    values: dict[str, Any] = {"story": story, "comparison": story.comparison, "example": story.example}
    if story.comparison is not None:
        values |= _comparison(story.comparison)
    if story.speedups:
        values |= _speedups(story.speedups)
    if story.example is not None:
        values["example_rows"] = example_rows(story.example)
    names = ("cpu", "isa", "threads", "load before", "system", "python", "torch", "blocksparse", "commit", "date")
    machine = [(name, [story.machine[name]]) for name in names if story.machine.get(name) is not None]
    machine.append(("seed", [story.seed]))
    return page.render("demo.html", title="blocksparse demo", machine=machine, **values)


def headline(comparison: ThreeWays) -> str:
    """Say how many times as fast the block-sparse net trains, by the median step, and how accurate both nets are."""
    dense, sparse = comparison.entries[DENSE], comparison.entries[SPARSE]
    times = dense.step.median / sparse.step.median
    accuracies = f"{100 * sparse.accuracy:.1f} against {100 * dense.accuracy:.1f} % right"
    if times < 1.05:
        speed = f"{times:.2f} times as fast as the dense one"
        return f"The block-sparse net does not train faster here: {speed}, {accuracies}."
    gain = sparse.accuracy - dense.accuracy
    accuracy = f"but is less accurate: {accuracies}" if gain < -CHANCE else f"at {accuracies}"
    return f"The block-sparse net trains {times:.1f} times as fast as the dense one, {accuracy}."


def compared(comparison: ThreeWays) -> list[tuple[str, list[str]]]:
    """Return the rows of the table of the three ways: a name and a cell per net."""
    entries = [comparison.entries[name] for name in comparison.ways]
    seconds = [f"{entry.seconds:.1f} s" for entry in entries]
    if len(entries) == 3:
        seconds[2] = f"{entries[0].seconds:.1f} + {seconds[2]}"
    return [
        (f"right, {comparison.data.test_name}", [f"{100 * entry.accuracy:.1f} %" for entry in entries]),
        ("training", seconds),
        ("time per step", [duration(entry.step.median) for entry in entries]),
        ("memory to train", [f"{short(entry.memory / 1e6)} MB" for entry in entries]),
        ("inference, 64 rows", [duration(_inference(comparison, entry.name)) for entry in entries]),
        ("parameters", [in_three_digits(entry.parameters) for entry in entries]),
        ("top learning rate", [f"{entry.rate:g}" for entry in entries]),
    ]


def equal_cost(comparison: ThreeWays) -> str:
    """Say how the wide block-sparse net compares with a small dense one of equal multiply-adds."""
    wide, small = comparison.entries.get(WIDE), comparison.entries.get(SMALL)
    if wide is None or small is None:
        return "The wide block-sparse net and the small dense one did not train."
    s, gain = comparison.settings, wide.accuracy - small.accuracy
    verdict = "as accurate" if abs(gain) < CHANCE else "more accurate" if gain > 0 else "less accurate"
    return (
        f"A block-sparse net of {s.wide:,} units per layer that stores {100 * s.wide_density:g} % of its weights "
        f"trains with the multiply-adds of a dense net of {comparison.small_width:,} units. It is {verdict}: "
        f"{100 * wide.accuracy:.1f} against {100 * small.accuracy:.1f} % right, {wide.bits:.2f} against "
        f"{small.bits:.2f} bits per label. Its step takes {wide.step.median / small.step.median:.2f} times as long."
    )


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
    axes.plot(density, medians, color=page.SPARSE, lw=2, marker="o", ms=4, label="measured")
    for x, y in zip(density, medians, strict=True):
        axes.annotate(short(y), (x, y), (0, 6), textcoords="offset points", ha="center", color=page.SPARSE, size=9)
    axes.set(xscale="log", yscale="log", xlabel="density", ylabel="times as fast as dense")
    axes.set_ylim(min(0.8, *medians) * 0.9, max(*medians, 1 / density[0]) * 1.3)
    axes.set_xticks(density, [f"{d:.2g}" for d in density])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    return {
        "spec": results[0].spec,
        "error": max(error for result in results for error in result.errors.values()),
        "speedup_chart": image(figure, "times as fast as dense against density"),
        "speedup_rows": [speedup_row(result) for result in results],
    }


def _comparison(comparison: ThreeWays) -> dict[str, Any]:
    """Return what the page shows of the three ways."""
    return {
        "headline": headline(comparison),
        "ways": comparison.ways,
        "chart": _chart(comparison),
        "compared": compared(comparison),
        "equal_cost": equal_cost(comparison),
    }


def _chart(comparison: ThreeWays) -> Any:
    """Draw accuracy against seconds of training, and bars of memory and inference."""
    figure, (curves, memory, inference) = axes_for_page((9.4, 3.4), columns=3, width_ratios=(3, 1, 1))
    for name in comparison.ways:
        entry, color = comparison.entries[name], COLORS[name]
        seconds, right = comparison.seconds_and_accuracy(name)
        curves.plot(seconds, right, color=color, lw=2, marker="o", ms=3, label=name)
        for axes, height in ((memory, entry.memory / 1e6), (inference, 1e3 * _inference(comparison, name))):
            bar = axes.bar(name, height, color=color, width=0.7)
            axes.bar_label(bar, [short(height)], color=INK, size=9)
    curves.set(xlabel="seconds of training", ylabel="% right", ylim=(0, 100))
    curves.set_xlim(left=0)
    curves.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower right")
    memory.set(xticks=[], xlabel="MB to train")
    inference.set(xticks=[], xlabel="ms for 64 rows")
    return image(figure, "accuracy against seconds of training; memory to train; time of inference")


def _inference(comparison: ThreeWays, name: str) -> float:
    """Return the median seconds of a net for a batch of 64."""
    return comparison.inference.time(name).median


def _milliseconds(spread: Spread) -> str:
    return f"{short(1e3 * spread.median)} ({short(1e3 * spread.low)}-{short(1e3 * spread.high)})"
