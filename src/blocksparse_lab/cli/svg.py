"""Charts and layouts as SVG text, styled by the page they are put in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from blocksparse.layout import BlockLayout

# Where the axes are in a chart, in its own units.
WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 10, 44


@dataclass(frozen=True)
class Line:
    """One line of a chart: its points, the CSS classes that style it, and labels to write above points."""

    x: Sequence[float]
    y: Sequence[float]
    style: str
    labels: Sequence[str] = ()


def chart(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
) -> str:
    """Lines on linear or logarithmic axes; what lies outside of the ranges is cut off.

    >>> svg = chart([Line([1, 2], [3, 4], "dense")], "steps", "bits")
    >>> svg.startswith("<svg"), svg.endswith("</svg>")
    (True, True)
    """
    x_range = x_range or _range([x for line in lines for x in line.x])
    y_range = y_range or _range([y for line in lines for y in line.y])

    def place(value: float, limits: tuple[float, float], start: float, end: float) -> float:
        low, high = limits
        if log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return start + (end - start) * (value - low) / (high - low)

    def at(x: float, y: float) -> tuple[float, float]:
        return place(x, x_range, LEFT, WIDTH - RIGHT), place(y, y_range, HEIGHT - BOTTOM, TOP)

    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)} against {escape(x_label)}">']
    for tick in ticks(*y_range, log=log):
        y = at(x_range[0], tick)[1]
        out.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        out.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(*x_range, log=log):
        x = at(tick, y_range[0])[0]
        out.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{tick:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    out.append(f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(
        f'<text class="label" transform="translate(11 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>'
    )
    # A frame of its own, so that what leaves it is cut off.
    out.append(f'<svg x="{LEFT}" y="0" width="{WIDTH - LEFT}" height="{HEIGHT - BOTTOM}" ')
    out.append(f'viewBox="{LEFT} 0 {WIDTH - LEFT} {HEIGHT - BOTTOM}">')
    for line in lines:
        points = [at(x, y) for x, y in zip(line.x, line.y, strict=True)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        out.append(f'<path class="line {line.style}" d="M{path}"/>')
        for (x, y), label in zip(points, line.labels, strict=False):
            out.append(f'<circle class="dot {line.style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
            out.append(f'<text class="value" x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{escape(label)}</text>')
    return "".join([*out, "</svg></svg>"])


def ticks(low: float, high: float, *, log: bool = False, about: int = 5) -> list[float]:
    """Round numbers between two: 1, 2 and 5 of each decade on a logarithmic axis, equal steps on a linear one.

    >>> ticks(0, 1600), ticks(0.02, 1.0, log=True)
    ([0.0, 500.0, 1000.0, 1500.0], [0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
    """
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        values = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
        return [value for value in values if low * 0.999 <= value <= high * 1.001]
    unit = 10.0 ** math.floor(math.log10((high - low) / about))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m * about >= (high - low) * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def weight(shape: tuple[int, int], layout: BlockLayout | None, style: str) -> str:
    """A weight matrix to scale, a unit per feature: the blocks of its layout, or all of it where there is none."""
    rows, columns = shape
    if layout is None:
        path = f"M0 0h{columns}v{rows}h-{columns}z"
    else:
        height, width = layout.block_shape
        places = zip(layout.row_of_block.tolist(), layout.col_of_block.tolist(), strict=True)
        path = "".join(f"M{j * width} {i * height}h{width}v{height}h-{width}z" for i, j in places)
    return (
        f'<svg viewBox="0 0 {columns} {rows}" role="img" aria-label="weight of {rows} x {columns}">'
        f'<path class="frame" d="M0 0h{columns}v{rows}h-{columns}z"/><path class="block {style}" d="{path}"/></svg>'
    )


def bars(edges: Sequence[float], heights: Sequence[float], x_label: str, y_label: str, style: str) -> str:
    """A histogram, with a bar between each two edges; each says what it counts where a pointer rests on it.

    >>> bars([0.5, 1.5, 2.5], [3, 4], "blocks", "rows", "sparse").count("<rect")
    2
    """
    low, high, top = edges[0], edges[-1], max(*heights, 1)
    wide, tall = WIDTH - RIGHT - LEFT, HEIGHT - BOTTOM - TOP
    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)} by {escape(x_label)}">']
    for tick in ticks(0, top):
        y = HEIGHT - BOTTOM - tall * tick / top
        out.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        out.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(low, high):
        x = LEFT + wide * (tick - low) / (high - low)
        if tick == round(tick):
            out.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{tick:g}</text>'
            )
    for left, right, height in zip(edges, edges[1:], heights, strict=False):
        x, width = LEFT + wide * (left - low) / (high - low), wide * (right - left) / (high - low)
        long = tall * height / top
        of = f"{left + 0.5:g}" if right - left == 1 else f"{left + 0.5:g} to {right - 0.5:g}"
        place = f'x="{x + 0.5:.1f}" y="{HEIGHT - BOTTOM - long:.1f}" width="{max(width - 1, 0.5):.1f}"'
        out.append(f'<rect class="block {style}" {place} height="{long:.1f}">')
        out.append(f"<title>{of}: {height:g} {escape(y_label)}</title></rect>")
    out.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    middle = LEFT + wide / 2
    out.append(f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(
        f'<text class="label" transform="translate(11 {TOP + tall / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text></svg>"
    )
    return "".join(out)
