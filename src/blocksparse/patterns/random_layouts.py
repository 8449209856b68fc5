"""Layouts whose blocks are drawn at random.

A layout depends on its arguments only: the same seed gives the same layout, and the global generators of torch and
numpy are not used. No pattern makes a dense mask.
"""

from __future__ import annotations

import itertools

import numpy as np

from ..checked import number
from ..layout import BlockLayout
from .sizes import Block, Shape, checked_sizes, generator


def random(shape: Shape, block_size: Block = 32, density: float = 0.1, seed: int = 0) -> BlockLayout:
    """Draw exactly round(density * all blocks) blocks uniformly, so that no row or column of blocks is empty.

    If a uniform draw leaves a row or column empty, a cover with one block for each row and column is drawn first, then
    the rest. With fewer blocks than the longer side has lines, each gets a line of that side to itself, and they use as
    many lines of the shorter side as possible. In all cases each block is equally likely.

    Args:
        shape, block_size: as for `dense`.
        density: stored / all blocks, 0 to 1.
        seed: an int, 0 or more.

    Raises:
        BlockSparseError: the shape is not a multiple of the block, or an argument is out of range.

    >>> import blocksparse as bs
    >>> bs.patterns.random((1024, 2048), block_size=32, density=0.1, seed=0)
    BlockLayout(shape=(1024, 2048), block_size=(32, 32), nnz=205, density=0.1001)
    """
    grid, block = checked_sizes(shape, block_size)
    rng = generator(seed)
    n = round(number("density", density, 0, 1) * grid[0] * grid[1])
    keys = _draw(rng, grid[0] * grid[1], n)
    if n < max(grid):
        rows, cols = np.divmod(keys, grid[1])
        rows, cols = spread_lines(rows, np.arange(grid[0]), rng), spread_lines(cols, np.arange(grid[1]), rng)
        keys = np.sort(rows * grid[1] + cols)
    elif not _covers(keys, grid):
        cover = _cover(rng, grid)
        # `rest` counts blocks outside the cover only. Add the number of the cover's blocks before each.
        rest = _draw(rng, grid[0] * grid[1] - cover.size, n - cover.size)
        rest += np.searchsorted(cover - np.arange(cover.size), rest, side="right")
        keys = np.sort(np.concatenate([cover, rest]))
    return BlockLayout._from_keys(keys, grid, block)


def constant_fan_in(shape: Shape, block_size: Block = 32, density: float = 0.1, seed: int = 0) -> BlockLayout:
    """Draw the same number of blocks in each row of blocks: all neurons have equally many inputs.

    Each row has round(density * columns) blocks, at least one, at random. Columns differ by one block at most.

    Args:
        shape, block_size: as for `dense`.
        density: stored / all blocks, 0 to 1.
        seed: an int, 0 or more.

    Raises:
        BlockSparseError: the shape is not a multiple of the block, or an argument is out of range.

    >>> import blocksparse as bs
    >>> layout = bs.patterns.constant_fan_in((1024, 2048), block_size=32, density=0.1)
    >>> layout.mask().sum(1).unique()
    tensor([6])

    Source: Lasby et al., Dynamic sparse training with structured sparsity (2024).
    """
    (rows, columns), block = checked_sizes(shape, block_size)
    rng = generator(seed)
    count = max(1, round(number("density", density, 0, 1) * columns))
    # Rows take the next columns of one shuffle after another.
    keys, queue = [], np.empty(0, dtype=np.int64)
    for row in rng.permutation(rows):
        if queue.size < count:
            again = rng.permutation(columns)
            later = np.isin(again, queue)  # a row has each column once
            queue = np.concatenate([queue, again[~later], again[later]])
        keys.append(row * columns + queue[:count])
        queue = queue[count:]
    return BlockLayout._from_keys(np.sort(np.concatenate(keys)), (rows, columns), block)


