"""Positions and initial values of new blocks, chosen without listing the free positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...indices import Replacement, free_keys, kept_keys
from ...nn.module import BlockSparseModule
from ...patterns.random_layouts import spread_lines
from ...surgery.weight_handle import WeightHandle
from ..lines import Lines, coverable, lines_of
from ..selection import TieBreak, mark_smallest

Init = str | Callable[[BlockSparseModule, tuple[int, ...], torch.Generator], Tensor]
INITS = ("zeros", "he", "xavier")
DRAW_CHUNK = 1 << 20  # values drawn at a time


def check_init(init: Any) -> None:
    """Raise a BlockSparseError unless `init` names an initialization or is a function."""
    if not callable(init) and init not in INITS:
        raise BlockSparseError.expected("init", f"one of {', '.join(INITS)}, or a function", repr(init))


def initial_values(
    weight: WeightHandle,
    count: int,
    init: Init,
    generator: torch.Generator,
    places: Callable[[], tuple[np.ndarray, np.ndarray]],
    positions: np.ndarray,
) -> Tensor:
    """Draw values of new blocks, and return those of the blocks at some positions, on the CPU.

    A block gets the same values whichever process stores it, since all blocks are drawn in their order.

    Args:
        weight: the weight that gets the blocks.
        count: number of new blocks on all processes.
        init: how to draw them, see `SET`.
        generator: source of the random numbers.
        places: returns rows and columns of all new blocks. It is called only if the weight is padded; padding gets 0.
        positions: indices among the new blocks of those to return, rising.
    """
    shape = (count, *weight.local.shape[1:])
    if isinstance(init, str):
        bound = uniform_bound(init, *fans(weight))
        values = torch.empty(len(positions), *shape[1:], dtype=torch.float32, device="cpu")
        # All blocks may not fit into this process's memory.
        step = max(1, DRAW_CHUNK // math.prod(shape[1:]))
        for first in range(0, count, step):
            chunk = torch.empty(min(step, count - first), *shape[1:], dtype=torch.float32, device="cpu")
            chunk.uniform_(-bound, bound, generator=generator)
            begin, end = np.searchsorted(positions, [first, first + step])
            inside = positions[begin:end] - first
            values[begin:end] = chunk if inside.size == len(chunk) else chunk[torch.from_numpy(inside)]
    else:
        values = init(weight.module, shape, generator)
        if not isinstance(values, Tensor) or tuple(values.shape) != shape:
            got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise BlockSparseError.expected("init", f"a function that returns a tensor {list(shape)}", got)
        if not values.is_floating_point() or values.is_meta or not values.isfinite().all():
            expected = "a function that returns finite floating-point values with data"
            raise BlockSparseError.expected("init", expected, f"{values.dtype} on {values.device}, or inf or nan")
        values = values[torch.from_numpy(positions)]
    if (used := weight.used) is not None:
        height, width = weight.layout.block_shape
        rows, cols = (torch.from_numpy(np.array(lines, np.int64)[positions]) for lines in places())
        out, in_ = used
        kernel = [1] * (len(shape) - 3)
        values = values * out.view(-1, height)[rows].view(-1, height, 1, *kernel).to(values)
        values = values * in_.view(-1, width)[cols].view(-1, 1, width, *kernel).to(values)
    return values


def uniform_bound(init: str, n_out: int, n_in: int) -> float:
    """Return the bound of the uniform distribution: "he" sqrt(6 / n_in), "xavier" sqrt(6 / (n_in + n_out)), "zeros" 0.

    `n_out` and `n_in` are those of the dense layer.
    """
    return {"he": math.sqrt(6 / n_in), "xavier": math.sqrt(6 / (n_in + n_out)), "zeros": 0.0}[init]


def fans(weight: WeightHandle) -> tuple[int, int]:
    """Return (n_out, n_in) of the dense layer: its features without padding, times the taps of a kernel."""
    taps, used = math.prod(weight.local.shape[3:]), weight.used
    n_out, n_in = weight.layout.shape if used is None else (int(side.sum()) for side in used)
    return n_out * taps, n_in * taps


def draw_places(
    weight: WeightHandle,
    drop: np.ndarray,
    generator: np.random.Generator,
    keep_lines: bool,
    constant_fan_in: bool = False,
    scores: np.ndarray | None = None,
) -> Replacement:
    """Draw as many new blocks as are dropped.

    Args:
        weight: the weight.
        drop: a mask `[nnz]` of its blocks to drop, whose places count as free.
        generator: source of the random numbers.
        keep_lines: whether places in empty lines come first.
        constant_fan_in: whether each row gets as many blocks as it loses.
        scores: the places' probabilities up to a factor, `[rows, columns]`, 0 for places that are taken. By default
            each free place is equally likely.
    """
    layout, lines = weight.layout, lines_of(weight)
    taken, count = kept_keys(layout, drop), int(np.count_nonzero(drop))
    if constant_fan_in:
        rows = layout.row_of_block[drop]
        if scores is None:
            return Replacement(drop, _draw_in_rows(taken, rows, layout.grid, lines[1], generator))
        return Replacement(drop, _draw_in_rows_by_score(scores, rows, generator))
    if scores is None:
        drawn = draw_unused(taken, layout.grid, count, generator, lines)
    else:
        drawn = draw_by_score(scores.reshape(-1), count, generator)
    if keep_lines:
        drawn = move_to_empty_lines(taken, drawn, layout.grid[1], coverable(lines, layout.nnz), generator)
    return Replacement(drop, drawn)


def _draw_in_rows(
    taken: np.ndarray, rows: np.ndarray, grid: tuple[int, int], columns: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Draw a free place in each of these rows, in several if a row is repeated; see `draw_unused`.

    Places outside of `columns`, which are padding, are drawn only in rows with too few others.
    """
    counts = np.bincount(rows, minlength=grid[0])
    if columns.size < grid[1]:
        lines, cols = np.divmod(taken, grid[1])
        inside = np.isin(cols, columns)
        fits = (counts + np.bincount(lines[inside], minlength=grid[0]) <= columns.size)[rows]
        inner = lines[inside] * columns.size + np.searchsorted(columns, cols[inside])
        every = np.arange(grid[1])
        places = _draw_in_rows(inner, rows[fits], (grid[0], columns.size), every[: columns.size], generator)
        lines, cols = np.divmod(places, columns.size)
        others = _draw_in_rows(taken, rows[~fits], grid, every, generator)
        return np.sort(np.concatenate([lines * grid[1] + columns[cols], others]))
    # Free places have numbers; those of a row begin after the free places of the rows before.
    starts = np.arange(grid[0] + 1) * grid[1]
    starts -= np.searchsorted(taken, starts)
    return free_keys(taken, _draw_distinct_in_ranges(generator, starts, counts))


