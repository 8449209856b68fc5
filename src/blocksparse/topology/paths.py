"""How far apart the blocks of a layout are, read as an undirected graph.

A layout on a square grid has one node per block of features, and an edge between i and j where block (i, j) or (j, i)
is stored; the diagonal is ignored. Any other layout is a bipartite graph of its output blocks and its input blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout, import_scipy_sparse


def average_path_length(layout: BlockLayout) -> float:
    """The mean length of the shortest paths over all ordered pairs of distinct nodes, in edges.

    On a square grid the nodes are the blocks of features; otherwise they are the input and the output blocks of a
    bipartite graph, and pairs on the same side count too. Exact: one breadth-first search per node.

    Raises:
        BlockSparseError: the graph is not connected (with the number of components and the mean within them), or it
            has a single node; scipy is missing (`pip install blocksparse-torch[scipy]`).

    >>> import blocksparse as bs
    >>> ring = bs.patterns.watts_strogatz(64, block_size=1, neighbors=2, rewire=0)
    >>> small_world = bs.patterns.watts_strogatz(64, block_size=1, neighbors=4, rewire=0.2, seed=0)
    >>> round(bs.topology.average_path_length(ring), 3), bs.topology.average_path_length(small_world) < 4
    (16.254, True)

    Source: Watts, Strogatz, Collective dynamics of small-world networks (1998).
    """
    graph = _graph(layout)
    nodes = graph.shape[0]
    if nodes < 2:
        raise BlockSparseError.expected("layout", "two nodes or more", repr(layout))
    total = pairs = 0
    for source in range(nodes):
        lengths = _path_lengths(graph, source)
        total += int(lengths.sum())
        pairs += lengths.size - 1
    if pairs < nodes * (nodes - 1):
        within = f"a mean path of {total / pairs:.4g} within them" if pairs else "no two nodes connected"
        raise BlockSparseError.expected(
            "layout", "a connected graph", f"{connected_components(layout)} components, {within}: {layout!r}"
        )
    return total / pairs


def connected_components(layout: BlockLayout) -> int:
    """The number of connected components of the layout's graph; a node without edges is one.

    Raises:
        BlockSparseError: scipy is missing (`pip install blocksparse-torch[scipy]`).

    >>> import blocksparse as bs
    >>> bs.topology.connected_components(bs.patterns.block_diagonal((8, 8), block_size=2))
    4
    """
    graph = _graph(layout)
    from scipy.sparse import csgraph

    return int(csgraph.connected_components(graph, directed=False, return_labels=False))


def degrees(layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(out_degrees, in_degrees): the stored blocks per row and per column, int64, the diagonal included.

    >>> import blocksparse as bs
    >>> bs.topology.degrees(bs.BlockLayout([[True, True, False], [False, True, False]], block_size=4))
    (tensor([2, 1]), tensor([1, 2, 0]))
    """
    check_layout(layout)
    return layout.crow_indices().diff().long(), torch.bincount(layout.col_indices(), minlength=layout.grid[1])


def _graph(layout: BlockLayout) -> Any:
    """The symmetric adjacency of the layout's graph as a scipy CSR matrix."""
    check_layout(layout)
    sparse = import_scipy_sparse()
    rows, cols = layout.row_of_block, layout.col_of_block
    nodes = layout.grid[0]
    if layout.grid[0] == layout.grid[1]:
        rows, cols = rows[rows != cols], cols[rows != cols]
    else:
        cols = cols.astype(np.int64) + layout.grid[0]
        nodes += layout.grid[1]
    edges = np.concatenate([rows, cols]), np.concatenate([cols, rows])
    # csgraph computes in float64: given it at once, the searches need no conversion each.
    return sparse.csr_matrix((np.ones(2 * rows.size), edges), shape=(nodes, nodes))


def _path_lengths(graph: Any, source: int) -> np.ndarray:
    """The distances from `source` of all nodes that it reaches, itself first."""
    from scipy.sparse import csgraph

    order, parents = csgraph.breadth_first_order(graph, source)
    place = np.empty(graph.shape[0], dtype=np.int64)
    place[order] = np.arange(order.size)
    parents[source] = source
    # Depths by pointer doubling: `lengths` counts the steps up to `above`, which ends at the root. Breadth-first
    # order keeps `above` sorted, so the last node is the last to get there.
    above = place[parents[order]]
    lengths = np.ones(order.size, dtype=np.int64)
    lengths[0] = 0
    while above[-1]:
        lengths += lengths[above]
        above = above[above]
    return lengths