def random_of_features(
    used: tuple[np.ndarray, np.ndarray], block_size: Block = 32, density: float = 0.1, seed: int = 0
) -> BlockLayout:
    """Draw a random layout of a padded weight, whose `density` counts weights without the padding.

    Blocks with padding have fewer weights. Blocks of equal size are drawn with the same density, rounded up or down:
    the total comes near the density and leaves as few rows and columns of blocks empty as possible. If the layout of
    `random` is within 2 % of the density and leaves none empty, it is returned.

    Args:
        used: two bool arrays, True for outputs and inputs that are not padding; sizes are multiples of the block.
        block_size, density, seed: as for `random`.

    >>> import numpy as np
    >>> from blocksparse.patterns.random_layouts import random_of_features
    >>> used = np.arange(64) < 33
    >>> random_of_features((used, used), 32, density=0.25).mask().int()  # 65 of 1,089 weights
    tensor([[0, 1],
            [1, 1]], dtype=torch.int32)
    """
    grid, block = checked_sizes(tuple(side.size for side in used), block_size)
    sizes = [side.reshape(lines, -1).sum(1) for side, lines in zip(used, grid, strict=True)]
    target = number("density", density, 0, 1) * sizes[0].sum() * sizes[1].sum()
    if all(side.all() for side in sizes):
        plain = random((used[0].size, used[1].size), block, density, seed)
        real = np.sum(sizes[0][plain.row_of_block] * sizes[1][plain.col_of_block])
        if plain.nnz >= max(grid) and abs(real - target) <= 0.02 * target:
            return plain
    rng = generator(seed)
    # Groups of rows, and of columns, with the same number of features.
    kinds = [[np.flatnonzero(side == size) for size in np.unique(side[side > 0])] for side in sizes]
    pairs = list(itertools.product(*kinds))
    rows, cols = [], []
    for (i, j), count in zip(pairs, _counts(kinds, sizes, density), strict=True):
        drawn = np.divmod(_draw(rng, i.size * j.size, count), j.size)
        rows.append(i[drawn[0]])
        cols.append(j[drawn[1]])
    lines = np.concatenate(rows), np.concatenate(cols)
    # Blocks only move to lines of the same kind, which keeps the count of each pair.
    for side, kinds_of_side in zip(lines, kinds, strict=True):
        for kind in kinds_of_side:
            is_kind = np.isin(side, kind)
            side[is_kind] = spread_lines(side[is_kind], kind, rng)
    return BlockLayout.from_indices(*lines, grid, block)


def erdos_renyi(shape: Shape, block_size: Block = 32, epsilon: float = 4.0, seed: int = 0) -> BlockLayout:
    """Draw each block independently, with probability epsilon (n_out + n_in) / (n_out n_in), at most 1.

    n_out and n_in count blocks, so about epsilon (n_out + n_in) blocks are stored. Rows and columns can be empty. With
    block size 1 this is the initial layout of sparse evolutionary training (SET).

    Args:
        shape, block_size: as for `dense`.
        epsilon: 0 or more; a square layout has about 2 epsilon blocks per row.
        seed: an int, 0 or more.

    Raises:
        BlockSparseError: the shape is not a multiple of the block, or an argument is out of range.

    >>> import blocksparse as bs
    >>> layout = bs.patterns.erdos_renyi((784, 1000), block_size=1, epsilon=20, seed=0)
    >>> abs(layout.nnz - 20 * (784 + 1000)) < 1000
    True

    Source: Mocanu et al., Scalable training of artificial neural networks with adaptive sparse connectivity (2018).
    """
    grid, block = checked_sizes(shape, block_size)
    rng = generator(seed)
    total = grid[0] * grid[1]
    probability = min(1.0, number("epsilon", epsilon, 0) * (grid[0] + grid[1]) / total)
    # The number of independent blocks is binomial. Given the number, every choice is equally likely.
    return BlockLayout._from_keys(_draw(rng, total, int(rng.binomial(total, probability))), grid, block)


