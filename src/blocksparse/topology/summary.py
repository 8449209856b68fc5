"""The measures of one layout together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import BlockSparseError
from ..layout import BlockLayout
from .clustering import clustering
from .degrees import hub_load
from .graph import graph_of
from .mixing import steps_to_mix
from .paths import path_lengths
from .spectrum import spectral_gap


@dataclass(frozen=True)
class Summary:
    """What `summary` found, on one level."""

    level: str
    nodes: int
    edges: int
    """Of the undirected graph, the diagonal left out."""
    components: int
    """Connected ones; with more than one, paths are those within them."""
    path_length: float | None
    """The mean of the shortest paths; None where no two nodes are connected."""
    path_length_error: float
    """Its standard error, 0 where it is exact."""
    diameter: int | None
    """The longest of the shortest paths found."""
    exact: bool
    """Whether paths were searched from all nodes, not from a sample."""
    clustering: float
    spectral_gap: float
    steps_to_mix: int | None
    """Until every unit has reached every other; None where some never do, or the layout is not square."""
    hub_load: float
    """The fullest row or column of blocks / the mean."""

    def as_dict(self) -> dict[str, Any]:
        """The same, ready for JSON."""
        return asdict(self)


def summary(layout: BlockLayout, level: str = "block", sources: int | None = None, seed: int = 0) -> Summary:
    """The measures of a layout's graph together, connected or not.

    Args:
        layout: of any shape.
        level: "block" or "neuron".
        sources, seed: of the paths and the steps to mix, as for `path_lengths`.

    Raises:
        BlockSparseError: as `path_lengths`.

    >>> import blocksparse as bs
    >>> found = bs.topology.summary(bs.patterns.block_diagonal((8, 8), block_size=2), level="neuron")
    >>> found.components, found.path_length, found.clustering, found.steps_to_mix
    (4, 1.0, 0.0, None)
    """
    paths = path_lengths(layout, level, sources, seed)
    try:
        steps = steps_to_mix(layout, level=level, sources=sources, seed=seed)
    except BlockSparseError:  # not square, or some units never reach some others
        steps = None
    return Summary(
        level=level,
        nodes=paths.nodes,
        edges=graph_of(layout, level).edges,
        components=paths.components,
        path_length=paths.mean,
        path_length_error=paths.standard_error,
        diameter=paths.diameter,
        exact=paths.exact,
        clustering=clustering(layout, level),
        spectral_gap=spectral_gap(layout, level),
        steps_to_mix=steps,
        hub_load=hub_load(layout),
    )
