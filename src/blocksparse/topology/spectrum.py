"""The spectral gap of a layout's graph: how fast a random walk forgets where it started."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BlockSparseError
from ..layout import BlockLayout, import_scipy_sparse
from .graph import graph_of
from .paths import components_in

# Up to this many nodes LAPACK finds all eigenvalues in a fraction of a second.
MAX_DENSE_NODES = 500


def spectral_gap(layout: BlockLayout, level: str = "block") -> float:
    """Return 1 - the second largest eigenvalue of the random walk: the second smallest of the normalized Laplacian.

    A walk may be anywhere after about 1 / gap steps. The gap is 0 if the graph is not connected. The eigenvalue -1 of
    bipartite graphs (layouts that are not square) does not count. With more than 500 blocks of features, it is found by
    Lanczos iterations.

    Args:
        layout: a layout of any shape; the diagonal counts on neuron level only, as for `average_path_length`.
        level: "block" (default) or "neuron".

    Raises:
        BlockSparseError: a graph of a single node; an unknown level; scipy is missing
            (`pip install scipy`).

    >>> import blocksparse as bs
    >>> round(bs.topology.spectral_gap(bs.patterns.dense((5, 5), block_size=1)), 6)
    1.25
    >>> bs.topology.spectral_gap(bs.patterns.block_diagonal((4, 4), block_size=1))
    0.0

    Source: Chung, Spectral Graph Theory (1997).
    """
    graph = graph_of(layout, level)
    if graph.nodes < 2:
        raise BlockSparseError.expected("layout", "two nodes or more", repr(layout))
    if components_in(graph) > 1:
        return 0.0
    sparse = import_scipy_sparse()
    degrees = graph.degrees
    # For eigenvectors that are constant on the neurons of each node: a symmetric matrix over nodes.
    scale = sparse.diags_array(np.sqrt(graph.weights / degrees))
    inner = sparse.diags_array(graph.loops * (graph.weights - 1) / degrees)
    walk = (scale @ graph.adjacency @ scale + inner).tocsr()
    second = _second_eigenvalue(walk, np.sqrt(degrees * graph.weights))
    # The other eigenvectors sum to 0 on the neurons of one node, and are 0 on all other nodes.
    several = graph.weights > 1
    within_nodes = (graph.loops / -degrees)[several].max(initial=-np.inf)
    return float(max(0.0, 1 - max(second, within_nodes)))


def _second_eigenvalue(walk: Any, first: np.ndarray) -> float:
    """Return the second largest eigenvalue of a symmetric matrix whose largest is 1, with eigenvector `first`."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    nodes = first.size
    if nodes == 1:
        return -np.inf
    if nodes <= MAX_DENSE_NODES:
        return float(np.linalg.eigvalsh(walk.toarray())[-2])
    first = first / np.linalg.norm(first)

    def deflated(x: np.ndarray) -> np.ndarray:
        x = x.ravel()
        return walk @ x - 2 * first * (first @ x)

    settings = {"v0": np.random.default_rng(0).standard_normal(nodes), "return_eigenvectors": False}
    try:
        operator = LinearOperator((nodes, nodes), matvec=deflated, dtype=np.float64)
        return float(eigsh(operator, k=1, which="LA", maxiter=200, tol=1e-8, **settings)[0])
    except ArpackNoConvergence:
        # The gap is tiny, so the graph has cuts of few edges, and a factorization has little fill-in.
        return float(eigsh(walk.tocsc(), k=2, sigma=1 + 1e-9, **settings).min())
