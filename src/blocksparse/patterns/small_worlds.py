"""Layouts of small-world and scale-free graphs, whose nodes are the blocks of a square weight.

A layout depends on its arguments only, as for the random layouts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..checked import integer, number
from ..errors import BlockSparseError
from ..layout import BlockLayout
from .sizes import Block, checked_square, generator


def watts_strogatz(
    features: int, block_size: Block = 32, neighbors: int = 8, rewire: float = 0.2, seed: int = 0
) -> BlockLayout:
    """Draw a Watts-Strogatz small world: a ring of blocks with edges to the nearest ones, some of them rewired.

    The graph is `networkx.watts_strogatz_graph`; the diagonal is added. The layout is symmetric and stores
    blocks * (neighbors + 1) blocks.

    Args:
        features: the size of the square weight, a multiple of the block.
        block_size: in features; blocks are square.
        neighbors: edges per block, half of them to each side; even, 2 or more, below the number of blocks.
        rewire: the probability that the far end of an edge moves to a random block.
        seed: an int, 0 or more.

    Raises:
        BlockSparseError: `features` is not a multiple of the block, or an argument is out of range.

    >>> import blocksparse as bs
    >>> bs.patterns.watts_strogatz(1024, block_size=32, neighbors=8, rewire=0.2, seed=0)
    BlockLayout(shape=(1024, 1024), block_size=(32, 32), nnz=288, density=0.2812)

    Source: Watts, Strogatz, Collective dynamics of small-world networks (1998).
    """
    import networkx

    n, block = checked_square(features, block_size)
    k = _even_neighbors(neighbors, n)
    graph = networkx.watts_strogatz_graph(n, k, number("rewire", rewire, 0, 1), seed=integer("seed", seed, 0))
    return _layout_of_graph(*_edges(graph), n, block)


def watts_strogatz_2d(
    features: int, block_size: Block = 32, neighbors: int = 8, rewire: float = 0.2, seed: int = 0
) -> BlockLayout:
    """Draw a Watts-Strogatz small world on a two-dimensional torus of blocks; symmetric, with the diagonal.

    The torus is as square as the number of blocks allows. As in the block-sparse LSTMs of 2017, edges lead from each
    block down and right, to the (neighbors / 2) nearest blocks and all others at the distance of the farthest of them.
    With `neighbors=8` the offsets (down, right) are (0, 1), (1, 0), (1, 1), (0, 2) and (2, 0): ten edges per block,
    five in each direction. The far end of each edge moves to a random block with probability `rewire`.

    Args:
        features, block_size: as for `watts_strogatz`.
        neighbors: the approximate number of edges per block (see above); even, 2 or more, below the number of blocks.
        rewire, seed: as for `watts_strogatz`.

    Raises:
        BlockSparseError: `features` is not a multiple of the block, or an argument is out of range.

    >>> import blocksparse as bs
    >>> bs.patterns.watts_strogatz_2d(32 * 1024, block_size=32, neighbors=8, rewire=0, seed=0).nnz
    11264

    Source: Gray, Radford, Kingma, GPU Kernels for Block-Sparse Weights (2017).
    """
    n, block = checked_square(features, block_size)
    offsets = _quadrant(_even_neighbors(neighbors, n) // 2)
    probability = number("rewire", rewire, 0, 1)
    rng = generator(seed)
    height, width = torus(n)
    y, x = np.divmod(np.arange(n), width)
    ends = [(y + down) % height * width + (x + right) % width for down, right in offsets]
    edges = np.unique(np.concatenate([np.arange(n) * n + end for end in ends]))
    edges = edges[edges // n != edges % n]  # on a small torus an offset can lead back to its start
    moved = rng.random(edges.size) < probability
    edges, starts = edges[~moved], edges[moved] // n
    while starts.size:
        drawn = starts * n + rng.integers(n, size=starts.size)
        _, first = np.unique(drawn, return_index=True)
        fits = np.zeros(starts.size, dtype=bool)
        fits[first] = True
        fits &= (drawn % n != starts) & ~np.isin(drawn, edges)
        edges, starts = np.concatenate([edges, drawn[fits]]), starts[~fits]
    return _layout_of_graph(*np.divmod(edges, n), n, block)


def barabasi_albert(features: int, block_size: Block = 32, m: int = 8, seed: int = 0) -> BlockLayout:
    """Draw a Barabasi-Albert scale-free graph of blocks, with the diagonal and a dense corner of the first m blocks.

    The graph is `networkx.barabasi_albert_graph`, grown as in 2017 from m blocks without edges: each further block gets
    edges to m earlier ones, with probabilities in proportion to their edges. The layout is symmetric and stores
    2 m (blocks - m) + blocks + m (m - 1) blocks.

    Args:
        features, block_size: as for `watts_strogatz`.
        m: edges of each new block, 1 or more, below the number of blocks.
        seed: an int, 0 or more.

    Raises:
        BlockSparseError: `features` is not a multiple of the block, or an argument is out of range.

    >>> import blocksparse as bs
    >>> bs.patterns.barabasi_albert(18432, block_size=32, m=8, seed=0)
    BlockLayout(shape=(18432, 18432), block_size=(32, 32), nnz=9720, density=0.0293)

    Source: Barabasi, Albert, Emergence of scaling in random networks (1999); Gray, Radford, Kingma, GPU Kernels for
    Block-Sparse Weights (2017).
    """
    import networkx

    n, block = checked_square(features, block_size)
    m = integer("m", m, 1, below=n, of="the number of blocks")
    seed = integer("seed", seed, 0)
    # networkx now starts from a star around block 0. In 2017 block m was the first with edges to the others.
    start = networkx.Graph((m, i) for i in range(m))
    i, j = _edges(networkx.barabasi_albert_graph(n, m, seed=seed, initial_graph=start))
    corner = np.divmod(np.arange(m * m), m)
    return _layout_of_graph(np.concatenate([i, corner[0]]), np.concatenate([j, corner[1]]), n, block)


def torus(nodes: int) -> tuple[int, int]:
    """Return the rows and columns of the most square torus with this number of blocks.

    >>> torus(10_000), torus(12)
    ((100, 100), (3, 4))
    """
    height = next(h for h in range(math.isqrt(nodes), 0, -1) if nodes % h == 0)
    return height, nodes // height


def _quadrant(count: int) -> list[tuple[int, int]]:
    """Return the offsets (down, right) >= 0, without (0, 0), up to the distance of the `count`-th nearest."""
    side = math.isqrt(2 * count) + 2
    square = {(down, right): down**2 + right**2 for down in range(side) for right in range(side)}
    farthest = sorted(square.values())[count]
    return [offset for offset, distance in square.items() if 0 < distance <= farthest]


def _even_neighbors(neighbors: Any, nodes: int) -> int:
    """Return the number of neighbors, or raise a BlockSparseError unless it is even and below the number of nodes."""
    even = integer("neighbors", neighbors, 2)
    if even >= nodes:
        few = f"fewer than the {nodes} blocks of a row: pass neighbors=, or use smaller blocks"
        raise BlockSparseError.expected("neighbors", few, even)
    if even % 2:
        raise BlockSparseError.expected("neighbors", "an even int", even)
    return even


def _edges(graph: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return both ends of each edge of a networkx graph, int64."""
    pairs = np.array(list(graph.edges), dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _layout_of_graph(i: np.ndarray, j: np.ndarray, n: int, block: tuple[int, int]) -> BlockLayout:
    """Make the symmetric layout of the edges (i, j) of a graph, with the diagonal."""
    nodes = np.arange(n)
    keys = np.unique(np.concatenate([i * n + j, j * n + i, nodes * n + nodes]))
    return BlockLayout.from_indices(*np.divmod(keys, n), (n, n), block)
