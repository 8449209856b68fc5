"""Layouts by construction: the regular ones, random ones, and small-world graphs.

A `shape` is (out_features, in_features) and `features` the size of a square weight, both in features and multiples of
the block. A drawn layout depends on its arguments only: the same seed gives the same layout, and the global generators
of torch and numpy are left alone. No pattern makes a dense mask on its way (but `dense` stores every block).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from ..checked import checked_block, checked_grid, integer, is_int, number
from ..errors import BlockSparseError
from ..layout import BlockLayout

Block = int | tuple[int, int]
Shape = tuple[int, int]


# -- regular layouts ---------------------------------------------------------------------------------------------


def dense(shape: Shape, block_size: Block = 32) -> BlockLayout:
    """Every block.

    Args:
        shape: (out_features, in_features), multiples of the block.
        block_size: an int or (rows, columns), in features.

    Raises:
        BlockSparseError: a shape that is no multiple of the block.

    >>> import blocksparse as bs
    >>> bs.patterns.dense((64, 128), block_size=32)
    BlockLayout(shape=(64, 128), block_size=(32, 32), nnz=8, density=1)
    """
    grid, block = _grid(shape, block_size)
    return BlockLayout(np.ones(grid, dtype=bool), block)


def block_diagonal(shape: Shape, block_size: Block = 32) -> BlockLayout:
    """The diagonal, on a rectangular grid stretched along the longer side: `banded` with bandwidth 0.

    Every row and every column of blocks is used; those of the longer side once.

    Args:
        shape, block_size: as for `dense`.

    Raises:
        BlockSparseError: a shape that is no multiple of the block.

    >>> import blocksparse as bs
    >>> bs.patterns.block_diagonal((2, 5), block_size=1).mask().int()
    tensor([[1, 1, 1, 0, 0],
            [0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    return banded(shape, block_size, bandwidth=0)


def shuffled_block_diagonal(shape: Shape, block_size: Block = 32, groups: int | None = None) -> BlockLayout:
    """Squares of blocks on the diagonal with interleaved inputs: a channel shuffle, then groups.

    Group g of the outputs (neighbouring blocks) has the inputs g, g + groups, g + 2 groups, ... A few such layers on
    each other connect every output to every input, which plain groups never do; no channel moves in memory.

    Args:
        shape, block_size: as for `dense`.
        groups: how many squares, by which the blocks on either side divide; by default the smallest divisor of both
            whose square is at least the blocks of the shorter side, so that two layers connect all.

    Raises:
        BlockSparseError: a shape that is no multiple of the block, groups that do not divide the grid.

    >>> import blocksparse as bs
    >>> bs.patterns.shuffled_block_diagonal((4, 4), block_size=1, groups=2).mask().int()
    tensor([[1, 0, 1, 0],
            [1, 0, 1, 0],
            [0, 1, 0, 1],
            [0, 1, 0, 1]], dtype=torch.int32)

    Source: the block-sparse PixelCNN++ of Gray, Radford, Kingma (2017); Zhang et al., ShuffleNet (2017).
    """
    grid, block = _grid(shape, block_size)
    common = math.gcd(*grid)
    if groups is None:
        groups = next(g for g in range(1, common + 1) if common % g == 0 and (g * g >= min(grid) or g == common))
    groups = integer("groups", groups, 1)
    if common % groups:
        raise BlockSparseError.expected("groups", f"a divisor of both sides of the grid {grid}", groups)
    rows = np.repeat(np.arange(grid[0]), grid[1] // groups)
    cols = np.tile(np.arange(grid[1] // groups), grid[0]) * groups + rows // (grid[0] // groups)
    return BlockLayout.from_indices(rows, cols, grid, block)


def banded(shape: Shape, block_size: Block = 32, bandwidth: int = 1) -> BlockLayout:
    """The blocks (i, j) with |i - j| <= bandwidth.

    On a rectangular grid this is the band of the square grid of its shorter side, stretched along the longer one.

    Args:
        shape, block_size: as for `dense`.
        bandwidth: the diagonals on either side of the main one, in blocks (of the shorter side).

    Raises:
        BlockSparseError: a shape that is no multiple of the block, a negative bandwidth.

    >>> import blocksparse as bs
    >>> bs.patterns.banded((4, 4), block_size=1, bandwidth=1).mask().int()
    tensor([[1, 1, 0, 0],
            [1, 1, 1, 0],
            [0, 1, 1, 1],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    grid, block = _grid(shape, block_size)
    n = min(grid)
    width = min(integer("bandwidth", bandwidth, 0), n - 1)
    i, step = np.divmod(np.arange(n * (2 * width + 1)), 2 * width + 1)
    j = i + step - width
    inside = (j >= 0) & (j < n)
    return BlockLayout.from_indices(*_stretched(i[inside], j[inside], grid), grid, block)


def butterfly(shape: Shape | int, block_size: Block = 32) -> BlockLayout:
    """The flat block butterfly: block i meets itself and each i XOR 2^s, about log2(n) + 1 blocks per row.

    Where the number n of blocks is no power of two, the partners i XOR 2^s beyond it are left out: the leading part
    of the next larger butterfly. On a rectangular grid, this is the butterfly of its shorter side, stretched along
    the longer one.

    Args:
        shape: (out_features, in_features), or one int for both; multiples of the block.
        block_size: an int or (rows, columns), in features.

    Raises:
        BlockSparseError: a shape that is no multiple of the block.

    >>> import blocksparse as bs
    >>> bs.patterns.butterfly(4, block_size=1).mask().int()
    tensor([[1, 1, 1, 0],
            [1, 1, 0, 1],
            [1, 0, 1, 1],
            [0, 1, 1, 1]], dtype=torch.int32)

    Source: Dao et al., Pixelated Butterfly (2021).
    """
    grid, block = _grid((shape, shape) if is_int(shape) else shape, block_size)
    n = min(grid)
    strides = np.array([0] + [1 << s for s in range((n - 1).bit_length())])
    i = np.repeat(np.arange(n), len(strides))
    j = i ^ np.tile(strides, n)
    return BlockLayout.from_indices(*_stretched(i[j < n], j[j < n], grid), grid, block)


# -- random layouts ----------------------------------------------------------------------------------------------


def random(shape: Shape, block_size: Block = 32, density: float = 0.1, seed: int = 0) -> BlockLayout:
    """Exactly round(density * all blocks) blocks, drawn uniformly, with every row and every column used.

    Where the draw leaves a row or a column of blocks empty though the blocks suffice for all, one block for each
    row and column is drawn first and the rest uniformly. With fewer blocks than the longer side has, no two of them
    share a line of that side, and they use as many lines of the shorter one as they can. Either way each block is
    equally likely.

    Args:
        shape, block_size: as for `dense`.
        density: stored / all blocks, 0 to 1.
        seed: an int from 0 on.

    Raises:
        BlockSparseError: a shape that is no multiple of the block, a density outside of 0 to 1, no int as the seed.

    >>> import blocksparse as bs
    >>> bs.patterns.random((1024, 2048), block_size=32, density=0.1, seed=0)
    BlockLayout(shape=(1024, 2048), block_size=(32, 32), nnz=205, density=0.1001)
    """
    grid, block = _grid(shape, block_size)
    rng = _generator(seed)
    n = round(number("density", density, 0, 1) * grid[0] * grid[1])
    keys = _draw(rng, grid[0] * grid[1], n)
    if n < max(grid):
        lines = [spread(each, np.arange(size), rng) for each, size in zip(np.divmod(keys, grid[1]), grid, strict=True)]
        keys = np.sort(lines[0] * grid[1] + lines[1])
    elif not _covers(keys, grid):
        cover = _cover(rng, grid)
        # The k-th block outside of the cover: as many places further on as there are blocks of the cover before it.
        rest = _draw(rng, grid[0] * grid[1] - cover.size, n - cover.size)
        rest += np.searchsorted(cover - np.arange(cover.size), rest, side="right")
        keys = np.sort(np.concatenate([cover, rest]))
    return BlockLayout._from_keys(keys, grid, block)


def random_of_features(
    used: tuple[np.ndarray, np.ndarray], block_size: Block = 32, density: float = 0.1, seed: int = 0
) -> BlockLayout:
    """A random layout of a padded weight: `density` counts its real numbers, and the lines are those with some.

    Blocks at the edges have fewer real numbers than others. Blocks of equal sizes are drawn by the same density each,
    rounded up or down so that all together come near to it and leave as few rows and columns of blocks empty as they
    can, none where the blocks suffice. Where the layout of `random` does so too, and is as near as 2 % to the density,
    it is that one.

    Args:
        used: which outputs and which inputs are real and not padding: bool, multiples of the block each.
        block_size, density, seed: as for `random`.

    >>> import numpy as np
    >>> from blocksparse.patterns.weights import random_of_features
    >>> used = np.arange(64) < 33
    >>> random_of_features((used, used), 32, density=0.25).mask().int()    # 65 of 1,089 numbers: the others are 1,024
    tensor([[0, 1],
            [1, 1]], dtype=torch.int32)
    """
    grid, block = _grid(tuple(side.size for side in used), block_size)
    sizes = [side.reshape(lines, -1).sum(1) for side, lines in zip(used, grid, strict=True)]
    target = number("density", density, 0, 1) * sizes[0].sum() * sizes[1].sum()
    if all(side.all() for side in sizes):
        plain = random((used[0].size, used[1].size), block, density, seed)
        real = np.sum(sizes[0][plain.row_of_block] * sizes[1][plain.col_of_block])
        if plain.nnz >= max(grid) and abs(real - target) <= 0.02 * target:
            return plain
    rng = _generator(seed)
    # Rows, and columns, with the same number of features.
    kinds = [[np.flatnonzero(side == size) for size in np.unique(side[side > 0])] for side in sizes]
    pairs = list(itertools.product(*kinds))
    rows, cols = [], []
    for (i, j), count in zip(pairs, _counts(kinds, sizes, density), strict=True):
        drawn = np.divmod(_draw(rng, i.size * j.size, count), j.size)
        rows.append(i[drawn[0]])
        cols.append(j[drawn[1]])
    lines = np.concatenate(rows), np.concatenate(cols)
    # Blocks move to lines of their own kind, so that the count of each pair stays.
    for side, of_kind in zip(lines, kinds, strict=True):
        for kind in of_kind:
            mine = np.isin(side, kind)
            side[mine] = spread(side[mine], kind, rng)
    return BlockLayout.from_indices(*lines, grid, block)


def erdos_renyi(shape: Shape, block_size: Block = 32, epsilon: float = 4.0, seed: int = 0) -> BlockLayout:
    """Each block independently with probability epsilon (n_out + n_in) / (n_out n_in), at most 1.

    Here n_out and n_in count blocks, so that about epsilon (n_out + n_in) blocks are stored. Rows and columns may
    stay empty. With blocks of 1 this is the start of sparse evolutionary training (SET).

    Args:
        shape, block_size: as for `dense`.
        epsilon: from 0 on; a square layout has about 2 epsilon blocks per row.
        seed: an int from 0 on.

    Raises:
        BlockSparseError: a shape that is no multiple of the block, an epsilon that is negative or not finite, no int
            as the seed.

    >>> import blocksparse as bs
    >>> layout = bs.patterns.erdos_renyi((784, 1000), block_size=1, epsilon=20, seed=0)
    >>> abs(layout.nnz - 20 * (784 + 1000)) < 1000
    True

    Source: Mocanu et al., Scalable training of artificial neural networks with adaptive sparse connectivity (2018).
    """
    grid, block = _grid(shape, block_size)
    rng = _generator(seed)
    total = grid[0] * grid[1]
    probability = min(1.0, number("epsilon", epsilon, 0) * (grid[0] + grid[1]) / total)
    # Independent blocks: their number is binomial, and given the number every choice is equally likely.
    return BlockLayout._from_keys(_draw(rng, total, int(rng.binomial(total, probability))), grid, block)


# -- small-world graphs of a square layout -----------------------------------------------------------------------


def watts_strogatz(
    features: int, block_size: Block = 32, neighbors: int = 8, rewire: float = 0.2, seed: int = 0
) -> BlockLayout:
    """A Watts-Strogatz small world: a ring of blocks, each tied to its nearest, some ties rewired; and the diagonal.

    The graph is `networkx.watts_strogatz_graph`, so the layout is symmetric with blocks * (neighbors + 1) stored.

    Args:
        features: the size of the square weight, a multiple of the block.
        block_size: in features; blocks are square.
        neighbors: ties per block, half of them on either side; even, 2 or more, fewer than the blocks.
        rewire: the probability that a tie's far end moves to a random block.
        seed: an int from 0 on.

    Raises:
        BlockSparseError: sizes that do not fit, an odd or too large number of neighbors, a probability outside of
            0 to 1, no int as the seed.

    >>> import blocksparse as bs
    >>> bs.patterns.watts_strogatz(1024, block_size=32, neighbors=8, rewire=0.2, seed=0)
    BlockLayout(shape=(1024, 1024), block_size=(32, 32), nnz=288, density=0.2812)

    Source: Watts, Strogatz, Collective dynamics of small-world networks (1998).
    """
    import networkx

    n, block = _nodes(features, block_size)
    k = _even_neighbors(neighbors, n)
    graph = networkx.watts_strogatz_graph(n, k, number("rewire", rewire, 0, 1), seed=integer("seed", seed, 0))
    return _of_graph(*_edges(graph), n, block)


def watts_strogatz_2d(
    features: int, block_size: Block = 32, neighbors: int = 8, rewire: float = 0.2, seed: int = 0
) -> BlockLayout:
    """A Watts-Strogatz small world on a two-dimensional torus of blocks, symmetric, with the diagonal.

    The torus is as square as the number of blocks factors. As in the block-sparse LSTMs of 2017, a block starts ties
    to those at offsets (down, right), neither negative, up to the distance of the (neighbors / 2)-th nearest, all at
    that distance included, and is the far end of as many: with `neighbors=8` these are (0, 1), (1, 0), (1, 1), (0, 2)
    and (2, 0), ten ties per block. Each tie's far end moves to a random block with probability `rewire`; then the
    ties are made symmetric.

    Args:
        features, block_size: as for `watts_strogatz`.
        neighbors: about how many ties a block has (ties at equal distances are kept together, see above); even,
            2 or more, fewer than the blocks.
        rewire, seed: as for `watts_strogatz`.

    Raises:
        BlockSparseError: sizes that do not fit, an odd or too large number of neighbors, a probability outside of
            0 to 1, no int as the seed.

    >>> import blocksparse as bs
    >>> bs.patterns.watts_strogatz_2d(32 * 1024, block_size=32, neighbors=8, rewire=0, seed=0).nnz
    11264

    Source: Gray, Radford, Kingma, GPU Kernels for Block-Sparse Weights (2017).
    """
    n, block = _nodes(features, block_size)
    offsets = _quadrant(_even_neighbors(neighbors, n) // 2)
    probability = number("rewire", rewire, 0, 1)
    rng = _generator(seed)
    height, width = torus(n)
    y, x = np.divmod(np.arange(n), width)
    ends = [(y + down) % height * width + (x + right) % width for down, right in offsets]
    ties = np.unique(np.concatenate([np.arange(n) * n + end for end in ends]))
    ties = ties[ties // n != ties % n]  # on a small torus an offset may lead back to its start, or where another does
    moved = rng.random(ties.size) < probability
    ties, starts = ties[~moved], ties[moved] // n
    while starts.size:
        drawn = starts * n + rng.integers(n, size=starts.size)
        _, first = np.unique(drawn, return_index=True)
        fits = np.zeros(starts.size, dtype=bool)
        fits[first] = True
        fits &= (drawn % n != starts) & ~np.isin(drawn, ties)
        ties, starts = np.concatenate([ties, drawn[fits]]), starts[~fits]
    return _of_graph(*np.divmod(ties, n), n, block)


def barabasi_albert(features: int, block_size: Block = 32, m: int = 8, seed: int = 0) -> BlockLayout:
    """A Barabasi-Albert scale-free graph of blocks, the diagonal, and every block among the first m.

    `networkx.barabasi_albert_graph`, grown as in 2017 from m blocks without ties, which the dense corner joins: each
    further block ties itself to m earlier ones, in proportion to the ties these have. The layout is symmetric, with
    2 m (blocks - m) + blocks + m (m - 1) stored.

    Args:
        features, block_size: as for `watts_strogatz`.
        m: ties that each new block brings, 1 or more, fewer than the blocks.
        seed: an int from 0 on.

    Raises:
        BlockSparseError: sizes that do not fit, an m that is not from 1 to blocks - 1, no int as the seed.

    >>> import blocksparse as bs
    >>> bs.patterns.barabasi_albert(18432, block_size=32, m=8, seed=0)
    BlockLayout(shape=(18432, 18432), block_size=(32, 32), nnz=9720, density=0.0293)

    Source: Barabasi, Albert, Emergence of scaling in random networks (1999); Gray, Radford, Kingma, GPU Kernels for
    Block-Sparse Weights (2017).
    """
    import networkx

    n, block = _nodes(features, block_size)
    m = integer("m", m, 1, below=n, of="the number of blocks")
    seed = integer("seed", seed, 0)
    # Today's networkx starts from a star around block 0; in 2017 block m was the first to tie itself to the others.
    start = networkx.Graph((m, i) for i in range(m))
    i, j = _edges(networkx.barabasi_albert_graph(n, m, seed=seed, initial_graph=start))
    corner = np.divmod(np.arange(m * m), m)
    return _of_graph(np.concatenate([i, corner[0]]), np.concatenate([j, corner[1]]), n, block)


# -- pieces ------------------------------------------------------------------------------------------------------


def _stretched(i: np.ndarray, j: np.ndarray, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The blocks (i, j) of the square grid of the shorter side, stretched along the longer one."""
    if grid[0] > grid[1]:
        return _stretched(j, i, grid[::-1])[::-1]
    # Place s of the shorter side stands for the places l of the longer one with l * short // long == s.
    starts = -(-np.arange(grid[0] + 1) * grid[1] // grid[0])
    width = np.diff(starts)[j]
    within = np.arange(width.sum()) - np.repeat(np.cumsum(width) - width, width)
    return np.repeat(i, width), np.repeat(starts[j], width) + within


def _draw(rng: np.random.Generator, population: int, n: int) -> np.ndarray:
    """n different ints below `population`, every choice equally likely, sorted."""
    if population > 64 * n or population > 2**30:
        few = min(n, population - n)
        keys = np.empty(0, dtype=np.int64)
        while keys.size < few:
            keys = np.concatenate([keys, rng.integers(population, size=few - keys.size)])
            keys.sort()  # np.unique takes many times as long on millions
            keys = keys[np.diff(keys, prepend=-1) > 0]
        return keys if few == n else np.delete(np.arange(population), keys)
    # One byte for each of the population is less than sorting takes; of two halves, the smaller one is drawn.
    few = min(n, population - n)
    drawn = np.zeros(population, dtype=bool)
    while missing := few - np.count_nonzero(drawn):
        drawn[rng.integers(population, size=missing)] = True
    return np.flatnonzero(drawn if few == n else ~drawn)


def _covers(keys: np.ndarray, grid: tuple[int, int]) -> bool:
    rows, cols = np.divmod(keys, grid[1])
    return bool(np.bincount(rows, minlength=grid[0]).all() and np.bincount(cols, minlength=grid[1]).all())


def _cover(rng: np.random.Generator, grid: tuple[int, int]) -> np.ndarray:
    """Keys of max(grid) blocks at random that use every row and every column, sorted."""
    long = max(grid)
    rows, cols = (rng.permutation(size)[np.arange(long) * size // long] for size in grid)
    return np.sort(rows * grid[1] + cols)


def spread(
    lines: np.ndarray, used: np.ndarray, rng: np.random.Generator, taken: np.ndarray | None = None
) -> np.ndarray:
    """Moves blocks that share their row (or column) with another to rows without any; returns the row of each block.

    As many as possible move, drawn at random; a block keeps its column, in which its new place is free.

    Args:
        lines: the row of each block that may move.
        used: the rows that are to have a block each, rising.
        taken: the rows of blocks that stay.
    """
    taken = lines[:0] if taken is None else taken
    empty = np.setdiff1d(used, np.concatenate([lines, taken]))
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
    """The number of blocks of each pair of a kind of rows and a kind of columns: see `random_of_features`."""
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

    # The blocks suffice for a side where they are as many as its lines: then none of these stays empty.
    sides = [axis for axis in (0, 1) if nnz >= lines[axis].sum()]
    enough = [counts for counts in itertools.product(*choices) if not any(empty(counts, axis) for axis in sides)]
    near = max(0.05 * target, min(map(error, enough)))
    return min(
        (counts for counts in enough if error(counts) <= near),
        key=lambda counts: (empty(counts, 0) + empty(counts, 1), error(counts), sum(counts)),
    )


def torus(nodes: int) -> tuple[int, int]:
    """The rows and columns of the most square torus of this many blocks.

    >>> torus(10_000), torus(12)
    ((100, 100), (3, 4))
    """
    height = next(h for h in range(math.isqrt(nodes), 0, -1) if nodes % h == 0)
    return height, nodes // height


def _quadrant(count: int) -> list[tuple[int, int]]:
    """The offsets (down, right) >= 0 other than (0, 0), up to the distance of the `count`-th nearest of them."""
    side = math.isqrt(2 * count) + 2
    square = {(down, right): down**2 + right**2 for down in range(side) for right in range(side)}
    farthest = sorted(square.values())[count]
    return [offset for offset, distance in square.items() if 0 < distance <= farthest]


def _edges(graph: Any) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(list(graph.edges), dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _of_graph(i: np.ndarray, j: np.ndarray, n: int, block: tuple[int, int]) -> BlockLayout:
    """The symmetric layout of a graph's edges, with the diagonal."""
    nodes = np.arange(n)
    keys = np.unique(np.concatenate([i * n + j, j * n + i, nodes * n + nodes]))
    return BlockLayout.from_indices(*np.divmod(keys, n), (n, n), block)


# -- checks ------------------------------------------------------------------------------------------------------


def _grid(shape: Any, block_size: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    block = checked_block(block_size)
    if not isinstance(shape, tuple | list) or len(shape) != 2 or not all(is_int(size) and size > 0 for size in shape):
        raise BlockSparseError.expected("shape", "a pair of positive ints (out_features, in_features)", repr(shape))
    if shape[0] % block[0] or shape[1] % block[1]:
        raise BlockSparseError.expected("shape", f"multiples of the block {block}", tuple(shape))
    return checked_grid((int(shape[0]) // block[0], int(shape[1]) // block[1])), block


def _nodes(features: Any, block_size: Any) -> tuple[int, tuple[int, int]]:
    block = checked_block(block_size)
    if block[0] != block[1]:
        raise BlockSparseError.expected("block_size", "a square block, as the layout is a graph's", block)
    features = integer("features", features, 1)
    if features % block[0]:
        raise BlockSparseError.expected("features", f"a multiple of the block, {block[0]}", features)
    n = features // block[0]
    checked_grid((n, n))
    return n, block


def _even_neighbors(neighbors: Any, nodes: int) -> int:
    even = integer("neighbors", neighbors, 2, below=nodes, of="the number of blocks")
    if even % 2:
        raise BlockSparseError.expected("neighbors", "an even int", even)
    return even


def _generator(seed: Any) -> np.random.Generator:
    return np.random.default_rng(integer("seed", seed, 0))
