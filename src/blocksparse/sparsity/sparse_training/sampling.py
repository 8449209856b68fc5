"""Unused places of a layout, drawn at random without ever listing them."""

from __future__ import annotations

import numpy as np


def draw_unused(
    taken: np.ndarray,
    grid: tuple[int, int],
    count: int,
    generator: np.random.Generator,
    lines: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The rows and columns of `count` different places that are not taken, each choice equally likely, sorted.

    Taken are row * columns + column, rising; `lines` are the rows and columns that may be used, rising, None for all.
    """
    if lines is not None:
        rows, cols = np.divmod(taken, grid[1])
        among = np.isin(rows, lines[0]) & np.isin(cols, lines[1])
        small = (lines[0].size, lines[1].size)
        inner = np.searchsorted(lines[0], rows[among]) * small[1] + np.searchsorted(lines[1], cols[among])
        if small[0] * small[1] - inner.size >= count:
            rows, cols = draw_unused(inner, small, count, generator)
            return lines[0][rows], lines[1][cols]
    # The k-th unused place: as many places further on as there are taken ones before it.
    drawn = _different(generator, grid[0] * grid[1] - taken.size, count)
    drawn += np.searchsorted(taken - np.arange(taken.size), drawn, side="right")
    return np.divmod(drawn, grid[1])


def _different(generator: np.random.Generator, population: int, count: int) -> np.ndarray:
    """Draws `count` different ints below `population`, each choice equally likely, in rising order."""
    if 2 * count > population:
        return np.delete(np.arange(population), _different(generator, population, population - count))
    drawn = np.empty(0, dtype=np.int64)
    while drawn.size < count:
        drawn = np.sort(np.concatenate([drawn, generator.integers(population, size=count - drawn.size)]))
        drawn = drawn[np.flatnonzero(np.diff(drawn, prepend=-1))]  # np.unique hashes, which is ten times slower
    return drawn
