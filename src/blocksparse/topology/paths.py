"""Shortest paths of a layout's graph.

A layout with a square grid has a node per block of features, and an edge between i and j if block (i, j) or (j, i) is
stored; the diagonal is ignored. Any other layout is a bipartite graph of its output blocks and input blocks. On neuron
level every feature is a node, a block connects all of its outputs to all of its inputs, and a stored diagonal block
connects the neurons of that block to each other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..checked import integer, is_int
from ..errors import BlockSparseError
from ..layout import BlockLayout
from .graph import Graph, graph_of

# If `sources` is None: search from every node up to EXACT nodes, from a sample of SAMPLED above.
EXACT = 20_000
SAMPLED = 1_000


@dataclass(frozen=True)
class PathLengths:
    """Statistics of the shortest paths, in edges, over ordered pairs of different nodes; see `path_lengths`."""

    mean: float | None
    """Mean over connected pairs; None if there are none."""
    standard_error: float
    """Standard error of the mean, due to the sample of sources; 0 if all nodes were searched."""
    diameter: int | None
    """Longest shortest path found; a lower bound if sources were sampled."""
    pairs: tuple[int, ...]
    """Number of searched pairs at distance 1, 2, ..."""
    components: int
    """Connected components of the whole graph; a node without edges counts as one."""
    nodes: int
    exact: bool
    """Whether all nodes were searched."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return asdict(self)


def path_lengths(layout: BlockLayout, level: str = "block", sources: int | None = None, seed: int = 0) -> PathLengths:
    """Return statistics of the shortest paths, by breadth-first searches.

    Args:
        layout: a layout of any shape, connected or not.
        level: "block" (default) or "neuron". Both are equally fast, since neurons of a block are searched together.
        sources: number of nodes (blocks of features) to search from, drawn with `seed`; None (default) for all, or
            1,000 if there are more than 20,000.
        seed: seed of the sample, 0 by default.

    Raises:
        BlockSparseError: fewer than two sources; an unknown level; a graph of a single node; scipy is missing
            (`pip install scipy`).

    >>> import blocksparse as bs
    >>> found = bs.topology.path_lengths(bs.patterns.banded((5, 5), block_size=1))
    >>> found.mean, found.diameter, found.pairs, found.components
    (2.0, 4, (8, 6, 4, 2), 1)
    """
    graph = graph_of(layout, level)
    if graph.nodes < 2:
        raise BlockSparseError.expected("layout", "two nodes or more", repr(layout))
    chosen = chosen_sources(graph.weights.size, sources, seed)
    return layout.derived(
        ("path lengths", level, chosen.size, seed if chosen.size < graph.weights.size else 0),
        lambda: paths_in(graph, chosen),
    )


def average_path_length(
    layout: BlockLayout, sources: int | None = None, *, level: str = "block", seed: int = 0
) -> float:
    """Return the mean length of the shortest paths over all ordered pairs of different nodes, in edges.

    On a square grid the nodes are the blocks of features. Otherwise they are the input and output blocks of a bipartite
    graph, and pairs on the same side count too. The result is exact up to 20,000 nodes; `path_lengths` also returns the
    standard error of a sample.

    Args:
        layout, level, sources, seed: see `path_lengths`.

    Raises:
        BlockSparseError: the graph is not connected (the error has the number of components and the mean within them),
            or has a single node; fewer than two sources; an unknown level; scipy is missing
            (`pip install scipy`).

    >>> import blocksparse as bs
    >>> ring = bs.patterns.watts_strogatz(64, block_size=1, neighbors=2, rewire=0)
    >>> small_world = bs.patterns.watts_strogatz(64, block_size=1, neighbors=4, rewire=0.2, seed=0)
    >>> round(bs.topology.average_path_length(ring), 3), bs.topology.average_path_length(small_world) < 4
    (16.254, True)

    Source: Watts, Strogatz, Collective dynamics of small-world networks (1998).
    """
    return _paths_if_connected(layout, level, sources, seed)[0]


def diameter(layout: BlockLayout, sources: int | None = None, *, level: str = "block", seed: int = 0) -> int:
    """Return the longest shortest path between two nodes, in edges; a lower bound if sources are sampled.

    Args:
        layout, level, sources, seed: see `path_lengths`.

    Raises:
        BlockSparseError: as for `average_path_length`.

    >>> import blocksparse as bs
    >>> bs.topology.diameter(bs.patterns.watts_strogatz(64, block_size=1, neighbors=2, rewire=0))
    32
    """
    return _paths_if_connected(layout, level, sources, seed)[1]


