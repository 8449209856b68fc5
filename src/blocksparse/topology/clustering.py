"""How often two neighbours of a node are neighbours of each other."""

from __future__ import annotations

import numpy as np

from ..layout import BlockLayout
from .graph import Graph, graph_of


def clustering(layout: BlockLayout, level: str = "block") -> float:
    """The mean clustering coefficient: for each node the part of the pairs of its neighbours that are tied.

    A node with fewer than two neighbours counts as 0. The diagonal of a square layout is ignored on block level; on
    neuron level it ties the neurons of a block to each other. A layout that is not square is a bipartite graph, which
    has no triangles: 0.

    Args:
        layout: of any shape; it need not be connected.
        level: "block" or "neuron". Exact on either, from products of the sparse matrix of blocks.

    Raises:
        BlockSparseError: an unknown level; scipy is missing (`pip install blocksparse-torch[lab]`).

    >>> import blocksparse as bs
    >>> bs.topology.clustering(bs.patterns.watts_strogatz(64, block_size=1, neighbors=4, rewire=0))
    0.5

    Source: Watts, Strogatz, Collective dynamics of small-world networks (1998).
    """
    return clustering_in(graph_of(layout, level))


def clustering_in(graph: Graph) -> float:
    """The mean clustering coefficient of a graph's neurons."""
    ties, weights = graph.adjacency, graph.weights
    inner = graph.loops * (weights - 1.0)  # neighbours that a neuron has in its own node
    outer = ties @ weights
    # Tied pairs of neighbours: both in its own node, one there and one elsewhere, both in another node, in two others.
    weighted = ties.multiply(weights).tocsr()
    across = np.asarray((weighted @ weighted).multiply(ties).sum(1)).ravel() / 2
    tied = inner * (inner - 1) / 2 + inner * outer + ties @ (graph.loops * weights * (weights - 1.0) / 2) + across
    degree = inner + outer
    pairs = degree * (degree - 1) / 2
    coefficient = np.divide(tied, pairs, out=np.zeros_like(pairs), where=pairs > 0)
    return float(weights @ coefficient / graph.nodes)
