"""The clustering coefficient of a layout's graph."""

from __future__ import annotations

import numpy as np

from ..layout import BlockLayout
from .graph import Graph, graph_of


def clustering(layout: BlockLayout, level: str = "block") -> float:
    """Return the mean clustering coefficient: the fraction of pairs of a node's neighbors that are connected.

    A node with fewer than two neighbors counts as 0. On block level the diagonal of a square layout is ignored; on
    neuron level a stored diagonal block connects its neurons to each other. A layout that is not square is a bipartite
    graph, which has no triangles, so the result is 0.

    Args:
        layout: a layout of any shape, connected or not.
        level: "block" (default) or "neuron". Both are exact, by products of the sparse matrix of blocks.

    Raises:
        BlockSparseError: an unknown level; scipy is missing (`pip install scipy`).

    >>> import blocksparse as bs
    >>> bs.topology.clustering(bs.patterns.watts_strogatz(64, block_size=1, neighbors=4, rewire=0))
    0.5

    Source: Watts, Strogatz, Collective dynamics of small-world networks (1998).
    """
    return clustering_in(graph_of(layout, level))


def clustering_in(graph: Graph) -> float:
    """Return the mean clustering coefficient of a graph."""
    ties, weights = graph.adjacency, graph.weights
    inner = graph.loops * (weights - 1.0)  # neighbors of a neuron in its own node
    outer = ties @ weights
    # Connected pairs of neighbors: both in its own node, one in it, both in one other node, in two other nodes.
    weighted = ties.multiply(weights).tocsr()
    across = np.asarray((weighted @ weighted).multiply(ties).sum(1)).ravel() / 2
    tied = inner * (inner - 1) / 2 + inner * outer + ties @ (graph.loops * weights * (weights - 1.0) / 2) + across
    degree = inner + outer
    pairs = degree * (degree - 1) / 2
    coefficient = np.divide(tied, pairs, out=np.zeros_like(pairs), where=pairs > 0)
    return float(weights @ coefficient / graph.nodes)