def connected_components(layout: BlockLayout, level: str = "block") -> int:
    """Return the number of connected components of the layout's graph; a node without edges counts as one.

    Raises:
        BlockSparseError: an unknown level; scipy is missing (`pip install scipy`).

    >>> import blocksparse as bs
    >>> bs.topology.connected_components(bs.patterns.block_diagonal((8, 8), block_size=2))
    4
    """
    return components_in(graph_of(layout, level))


def chosen_sources(nodes: int, sources: int | None, seed: int) -> np.ndarray:
    """Return the nodes to search from: all, or a sample without repetition."""
    if sources is None:
        sources = SAMPLED if nodes > EXACT else max(nodes, 2)
    if not is_int(sources) or sources < 2:
        raise BlockSparseError.expected("sources", "None or an int, 2 or more", repr(sources))
    if sources >= nodes:
        return np.arange(nodes)
    return np.random.default_rng(integer("seed", seed, 0)).choice(nodes, sources, replace=False)


def paths_in(graph: Graph, sources: np.ndarray) -> PathLengths:
    """Search breadth-first from these nodes; return statistics of the shortest paths.

    If `sources` are fewer than the nodes, they count as a random sample: the mean has a standard error.
    """
    weights, within = graph.weights, graph.within
    totals, pairs = np.zeros((2, sources.size))
    at_length = np.zeros(1, dtype=np.int64)
    for nth, source in enumerate(sources):
        reached, lengths = search(graph.adjacency, int(source))
        counts = np.bincount(lengths, weights=weights[reached]).astype(np.int64)
        counts[0] = 0
        if within[source]:
            counts = _add_padded(counts, np.bincount([within[source]], weights=[weights[source] - 1]).astype(np.int64))
        totals[nth], pairs[nth] = np.arange(counts.size) @ counts, counts.sum()
        at_length = _add_padded(at_length, counts * weights[source])
    pair_count = float(weights[sources] @ pairs)
    mean = float(weights[sources] @ totals) / pair_count if pair_count else None
    error = 0.0
    if mean is not None and sources.size < weights.size:
        # Standard error of a ratio, for a sample without repetition.
        deviation = weights[sources] * (totals - mean * pairs)
        unsampled = 1 - sources.size / weights.size
        error = float(np.sqrt(unsampled * sources.size) * deviation.std(ddof=1) / pair_count)
    return PathLengths(
        mean=mean,
        standard_error=error,
        diameter=at_length.size - 1 or None,
        pairs=tuple(at_length[1:].tolist()),
        components=components_in(graph),
        nodes=graph.nodes,
        exact=sources.size == weights.size,
    )


def components_in(graph: Graph) -> int:
    """Count the connected components; each neuron without edges is one."""
    from scipy.sparse import csgraph

    isolated = (graph.weights > 1) & (graph.within == 0)
    of_nodes = csgraph.connected_components(graph.adjacency, directed=False, return_labels=False)
    return int(of_nodes + (graph.weights[isolated] - 1).sum())


def search(adjacency: Any, source: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes that `source` reaches along the rows of a CSR matrix, itself first, and the steps to each."""
    from scipy.sparse import csgraph

    order, parents = csgraph.breadth_first_order(adjacency, source)
    index = np.empty(adjacency.shape[0], dtype=np.int64)
    index[order] = np.arange(order.size)
    parents[source] = source
    # Depths by pointer doubling: `lengths` counts the steps to `ancestor`, until that is the root. Breadth-first order
    # keeps `ancestor` sorted, so the last node gets there last.
    ancestor = index[parents[order]]
    lengths = np.ones(order.size, dtype=np.int64)
    lengths[0] = 0
    while ancestor[-1]:
        lengths += lengths[ancestor]
        ancestor = ancestor[ancestor]
    return order, lengths


def _paths_if_connected(layout: BlockLayout, level: str, sources: int | None, seed: int) -> tuple[float, int]:
    """Return mean and longest shortest path; raise a BlockSparseError unless the graph is connected."""
    paths = path_lengths(layout, level, sources, seed)
    if paths.components > 1 or paths.mean is None or paths.diameter is None:
        raise BlockSparseError.expected("layout", "a connected graph", f"{_describe_components(paths)}: {layout!r}")
    return paths.mean, paths.diameter


def _describe_components(paths: PathLengths) -> str:
    within = "no two nodes connected" if paths.mean is None else f"a mean path of {paths.mean:.4g} within them"
    return f"{paths.components} components, {within}"


def _add_padded(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the sum of two vectors, of which the shorter one is padded with zeros."""
    short, long = sorted((a, b), key=len)
    long = long.copy()
    long[: short.size] += short
    return long
