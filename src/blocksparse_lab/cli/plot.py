"""Curves in a terminal, in braille dots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from .svg import ticks

# The dots of a braille character by row and column, as bits of its code point.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])


@dataclass(frozen=True)
class Curve:
    """Points, and the rich style to draw them in."""

    x: Sequence[float]
    y: Sequence[float]
    style: str


def plot(
    curves: Sequence[Curve],
    width: int,
    height: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> Text:
    """Curves between axes; where two meet, the later one gives the colour.

    Args:
        curves: what to draw.
        width, height: of the whole in characters, the numbers at the axes included.
        x_range, y_range: points outside of them are left out.

    >>> print(plot([Curve([0, 1, 2], [0, 1, 2], "blue")], 13, 4, (0, 2), (0, 2)))
    2 │    ⡠⠊
      │  ⡠⠊
    0 │⡠⠊
       0    2
    """
    columns, rows = width - 7, height - 1
    cells = np.zeros((rows, columns), dtype=int)
    owner = np.full((rows, columns), -1)
    (x_low, x_high), (y_low, y_high) = x_range, y_range
    for nth, curve in enumerate(curves):
        if not len(curve.x):
            continue
        at = np.arange(2 * columns)
        x = np.interp(at, (0, 2 * columns - 1), x_range)
        known = (x >= curve.x[0]) & (x <= curve.x[-1])
        y = np.interp(x, curve.x, curve.y)
        dots = np.round((y_high - y) / (y_high - y_low) * (4 * rows - 1)).astype(int)
        before = dots[0]
        for column, dot, drawn in zip(at, dots, known, strict=True):
            if not drawn:
                before = dot
                continue
            # A steep curve is drawn from where the last column ended, without a gap.
            step = 1 if dot > before else -1
            for level in range(before + step if dot != before else dot, dot + step, step):
                if 0 <= level < 4 * rows:
                    cells[level // 4, column // 2] |= _DOTS[level % 4, column % 2]
                    owner[level // 4, column // 2] = nth
            before = dot
    levels = ticks(*y_range, about=max(1, rows // 2))
    marks = {round((y_high - level) / (y_high - y_low) * (4 * rows - 1)) // 4: f"{level:g}" for level in levels}
    out = Text(no_wrap=True)
    for row in range(rows):
        out.append(f"{marks.get(row, ''):>5} ", "dim").append("│", "dim")
        for cell, nth in zip(cells[row], owner[row], strict=True):
            out.append(chr(0x2800 + cell) if cell else " ", curves[nth].style if cell else None)
        out.append("\n")
    left, right = f"{x_low:g}", f"{x_high:g}"
    return out.append(f"{'':7}{left}{right:>{columns - len(left)}}", "dim")
