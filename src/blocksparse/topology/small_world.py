"""Measures of small worlds: graphs as clustered as a lattice whose paths are as short as those of a random graph.

Both measures compare a layout's graph with graphs of the same number of nodes and edges: random ones in which every
node keeps its degree (each edge swaps its ends with random others ten times), and the ring of nearest neighbors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from ..checked import integer
from ..errors import BlockSparseError
from ..layout import BlockLayout, import_scipy_sparse
from .clustering import clustering_in
from .graph import Graph, graph_of
from .paths import average_path_length, paths_in

# Rounds in which the edges of a random reference swap ends in pairs, if possible.
ROUNDS = 10
# Nodes from which the mean path of a random reference is estimated; it varies little between nodes.
SOURCES = 500


@dataclass(frozen=True)
class SmallWorld:
    """The measures from which sigma and omega are computed; see `small_world`."""

    clustering: float
    path_length: float
    random_clustering: float
    """Mean of the random references."""
    random_path_length: float
    lattice_clustering: float

    @property
    def sigma(self) -> float | None:
        """(C / C_random) / (L / L_random); None if the random references have no triangle."""
        shorter = self.path_length / self.random_path_length
        return self.clustering / self.random_clustering / shorter if self.random_clustering else None

    @property
    def omega(self) -> float | None:
        """L_random / L - C / C_lattice; None if the lattice has no triangle."""
        longer = self.random_path_length / self.path_length
        return longer - self.clustering / self.lattice_clustering if self.lattice_clustering else None

    def as_dict(self) -> dict[str, float | None]:
        """Return all fields with sigma and omega, ready for JSON."""
        return asdict(self) | {"sigma": self.sigma, "omega": self.omega}


def small_world(
    layout: BlockLayout, *, level: str = "block", references: int = 5, seed: int = 0, sources: int | None = None
) -> SmallWorld:
    """Return clustering and mean path of the layout's graph, of random references and of the lattice.

    Args:
        layout: a square layout with a connected graph.
        level: "block" (default) or "neuron", which is slow, since references have all edges between neurons.
        references: number of random graphs to average over, 5 by default.
        seed: seed of the references and of the sample of sources, 0 by default.
        sources: sources of the layout's own mean path, see `average_path_length`; None by default.

    Raises:
        BlockSparseError: a graph that is not connected, or has a single node; no reference; scipy is missing
            (`pip install scipy`).

    >>> import blocksparse as bs
    >>> found = bs.topology.small_world(bs.patterns.watts_strogatz(256, block_size=1, neighbors=8, rewire=0.1))
    >>> found.clustering > 5 * found.random_clustering, found.path_length < 1.5 * found.random_path_length
    (True, True)
    """
    integer("references", references, 1)
    length = average_path_length(layout, sources, level=level, seed=seed)
    graph = graph_of(layout, level)
    edges = _edges(graph)
    rng = np.random.default_rng(integer("seed", seed, 0))
    randoms = [_random_reference(graph.nodes, edges, rng) for _ in range(references)]
    searched = [rng.choice(graph.nodes, min(SOURCES, graph.nodes), replace=False) for _ in randoms]
    lengths = [paths_in(one, chosen).mean for one, chosen in zip(randoms, searched, strict=True)]
    return SmallWorld(
        clustering=clustering_in(graph),
        path_length=length,
        random_clustering=float(np.mean([clustering_in(one) for one in randoms])),
        random_path_length=float(np.mean([length for length in lengths if length is not None])),
        lattice_clustering=clustering_in(_lattice(graph.nodes, edges.size)),
    )


def small_world_sigma(layout: BlockLayout, *, level: str = "block", references: int = 5, seed: int = 0) -> float:
    """Return sigma, (C / C_random) / (L / L_random), which is well above 1 for a small world.

    Args:
        layout, level, references, seed: see `small_world`. Random references may be disconnected; their mean path is
            that within components.

    Raises:
        BlockSparseError: as for `small_world`; random references without a triangle.

    >>> import blocksparse as bs
    >>> bs.topology.small_world_sigma(bs.patterns.watts_strogatz(256, block_size=1, neighbors=8, rewire=0.1)) > 5
    True

    Source: Humphries, Gurney, Network "small-world-ness" (2008); random references that keep the degrees: Maslov,
    Sneppen, Specificity and stability in topology of protein networks (2002).
    """
    sigma = small_world(layout, level=level, references=references, seed=seed).sigma
    if sigma is None:
        raise BlockSparseError.expected("layout", "a graph whose random references have triangles", repr(layout))
    return sigma


def small_world_omega(layout: BlockLayout, *, level: str = "block", references: int = 5, seed: int = 0) -> float:
    """Return omega, L_random / L - C / C_lattice: near 0 for small worlds, -1 for lattices, 1 for random graphs.

    Args:
        layout, level, references, seed: see `small_world`. The lattice is the ring of nearest neighbors with the same
            number of edges; it does not keep degrees.

    Raises:
        BlockSparseError: as for `small_world`; a lattice without a triangle, from fewer than two edges per node.

    >>> import blocksparse as bs
    >>> ring = bs.patterns.watts_strogatz(256, block_size=1, neighbors=8, rewire=0)
    >>> random = bs.patterns.watts_strogatz(256, block_size=1, neighbors=8, rewire=1)
    >>> bs.topology.small_world_omega(ring) < -0.8, bs.topology.small_world_omega(random) > 0.8
    (True, True)

    Source: Telesford, Joyce, Hayasaka, Burdette, Laurienti, The ubiquity of small-world networks (2011).
    """
    omega = small_world(layout, level=level, references=references, seed=seed).omega
    if omega is None:
        expected = "a graph with enough edges for a lattice with triangles"
        raise BlockSparseError.expected("layout", expected, repr(layout))
    return omega


def _edges(graph: Graph) -> np.ndarray:
    """Return the edges of all neurons as smaller end * nodes + larger end, rising."""
    whole = (graph.adjacency if graph.nodes == graph.weights.size else graph.expanded()).tocoo()
    upper = whole.row < whole.col
    return np.sort(whole.row[upper].astype(np.int64) * graph.nodes + whole.col[upper])


def _random_reference(nodes: int, edges: np.ndarray, rng: np.random.Generator) -> Graph:
    """Return a graph with random edges in which every node keeps its degree."""
    for _ in range(ROUNDS):
        edges = _swap_ends(nodes, edges, rng)
    return _graph_of_edges(nodes, edges)


def _swap_ends(nodes: int, edges: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return edges after random swaps of (a, b), (c, d) to (a, d), (c, b), unless one of these exists or is a loop."""
    pairs = rng.permutation(edges)[: edges.size // 2 * 2].reshape(2, -1)
    (a, c), (b, d) = np.divmod(pairs, nodes)
    flipped = rng.random(a.size) < 0.5
    a, b = np.where(flipped, b, a), np.where(flipped, a, b)
    swapped = np.stack([np.minimum(x, y) * nodes + np.maximum(x, y) for x, y in ((a, d), (c, b))])
    fits = (a != d) & (c != b) & ~np.isin(swapped, edges).any(0)
    # If two pairs would create the same edge, neither is swapped.
    _, back, times = np.unique(swapped, return_inverse=True, return_counts=True)
    fits &= (times[back.reshape(swapped.shape)] == 1).all(0)
    others = np.setdiff1d(edges, pairs[:, fits], assume_unique=True)
    return np.sort(np.concatenate([others, swapped[:, fits].ravel()]))


def _lattice(nodes: int, edges: int) -> Graph:
    """Return the ring with this many edges: those to nearest neighbors first, then to second nearest, and so on."""
    step, node = np.divmod(np.arange(edges), nodes)
    other = (node + step + 1) % nodes
    return _graph_of_edges(nodes, np.minimum(node, other) * nodes + np.maximum(node, other))


def _graph_of_edges(nodes: int, edges: np.ndarray) -> Graph:
    """Return the graph of edges, given as smaller end * nodes + larger end."""
    sparse = import_scipy_sparse()
    ends = np.divmod(edges, nodes)
    upper = sparse.csr_matrix((np.ones(edges.size), ends), shape=(nodes, nodes))
    return Graph((upper + upper.T).tocsr(), np.ones(nodes, dtype=np.int64), np.zeros(nodes, dtype=bool))