def _draw_in_rows_by_score(scores: np.ndarray, rows: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Draw a place in each of these rows, in several if a row is repeated; see `draw_by_score`."""
    height, width = scores.shape
    order = _keys_of_draws(scores, generator).argsort(1)
    lines, ranks = np.nonzero(np.arange(width) < np.bincount(rows, minlength=height)[:, None])
    return np.sort(lines * width + order[lines, ranks])


def draw_by_score(scores: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Draw different positions one after another, each with a probability proportional to its score; sorted.

    A position of score 0 is never drawn unless no other is left.
    """
    positions, keys, bound = np.empty(0, dtype=np.int64), np.empty(0), np.inf
    for first in range(0, scores.size, DRAW_CHUNK):
        chunk = _keys_of_draws(scores[first : first + DRAW_CHUNK], generator)
        near = np.flatnonzero(chunk <= bound)
        positions, keys = np.concatenate([positions, first + near]), np.concatenate([keys, chunk[near]])
        if keys.size > 2 * count or first + DRAW_CHUNK >= scores.size:
            marks = mark_smallest(keys, count)
            positions, keys = positions[marks], keys[marks]
            bound = keys.max(initial=0)
    return positions


def _keys_of_draws(scores: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return random keys, float64, whose order is that of draws one after another with these probabilities.

    Source: Efraimidis, Spirakis, Weighted random sampling with a reservoir (2006).
    """
    keys = generator.standard_exponential(scores.shape)
    with np.errstate(divide="ignore"):
        keys /= scores
    return keys


def draw_unused(
    taken: np.ndarray,
    grid: tuple[int, int],
    count: int,
    generator: np.random.Generator,
    lines: Lines | None = None,
) -> np.ndarray:
    """Draw `count` different free places of a grid, each choice equally likely; return them rising.

    Args:
        taken: row * columns + column of the places that are taken, rising.
        grid: (rows, columns).
        count: number of places to draw.
        generator: source of the random numbers.
        lines: rows and columns to draw from, while they have enough free places; None (default) for all.
    """
    if lines is not None and (lines[0].size, lines[1].size) != grid:
        rows, cols = np.divmod(taken, grid[1])
        inside = np.isin(rows, lines[0]) & np.isin(cols, lines[1])
        small_grid = (lines[0].size, lines[1].size)
        inner = np.searchsorted(lines[0], rows[inside]) * small_grid[1] + np.searchsorted(lines[1], cols[inside])
        if small_grid[0] * small_grid[1] - inner.size >= count:
            rows, cols = np.divmod(draw_unused(inner, small_grid, count, generator), small_grid[1])
            return lines[0][rows] * grid[1] + lines[1][cols]
    return free_keys(taken, _draw_distinct(generator, grid[0] * grid[1] - taken.size, count))


def move_to_empty_lines(
    taken: np.ndarray, drawn: np.ndarray, columns: int, lines: Lines, generator: np.random.Generator
) -> np.ndarray:
    """Move some of the drawn places so that as few of these lines as possible have no block; return all, rising.

    Args:
        taken: row * columns + column of the blocks that stay.
        drawn: the same of the drawn places, rising; returned as it is if none moves.
        columns: columns of the grid.
        lines: rows and columns that should have a block.
        generator: source of the random numbers.
    """
    if _cover_lines(drawn, columns, lines):
        return drawn
    drawn_lines = np.divmod(drawn, columns)
    rows, cols = (
        spread_lines(places, side, generator, used)
        for places, side, used in zip(drawn_lines, lines, np.divmod(taken, columns), strict=True)
    )
    if rows is drawn_lines[0] and cols is drawn_lines[1]:  # nothing has moved
        return drawn
    return np.sort(rows * columns + cols)


def _cover_lines(places: np.ndarray, columns: int, lines: Lines) -> bool:
    """Return whether each of these lines has one of the places, which are rising; look at few if they are many."""
    first, last = (np.searchsorted(places, (lines[0] + after) * columns) for after in (0, 1))
    if (first == last).any():
        return False
    is_empty = np.zeros(columns, dtype=bool)
    is_empty[lines[1]] = True
    for start in range(0, places.size, DRAW_CHUNK):
        if not is_empty.any():
            break
        is_empty[places[start : start + DRAW_CHUNK] % columns] = False
    return not is_empty.any()


def best_places(
    places: np.ndarray, norms: np.ndarray, count: int, columns: int, empty: Lines, tie_break: TieBreak
) -> np.ndarray:
    """Return the `count` places with the largest norms, starting with the best place of each empty line.

    If `count` is less than the number of best places, random pairs of empty rows and columns share a place.

    Args:
        places: row * columns + column of free places, which include those with the `count` largest norms and the best
            one of each empty line.
        norms: norm of the gradient at each place.
        count: number of places to return.
        columns: columns of the grid.
        empty: lines without any block.
        tie_break: order of places with equal norms, and of lines that are paired.
    """
    best = np.lexsort((tie_break(places), -norms))
    both = zip(empty, np.divmod(places[best], columns), strict=True)
    first = np.unique(np.concatenate([_first_occurrences(side, lines) for side, lines in both]))
    if first.size > count:
        return _cover_empty_lines(places, norms, count, columns, empty, tie_break)
    rest = np.delete(np.arange(best.size), first)[: count - first.size]
    return places[best[np.concatenate([first, rest])]]


def _cover_empty_lines(
    places: np.ndarray, norms: np.ndarray, count: int, columns: int, empty: Lines, tie_break: TieBreak
) -> np.ndarray:
    """Return `count` places that cover all empty lines although each line's own best place would be too many.

    A random place at the crossing of an empty row and an empty column covers two lines at once. As few such pairs
    as necessary are made; the other places are the best by norm. Arguments are those of `best_places`. If `count`
    cannot cover all lines, some stay empty.
    """
    rows, cols = (side[tie_break(side + offset).argsort()] for side, offset in zip(empty, (0, 1 << 32), strict=True))
    n = min(rows.size, cols.size, rows.size + cols.size - count)
    pairs = (rows[:n] * columns + cols[:n])[:count]
    free = ~np.isin(places, pairs)
    missing, others = count - pairs.size, (rows[n:], cols[n:])
    if not n:  # there are fewer blocks than empty lines
        others = rows[:missing], cols[: max(0, missing - rows.size)]
    return np.concatenate([pairs, best_places(places[free], norms[free], missing, columns, others, tie_break)])


def _first_occurrences(targets: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Return the index in `lines` where each target occurs first."""
    unique, first = np.unique(lines, return_index=True)
    return first[np.isin(unique, targets)]


def _draw_distinct(generator: np.random.Generator, population: int, count: int) -> np.ndarray:
    """Draw `count` different ints below `population`, sorted, each choice equally likely."""
    if 2 * count > population:
        return np.delete(np.arange(population), _draw_distinct(generator, population, population - count))
    if not count:
        return np.empty(0, dtype=np.int64)
    drawn = _draw_sorted(generator, population, count)
    while drawn.size < count:
        more = _draw_sorted(generator, population, count - drawn.size)
        at = np.searchsorted(drawn, more)
        is_new = drawn[np.minimum(at, drawn.size - 1)] != more
        drawn = np.insert(drawn, at[is_new], more[is_new])
    return drawn


def _draw_distinct_in_ranges(generator: np.random.Generator, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Draw different ints from adjacent ranges, each choice equally likely; return all, sorted.

    Args:
        generator: source of the random numbers.
        starts: rising, int64 `[ranges + 1]`; a range ends where the next one starts.
        counts: how many to draw from each range.
    """
    sizes = np.diff(starts)
    by_rest = 2 * counts > sizes  # it takes fewer draws to choose those that are left out
    missing = targets = np.where(by_rest, sizes - counts, counts)
    drawn = np.empty(0, dtype=np.int64)
    while missing.any():
        more = generator.integers(np.repeat(starts[:-1], missing), np.repeat(starts[1:], missing))
        drawn = np.sort(np.concatenate([drawn, more]))
        drawn = drawn[np.diff(drawn, prepend=-1) != 0]
        missing = targets - np.diff(np.searchsorted(drawn, starts))
    if not by_rest.any():
        return drawn
    ranges = np.flatnonzero(by_rest)
    ends = sizes[ranges].cumsum()
    whole = np.repeat(starts[ranges + 1] - ends, sizes[ranges]) + np.arange(ends[-1])
    # A number that occurs once is drawn from a range of few draws, or left of a whole range.
    both = np.sort(np.concatenate([drawn, whole]))
    differs = np.diff(both, prepend=-1, append=-1) != 0
    return both[differs[1:] & differs[:-1]]


def _draw_sorted(generator: np.random.Generator, population: int, count: int) -> np.ndarray:
    """Draw `count` ints below `population`; return the different ones, sorted.

    Gaps between sorted uniform numbers are exponential numbers, divided by their sum: this takes less time than a sort.
    """
    ends = np.cumsum(generator.standard_exponential(count + 1))
    numbers = (ends[:-1] * (population / ends[-1])).astype(np.int64)
    np.minimum(numbers, population - 1, out=numbers)  # rounding
    differs = numbers[1:] != numbers[:-1]
    return numbers if differs.all() else numbers[np.concatenate([[0], np.flatnonzero(differs) + 1])]
