"""The page `blocksparse demo` leaves behind: one HTML file that needs no network, no server and no script."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from blocksparse.measure import Spread

from ..bench.linear import CaseResult
from ..bench.report import duration, ratio, short
from ..models.bytes import ByteLayouts
from ..recipes.example_2017 import Example
from ..recipes.next_byte import Curve, Outcome, Settings
from . import svg


@dataclass
class Training:
    """The third part of a demo: the text, what was trained on it and how far it came."""

    text: str
    train_bytes: int
    held_out_bytes: int
    settings: Settings
    layouts: ByteLayouts
    steps: int = 0
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass
class Story:
    """A demo's results so far; a part that has not run yet is None or empty."""

    machine: dict[str, Any]
    seed: int
    example: Example | None = None
    speedups: list[CaseResult] = field(default_factory=list)
    training: Training | None = None
    interrupted: bool = False


def render(story: Story) -> str:
    """The whole page."""
    trained = story.training is not None and bool(story.training.outcomes)
    parts = [
        _header(story),
        _example(story.example),
        _speedups(story.speedups),
        _training(story.training) if story.training and trained else _absent("Training"),
        _machine(story),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>blocksparse demo</title>\n<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Two sentences: which model did better, and how long a step of each takes."""
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
    """The rows of the table of models: a name, and a cell per model."""
    return [
        ("hidden width", [f"{o.width:,}" for o in outcomes]),
        ("parameters", [f"{o.parameters:,}" for o in outcomes]),
        ("multiply-adds per byte", [f"{o.multiply_adds:,}" for o in outcomes]),
        ("peak learning rate", [f"{o.learning_rate:g}" for o in outcomes]),
        ("bits per byte, training text", [f"{o.train:.3f}" for o in outcomes]),
        ("bits per byte, held-out text", [f"{o.held_out:.3f}" for o in outcomes]),
        ("ms per step", [_milliseconds(o.step) for o in outcomes]),
    ]


def smoothed(values: Sequence[float], keep: float = 0.95) -> list[float]:
    """A running mean that starts with the first value.

    >>> smoothed([4.0, 2.0, 2.0], keep=0.5)
    [4.0, 3.0, 2.5]
    """
    return list(itertools.accumulate(values, lambda mean, value: keep * mean + (1 - keep) * value))


def bits_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """The part of the bits-per-byte axis where the evaluations of these curves lie, with some room."""
    seen = [bits for curve in curves for bits in curve.held_out]
    low, high = min(seen), max(seen)
    room = 0.06 * (high - low) or 0.1
    return low - room, high + room


# -- the parts -----------------------------------------------------------------------------------------------------


def _header(story: Story) -> str:
    figures = []
    if story.example:
        figures.append((f"{story.example.relative_error:.0e}", "relative error of the 2017 example against float64"))
    if story.speedups:
        best = min(story.speedups, key=lambda result: abs(result.density - 0.1))
        times = short(best.speedup("dense").median)
        figures.append((f"{times}&times;", f"as fast as the dense product at density {best.density:.2g}"))
    if story.training and story.training.outcomes:
        dense, sparse = story.training.outcomes
        figures.append(
            (
                f"{sparse.held_out:.2f}",
                f"bits per byte, wide block-sparse; dense with equal parameters: {dense.held_out:.2f}",
            )
        )
    cards = "".join(f"<div><b>{value}</b><span>{escape(text)}</span></div>" for value, text in figures)
    note = '<p class="note">Stopped before the end: this is what was done by then.</p>' if story.interrupted else ""
    return (
        "<header><h1>blocksparse demo</h1><p>Networks whose weights are stored, trained and run in blocks: "
        f'the cost follows the blocks that exist.</p>{note}<div class="cards">{cards}</div></header>'
    )


def _example(example: Example | None) -> str:
    if example is None:
        return _absent("The 2017 example")
    samples, layout = example.samples, example.layout
    rows = [
        ("stored", [f"{layout.nnz:,} of {layout.grid[0] * layout.grid[1]:,} blocks, density {layout.density:.2f}"]),
        ("relative error", [f"{example.relative_error:.1e}"]),
        ("largest error", [f"{example.largest_error:.1e}"]),
        ("block-sparse", [_milliseconds(samples.time("block-sparse")) + " ms"]),
        ("dense", [_milliseconds(samples.time("dense")) + " ms"]),
        ("speed-up", [ratio(samples.ratio("dense", "block-sparse"))]),
    ]
    return (
        "<section><h2>The 2017 example</h2>"
        "<p><code>y = bsmm(x, w)</code> with a random 0/1 pattern, "
        f"hidden {example.hidden:,}, blocks of {example.block}, batch {example.batch}, float32; errors are against "
        f"the dense product in float64.</p>{_table([''], rows)}</section>"
    )


def _speedups(results: Sequence[CaseResult]) -> str:
    if not results:
        return _absent("Speed-up")
    spec = results[0].spec
    rows = [
        (
            f"{result.density:.3g}",
            [duration(result.time().median), duration(result.time("dense").median), ratio(result.speedup("dense"))],
        )
        for result in results
    ]
    by_density = sorted(results, key=lambda result: result.density)
    density = [result.density for result in by_density]
    medians = [result.speedup("dense").median for result in by_density]
    lines = [
        svg.Line(density, [1 / d for d in density], "guide"),
        svg.Line([density[0], density[-1]], [1, 1], "even"),
        svg.Line(density, medians, "sparse", [short(median) for median in medians]),
    ]
    limits = min(0.8, *medians) * 0.9, max(*medians, 1 / density[0]) * 1.3
    picture = svg.chart(lines, "density", "times as fast as dense", log=True, y_range=limits, x_range=_wider(density))
    error = max(error for result in results for error in result.errors.values())
    return (
        "<section><h2>Speed-up against density</h2>"
        f"<p>x Wᵀ in {spec.dtype}, hidden {spec.out_features:,}, {spec.tokens} tokens, blocks of {spec.block}. Each "
        f"result was checked against float64 first (relative error {error:.0e} at most); then both took turns.</p>"
        f'<div class="pair"><figure>{picture}{_legend(("sparse", "measured"), ("guide", "1 / density"))}</figure>'
        f"{_table(['density', 'block-sparse', 'dense', 'speed-up'], rows)}</div></section>"
    )


def _training(training: Training) -> str:
    dense, sparse = training.outcomes
    s = training.settings
    hidden = training.layouts.hidden[0]
    stored = hidden.nnz / hidden.grid[0]
    wider = f"{sparse.width / dense.width:.3g} times"
    cut = "" if training.steps == s.steps else f" of {s.steps:,} planned (the time was up or it was stopped)"
    return (
        "<section><h2>The next byte: dense against wide and sparse</h2>"
        f"<p>Two models read {s.context} bytes and predict the next: a residual MLP, once dense, once {wider} as wide "
        "with block-sparse weights, at equal parameters and equal multiply-adds. "
        f"{escape(training.text)}: {training.train_bytes:,} bytes to train on, the last {training.held_out_bytes:,} "
        f"held out. {training.steps:,} steps{cut} of {s.batch} windows, the same for both.</p>"
        f"<p><strong>{escape(verdict(training.outcomes))}</strong></p>"
        + _curves(training)
        + _table(["", "dense", "block-sparse"], compared(training.outcomes))
        + '<p class="small">Steps alternate between the models; times are medians with quartiles. The products cost '
        "the same number of multiply-adds, but norms and additions run over all of the wider state. Each learning rate "
        "is the best for its model, half and twice of it being worse; they and the layout were chosen on the held-out "
        "part of Python's help topics. This is one seed: take differences of a percent with care.</p>"
        "<h3>The weights, to scale</h3>"
        f"<p>On average a block row of a hidden weight stores {stored:.3g} of {hidden.grid[1]} blocks of "
        f"{hidden.block_shape[0]} &times; {hidden.block_shape[1]}: itself and its neighbours in a "
        "Watts-Strogatz small-world graph, each weight with a graph of its own. The dense weight beside it "
        "holds as many numbers.</p>" + _weights(training.layouts, dense.width) + "</section>"
    )


def _curves(training: Training) -> str:
    outcomes = training.outcomes
    if not outcomes[0].curve.held_out:
        return '<p class="note">Stopped before the first evaluation: there are no curves.</p>'
    limits = bits_range([outcome.curve for outcome in outcomes])
    by_step, by_time = [], []
    for outcome, style in zip(outcomes, ("dense", "sparse"), strict=True):
        curve = outcome.curve
        every = max(1, len(curve.bits) // 150)
        running = smoothed(curve.bits)[::every]
        at = range(1, len(curve.bits) + 1, every)
        by_step.append(svg.Line(at, running, f"{style} faint"))
        by_step.append(svg.Line(curve.evaluated_at, curve.held_out, style))
        by_time.append(svg.Line([step * outcome.step.median for step in curve.evaluated_at], curve.held_out, style))
    by_step.sort(key=lambda line: "faint" not in line.style)
    steps = svg.chart(by_step, "steps", "bits per byte", x_range=(0, training.steps), y_range=limits)
    last = max(line.x[-1] for line in by_time)
    seconds = svg.chart(
        by_time, "seconds, at the median time per step", "bits per byte", x_range=(0, last or 1), y_range=limits
    )
    keys = _legend(("dense", "dense"), ("sparse", "block-sparse"))
    more = _legend(
        ("dense", "dense"), ("sparse", "block-sparse"), ("sparse faint", "thin: training batches, running mean")
    )
    return f'<div class="pair"><figure>{steps}{more}</figure><figure>{seconds}{keys}</figure></div>'


def _weights(layouts: ByteLayouts, narrow: int) -> str:
    hidden = layouts.hidden[0]
    pictures = [
        ((narrow, narrow), None, "dense", "dense"),
        (hidden.shape, hidden, "sparse", "block-sparse, hidden"),
        (layouts.inlet.shape, layouts.inlet, "sparse", "inlet"),
        (layouts.outlet.shape, layouts.outlet, "sparse", "outlet"),
    ]
    # The widths in percent of the row, so that all four keep one scale on any screen.
    total = sum(shape[1] for shape, *_ in pictures) * 1.06
    figures = "".join(
        f'<figure style="width:{100 * shape[1] / total:.2f}%">{svg.weight(shape, layout, style)}'
        f"<figcaption>{name}<br>{shape[0]} &times; {shape[1]}</figcaption></figure>"
        for shape, layout, style, name in pictures
    )
    return f'<div class="weights">{figures}</div>'


def _machine(story: Story) -> str:
    facts = story.machine
    names = ("cpu", "isa", "threads", "load before", "system", "python", "torch", "blocksparse", "commit", "date")
    rows = [(name, [escape(str(facts[name]))]) for name in names if facts.get(name) is not None]
    return f"<section><h2>Machine</h2>{_table([''], [*rows, ('seed', [str(story.seed)])])}</section>"


def _absent(title: str) -> str:
    return f'<section><h2>{title}</h2><p class="note">Not reached.</p></section>'


# -- pieces --------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    titles = "".join(f"<th>{title}</th>" for title in head)
    top = f"<thead><tr>{titles}</tr></thead>" if any(head) else ""
    body = "".join(
        f"<tr><th>{name}</th>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" for name, cells in rows
    )
    return f"<table>{top}<tbody>{body}</tbody></table>"


def _legend(*keys: tuple[str, str]) -> str:
    items = "".join(
        f'<span><svg viewBox="0 0 20 6"><path class="line {style}" d="M0 3H20"/></svg>{name}</span>'
        for style, name in keys
    )
    return f'<figcaption class="legend">{items}</figcaption>'


def _milliseconds(spread: Spread) -> str:
    return f"{short(1e3 * spread.median)} ({short(1e3 * spread.low)}-{short(1e3 * spread.high)})"


def _wider(values: Sequence[float]) -> tuple[float, float]:
    return min(values) * 0.85, max(values) * 1.15


STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6877; --line: #e3e7ec; --paper: #fff; --tint: #f6f8fa;
  --dense: #c2570c; --sparse: #0b63b0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #98a3b3; --line: #2b333f; --paper: #12161c;
  --tint: #1a2029; --dense: #f0985a; --sparse: #62b3f0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 940px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 28px; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 19px; margin: 48px 0 6px; }
h3 { font-size: 16px; margin: 28px 0 4px; }
p { margin: 0 0 14px; max-width: 74ch; }
header p, section > p { color: var(--soft); }
section > p strong { color: var(--ink); font-weight: 600; }
code { font: .92em ui-monospace, monospace; color: var(--ink); }
.small { font-size: 14px; }
.note { background: var(--tint); border-radius: 8px; padding: 8px 14px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 14px; margin-top: 22px; }
.cards div { background: var(--tint); border-radius: 10px; padding: 16px 18px; }
.cards b { display: block; font-size: 30px; line-height: 1.2; font-weight: 600; font-variant-numeric: tabular-nums; }
.cards span { color: var(--soft); font-size: 14px; line-height: 1.4; display: block; margin-top: 4px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 15px; margin: 10px 0 16px; }
th, td { padding: 6px 22px 6px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  white-space: nowrap; }
th { font-weight: 400; color: var(--soft); }
thead th { font-size: 13px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 24px;
  align-items: start; }
figure { margin: 0; }
figure > svg { width: 100%; height: auto; display: block; }
figcaption { font-size: 13px; color: var(--soft); line-height: 1.4; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; padding-left: 48px; }
.legend svg { width: 20px; height: 6px; margin-right: 6px; vertical-align: middle; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line.dense { stroke: var(--dense); } .line.sparse { stroke: var(--sparse); }
.line.faint { stroke-width: 1; opacity: .55; }
.line.guide { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 4 4; }
.line.even { stroke: var(--soft); stroke-width: 1; }
.dot.sparse { fill: var(--sparse); }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg text.value { fill: var(--sparse); font-weight: 600; }
.weights { display: flex; justify-content: space-between; align-items: flex-end; margin-top: 14px; }
.weights figcaption { margin-top: 6px; }
.frame { fill: var(--tint); stroke: var(--line); stroke-width: 4; }
.block.dense { fill: var(--dense); } .block.sparse { fill: var(--sparse); }
@media (max-width: 560px) { main { padding: 24px 16px; } table { font-size: 13px; } th, td { padding-right: 10px; } }
@media print { main { max-width: none; } section { break-inside: avoid; } }
"""
