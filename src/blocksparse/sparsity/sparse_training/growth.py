"""Where new connections grow, drawn without ever listing the unused places, and their first values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...nn.module import BlockSparseModule
from ...patterns.weights import spread
from ...surgery.weight_handle import WeightHandle
from ..lines import Lines
from ..selection import TieBreak

Init = str | Callable[[BlockSparseModule, tuple[int, ...], torch.Generator], Tensor]
INITS = ("zeros", "he", "xavier")
TILE = 1 << 20  # numbers drawn at a time


def check_init(init: Any) -> None:
    if not callable(init) and init not in INITS:
        raise BlockSparseError.expected("init", f"one of {', '.join(INITS)}, or a function", repr(init))


def first_values(
    stored: WeightHandle,
    count: int,
    init: Init,
    generator: torch.Generator,
    places: Callable[[], tuple[np.ndarray, np.ndarray]],
    here: np.ndarray,
) -> Tensor:
    """Draws values for `count` new blocks of a weight, and returns those at positions `here`, rising (CPU).

    They are drawn in their order, so that each block gets the same numbers wherever it is. `places` gives the rows and
    columns of all; it is asked for only where there is padding, which gets zeros.
    """
    shape = (count, *stored.local.shape[1:])
    if isinstance(init, str):
        most = bound(init, *fans(stored))
        drawn = torch.empty(len(here), *shape[1:], dtype=torch.float32, device="cpu")
        # Some at a time, as not all may fit into this process's memory.
        step = max(1, TILE // math.prod(shape[1:]))
        for first in range(0, count, step):
            tile = torch.empty(min(step, count - first), *shape[1:], dtype=torch.float32, device="cpu")
            tile.uniform_(-most, most, generator=generator)
            begin, end = np.searchsorted(here, [first, first + step])
            drawn[begin:end] = tile[torch.from_numpy(here[begin:end] - first)]
    else:
        drawn = init(stored.module, shape, generator)
        if not isinstance(drawn, Tensor) or tuple(drawn.shape) != shape:
            got = list(drawn.shape) if isinstance(drawn, Tensor) else type(drawn).__name__
            raise BlockSparseError.expected("what init returns", f"a tensor {list(shape)}", got)
        drawn = drawn[torch.from_numpy(here)]
    if (used := stored.used) is not None:
        height, width = stored.layout.block_shape
        rows, cols = (torch.from_numpy(np.array(lines, np.int64)[here]) for lines in places())
        out, in_ = used
        kernel = [1] * (len(shape) - 3)
        drawn = drawn * out.view(-1, height)[rows].view(-1, height, 1, *kernel).to(drawn)
        drawn = drawn * in_.view(-1, width)[cols].view(-1, 1, width, *kernel).to(drawn)
    return drawn


def bound(init: str, n_out: int, n_in: int) -> float:
    """Of uniform values: "he" sqrt(6 / n_in), "xavier" sqrt(6 / (n_in + n_out)), of the dense layer; "zeros" 0."""
    return {"he": math.sqrt(6 / n_in), "xavier": math.sqrt(6 / (n_in + n_out)), "zeros": 0.0}[init]


def fans(stored: WeightHandle) -> tuple[int, int]:
    """(n_out, n_in) of the dense layer: its real features, each with all taps of a kernel."""
    taps, used = math.prod(stored.local.shape[3:]), stored.used
    n_out, n_in = stored.layout.shape if used is None else (int(side.sum()) for side in used)
    return n_out * taps, n_in * taps


def draw_unused(
    taken: np.ndarray,
    grid: tuple[int, int],
    count: int,
    generator: np.random.Generator,
    lines: Lines | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The rows and columns of `count` different places that are not taken, each choice equally likely, sorted.

    Taken are row * columns + column, rising; `lines` are the rows and columns that may be used, rising, None for all.
    """
    if lines is not None and (lines[0].size, lines[1].size) != grid:
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


def refilled(
    kept: np.ndarray,
    drawn: tuple[np.ndarray, np.ndarray],
    columns: int,
    lines: Lines,
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """The places drawn, sorted, some of them moved so that as few of these lines as possible have no block.

    Kept are the blocks row * columns + column that stay; with them the lines that have a block already are known.
    """
    rows, cols = (
        spread(mine, side, generator, taken)
        for mine, side, taken in zip(drawn, lines, np.divmod(kept, columns), strict=True)
    )
    places = np.sort(rows * columns + cols)
    return np.divmod(places, columns)


def grown(places: np.ndarray, norms: np.ndarray, count: int, columns: int, lines: Lines, order: TieBreak) -> np.ndarray:
    """The `count` places with the largest norms, but first the best one in each of some lines without any block.

    Where there are too many of these, rows are paired with columns at random, as many as needed.

    Args:
        places: row * columns + column of free places; all of those with the `count` largest norms, and the best one in
            each of the lines.
        order: of places with equal norms, and of lines that are paired.
    """
    best = np.lexsort((order(places), -norms))
    both = zip(lines, np.divmod(places[best], columns), strict=True)
    first = np.unique(np.concatenate([_first_in(side, mine) for side, mine in both]))
    if first.size > count:
        return _paired(places, norms, count, columns, lines, order)
    rest = np.delete(np.arange(best.size), first)[: count - first.size]
    return places[best[np.concatenate([first, rest])]]


def _paired(
    places: np.ndarray, norms: np.ndarray, count: int, columns: int, lines: Lines, order: TieBreak
) -> np.ndarray:
    rows, cols = (side[order(side + offset).argsort()] for side, offset in zip(lines, (0, 1 << 32), strict=True))
    n = min(rows.size, cols.size, rows.size + cols.size - count)
    pairs = (rows[:n] * columns + cols[:n])[:count]
    free = ~np.isin(places, pairs)
    left, others = count - pairs.size, (rows[n:], cols[n:])
    if not n:  # the blocks do not suffice for these lines
        others = rows[:left], cols[: max(0, left - rows.size)]
    return np.concatenate([pairs, grown(places[free], norms[free], left, columns, others, order)])


def _first_in(wanted: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Where each of the lines that are wanted comes first."""
    found, first = np.unique(lines, return_index=True)
    return first[np.isin(found, wanted)]


def _different(generator: np.random.Generator, population: int, count: int) -> np.ndarray:
    """Draws `count` different ints below `population`, each choice equally likely, in rising order."""
    if 2 * count > population:
        return np.delete(np.arange(population), _different(generator, population, population - count))
    drawn = np.empty(0, dtype=np.int64)
    while drawn.size < count:
        drawn = np.sort(np.concatenate([drawn, generator.integers(population, size=count - drawn.size)]))
        drawn = drawn[np.flatnonzero(np.diff(drawn, prepend=-1))]  # np.unique hashes, which is ten times slower
    return drawn
