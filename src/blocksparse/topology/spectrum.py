"""How fast a random walk on a layout's graph forgets where it began."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BlockSparseError
from ..layout import BlockLayout, import_scipy_sparse
from .graph import graph_of
from .paths import components_in

# Up to this many nodes LAPACK finds all eigenvalues of any graph, in a fraction of a second.
DENSE = 500


def spectral_gap(layout: BlockLayout, level: str = "block") -> float:
    """1 - the second largest eigenvalue of the random walk, the second smallest of the normalised Laplacian.

    0 where the graph is not connected; the larger, the fewer steps until a walk may be anywhere, about 1 / gap. The
    eigenvalue -1, which every bipartite graph has (a layout that is not square), does not count. By Lanczos iterations
    where there are more than 500 blocks of features.

    Args:
        layout: of any shape; the diagonal counts on neuron level only, as for `average_path_length`.
        level: "block" or "neuron".

    Raises:
        BlockSparseError: a graph of a single node, an unknown level; scipy is missing
            (`pip install blocksparse-torch[lab]`).

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
    # Vectors that are constant on the neurons of each node: a matrix of nodes, made symmetric.
    scale = sparse.diags_array(np.sqrt(graph.weights / degrees))
    inner = sparse.diags_array(graph.loops * (graph.weights - 1) / degrees)
    walk = (scale @ graph.adjacency @ scale + inner).tocsr()
    second = _second(walk, np.sqrt(degrees * graph.weights))
    # Those that sum to 0 on the neurons of one node, and are 0 elsewhere.
    several = graph.weights > 1
    apart = (graph.loops / -degrees)[several].max(initial=-np.inf)
    return float(max(0.0, 1 - max(second, apart)))


def _second(walk: Any, first: np.ndarray) -> float:
    """The second largest eigenvalue of a symmetric matrix whose largest is 1, with the eigenvector `first`."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    nodes = first.size
    if nodes == 1:
        return -np.inf
    if nodes <= DENSE:
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
        # The gap is tiny, and so there are cuts of few edges, with which the matrix factorises into little fill-in.
        return float(eigsh(walk.tocsc(), k=2, sigma=1 + 1e-9, **settings).min())