def _draw(rng: np.random.Generator, population: int, n: int) -> np.ndarray:
    """Draw n different ints below `population`, every choice equally likely; sorted."""
    if population > 64 * n or population > 2**30:
        fewer = min(n, population - n)
        keys = np.empty(0, dtype=np.int64)
        while keys.size < fewer:
            keys = np.concatenate([keys, rng.integers(population, size=fewer - keys.size)])
            keys.sort()  # np.unique takes many times as long on millions
            keys = keys[np.diff(keys, prepend=-1) > 0]
        return keys if fewer == n else np.delete(np.arange(population), keys)
    # A byte per int needs less time than sorting. The drawn ints or the others are marked, whichever are fewer.
    fewer = min(n, population - n)
    drawn = np.zeros(population, dtype=bool)
    while missing := fewer - np.count_nonzero(drawn):
        drawn[rng.integers(population, size=missing)] = True
    return np.flatnonzero(drawn if fewer == n else ~drawn)


def _covers(keys: np.ndarray, grid: tuple[int, int]) -> bool:
    """Return whether the blocks use every row and column of the grid."""
    rows, cols = np.divmod(keys, grid[1])
    return bool(np.bincount(rows, minlength=grid[0]).all() and np.bincount(cols, minlength=grid[1]).all())


def _cover(rng: np.random.Generator, grid: tuple[int, int]) -> np.ndarray:
    """Draw max(grid) blocks that use every row and column; return their sorted numbers."""
    long = max(grid)
    rows, cols = (rng.permutation(size)[np.arange(long) * size // long] for size in grid)
    return np.sort(rows * grid[1] + cols)


def spread_lines(
    lines: np.ndarray, used: np.ndarray, rng: np.random.Generator, taken: np.ndarray | None = None
) -> np.ndarray:
    """Move blocks that share a row (or column) to empty rows, at random; return the row of each block.

    As many blocks as possible move. Each keeps its column, where the new position is free because the row is empty.

    Args:
        lines: the row of each block that may move.
        used: the rows that should have a block, ascending.
        rng: decides which blocks move, and where.
        taken: the rows of blocks that do not move.
    """
    taken = lines[:0] if taken is None else taken
    has_block = np.zeros(max(each.max(initial=-1) for each in (lines, used, taken)) + 1, dtype=bool)
    has_block[lines] = has_block[taken] = True
    empty = used[~has_block[used]]
    if not empty.size:
        return lines
    shares = np.ones(lines.size, dtype=bool)
    first = np.unique(lines, return_index=True)
    shares[first[1][~np.isin(first[0], taken)]] = False
    moved = rng.permutation(np.flatnonzero(shares))[: empty.size]
    lines = lines.copy()
    lines[moved] = rng.permutation(empty)[: moved.size]
    return lines


def _counts(kinds: list[list[np.ndarray]], sizes: list[np.ndarray], density: float) -> tuple[int, ...]:
    """Choose how many blocks to draw of each pair of a kind of rows and a kind of columns; see `random_of_features`.

    Args:
        kinds: for rows and for columns, groups of lines with the same number of features.
        sizes: the number of features of each row and of each column, without padding.
        density: stored weights / all weights.
    """
    lines = [np.array([kind.size for kind in side]) for side in kinds]
    features = [np.array([size[kind[0]] for kind in side]) for side, size in zip(kinds, sizes, strict=True)]
    every, numbers = np.outer(*lines), np.outer(*features)
    target, nnz = density * np.sum(every * numbers), round(density * every.sum())
    floors = np.floor(density * every).astype(int)
    choices = [range(low, min(low + 1, most) + 1) for low, most in zip(floors.ravel(), every.ravel(), strict=True)]

    def error(counts: tuple[int, ...]) -> float:
        return float(abs(np.dot(counts, numbers.ravel()) - target))

    def empty(counts: tuple[int, ...], axis: int) -> int:
        return int((lines[axis] - np.reshape(counts, every.shape).sum(1 - axis)).clip(0).sum())

    # A side with no more lines than blocks must have no empty line.
    sides = [axis for axis in (0, 1) if nnz >= lines[axis].sum()]
    enough = [counts for counts in itertools.product(*choices) if not any(empty(counts, axis) for axis in sides)]
    near = max(0.05 * target, min(map(error, enough)))
    return min(
        (counts for counts in enough if error(counts) <= near),
        key=lambda counts: (empty(counts, 0) + empty(counts, 1), error(counts), sum(counts)),
    )
