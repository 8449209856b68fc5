"""All measures of a layout in one result."""

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
    """The measures of a layout's graph, see `summary`."""

    level: str
    nodes: int
    edges: int
    """Edges of the undirected graph, without the diagonal."""
    components: int
    """Connected components; if there are several, paths are those within them."""
    path_length: float | None
    """Mean shortest path; None if no two nodes are connected."""
    path_length_error: float
    """Standard error of `path_length`, 0 if it is exact."""
    diameter: int | None
    """Longest shortest path found."""
    exact: bool
    """Whether paths were searched from all nodes, not from a sample."""
    clustering: float
    spectral_gap: float
    steps_to_mix: int | None
    """Steps until every unit has reached every other; None if some never do, or the layout is not square."""
    hub_load: float
    """Blocks in the fullest row or column / the mean."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return asdict(self)


def summary(layout: BlockLayout, level: str = "block", sources: int | None = None, seed: int = 0) -> Summary:
    """Return all measures of a layout's graph.

    Args:
        layout: a layout of any shape, connected or not.
        level: "block" (default) or "neuron".
        sources, seed: sample for the paths and the steps to mix, see `path_lengths`.

    Raises:
        BlockSparseError: as for `path_lengths`.

    >>> import blocksparse as bs
    >>> found = bs.topology.summary(bs.patterns.block_diagonal((8, 8), block_size=2), level="neuron")
    >>> found.components, found.path_length, found.clustering, found.steps_to_mix
    (4, 1.0, 0.0, None)
    """
    paths = path_lengths(layout, level, sources, seed)
    try:
        steps = steps_to_mix(layout, level=level, sources=sources, seed=seed)
    except BlockSparseError:  # not square, or some units never reach others
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
