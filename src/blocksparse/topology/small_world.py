"""How small-world a layout's graph is: as clustered as a lattice, with paths as short as a random graph's.

Both measures compare it with graphs of as many nodes and edges: random ones, in which every node keeps its degree
(ends of pairs of edges swapped at random, ten times each), and the ring on which each node is tied to its nearest.
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

# Rounds in which every edge of a random reference is swapped with another, as often as that can be done.
ROUNDS = 10
# The mean path of a random reference is estimated from this many nodes, as it varies little from node to node.
SOURCES = 500


@dataclass(frozen=True)
class SmallWorld:
    """The quantities in sigma and omega; see `small_world`."""

    clustering: float
    path_length: float
    random_clustering: float
    """The mean of the random references."""
    random_path_length: float
    lattice_clustering: float

    @property
    def sigma(self) -> float | None:
        """(C / C_random) / (L / L_random); None where the random references have no triangle."""
        shorter = self.path_length / self.random_path_length
        return self.clustering / self.random_clustering / shorter if self.random_clustering else None

    @property
    def omega(self) -> float | None:
        """L_random / L - C / C_lattice; None where the lattice has no triangle."""
        longer = self.random_path_length / self.path_length
        return longer - self.clustering / self.lattice_clustering if self.lattice_clustering else None

    def as_dict(self) -> dict[str, float | None]:
        """All of it, sigma and omega too, ready for JSON."""
        return asdict(self) | {"sigma": self.sigma, "omega": self.omega}


def small_world(
    layout: BlockLayout, *, level: str = "block", references: int = 5, seed: int = 0, sources: int | None = None
) -> SmallWorld:
    """Clustering and mean path of the layout's graph, of random references and of the lattice.

    Args:
        layout: whose graph is connected and not bipartite: a square one.
        level: "block", or "neuron", where the references have all the edges between neurons, and take their time.
        references: random graphs to take the mean of.
        seed: of the references and of the sample of sources.
        sources: of the layout's own mean path, as for `average_path_length`.

    Raises:
        BlockSparseError: a graph that is not connected or has a single node, no reference; scipy is missing
            (`pip install blocksparse-torch[lab]`).

    >>> import blocksparse as bs
    >>> found = bs.topology.small_world(bs.patterns.watts_strogatz(256, block_size=1, neighbors=8, rewire=0.1))
    >>> found.clustering > 5 * found.random_clustering, found.path_length < 1.5 * found.random_path_length
    (True, True)
    """
    integer("references", references, 1)
    length = average_path_length(layout, sources, level=level, seed=seed)
    graph = graph_of(layout, level)
    edges = _edges(graph)
    rng = np.random.default_rng(seed)
    drawn = [_random_reference(graph.nodes, edges, rng) for _ in range(references)]
    searched = [rng.choice(graph.nodes, min(SOURCES, graph.nodes), replace=False) for _ in drawn]
    lengths = [paths_in(one, chosen).mean for one, chosen in zip(drawn, searched, strict=True)]
    return SmallWorld(
        clustering=clustering_in(graph),
        path_length=length,
        random_clustering=float(np.mean([clustering_in(one) for one in drawn])),
        random_path_length=float(np.mean([length for length in lengths if length is not None])),
        lattice_clustering=clustering_in(_lattice(graph.nodes, edges.size)),
    )


def small_world_sigma(layout: BlockLayout, *, level: str = "block", references: int = 5, seed: int = 0) -> float:
    """Sigma, (C / C_random) / (L / L_random): a small world where it is well above 1.

    Args:
        layout, level, references, seed: as for `small_world`. Random references are not always connected: their mean
            path is that within components.

    Raises:
        BlockSparseError: as `small_world`, and random references without a triangle.

    >>> import blocksparse as bs
    >>> bs.topology.small_world_sigma(bs.patterns.watts_strogatz(256, block_size=1, neighbors=8, rewire=0.1)) > 5
    True

    Source: Humphries, Gurney, Network "small-world-ness" (2008); random references that keep the degrees: Maslov,
    Sneppen, Specificity and stability in topology of protein networks (2002).
    """
    found = small_world(layout, level=level, references=references, seed=seed).sigma
    if found is None:
        raise BlockSparseError.expected("layout", "a graph whose random references have triangles", repr(layout))
    return found


def small_world_omega(layout: BlockLayout, *, level: str = "block", references: int = 5, seed: int = 0) -> float:
    """Omega, L_random / L - C / C_lattice: near 0 for a small world, near -1 for a lattice, near 1 for a random graph.

    Args:
        layout, level, references, seed: as for `small_world`. The lattice is the ring of as many edges, each node
            tied to its nearest, rather than one of the same degrees.

    Raises:
        BlockSparseError: as `small_world`, and a lattice without a triangle: fewer than two edges for each node.

    >>> import blocksparse as bs
    >>> ring = bs.patterns.watts_strogatz(256, block_size=1, neighbors=8, rewire=0)
    >>> random = bs.patterns.watts_strogatz(256, block_size=1, neighbors=8, rewire=1)
    >>> bs.topology.small_world_omega(ring) < -0.8, bs.topology.small_world_omega(random) > 0.8
    (True, True)

    Source: Telesford, Joyce, Hayasaka, Burdette, Laurienti, The ubiquity of small-world networks (2011).
    """
    found = small_world(layout, level=level, references=references, seed=seed).omega
    if found is None:
        raise BlockSparseError.expected("layout", "a graph of as many edges as a lattice with triangles", repr(layout))
    return found


def _edges(graph: Graph) -> np.ndarray:
    """The numbers smaller end * nodes + larger end of the edges of all neurons, rising."""
    whole = (graph.adjacency if graph.nodes == graph.weights.size else graph.expanded()).tocoo()
    upper = whole.row < whole.col
    return np.sort(whole.row[upper].astype(np.int64) * graph.nodes + whole.col[upper])


def _random_reference(nodes: int, edges: np.ndarray, rng: np.random.Generator) -> Graph:
    """Returns a graph with random edges in which every node keeps its degree."""
    for _ in range(ROUNDS):
        edges = _swapped(nodes, edges, rng)
    return _graph(nodes, edges)


def _swapped(nodes: int, edges: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Edges (a, b), (c, d), in pairs at random, become (a, d), (c, b) where neither is there already nor a loop."""
    pairs = rng.permutation(edges)[: edges.size // 2 * 2].reshape(2, -1)
    (a, c), (b, d) = np.divmod(pairs, nodes)
    turned = rng.random(a.size) < 0.5
    a, b = np.where(turned, b, a), np.where(turned, a, b)
    swapped = np.stack([np.minimum(x, y) * nodes + np.maximum(x, y) for x, y in ((a, d), (c, b))])
    fits = (a != d) & (c != b) & ~np.isin(swapped, edges).any(0)
    # If two pairs would make the same new edge, neither is swapped.
    _, back, times = np.unique(swapped, return_inverse=True, return_counts=True)
    fits &= (times[back.reshape(swapped.shape)] == 1).all(0)
    kept = np.setdiff1d(edges, pairs[:, fits], assume_unique=True)
    return np.sort(np.concatenate([kept, swapped[:, fits].ravel()]))


def _lattice(nodes: int, edges: int) -> Graph:
    """Returns the ring of this many edges: all ties between neighbours, then those to the second nearest, and so on."""
    step, node = np.divmod(np.arange(edges), nodes)
    other = (node + step + 1) % nodes
    return _graph(nodes, np.minimum(node, other) * nodes + np.maximum(node, other))


def _graph(nodes: int, edges: np.ndarray) -> Graph:
    sparse = import_scipy_sparse()
    ends = np.divmod(edges, nodes)
    upper = sparse.csr_matrix((np.ones(edges.size), ends), shape=(nodes, nodes))
    return Graph((upper + upper.T).tocsr(), np.ones(nodes, dtype=np.int64), np.zeros(nodes, dtype=bool))
