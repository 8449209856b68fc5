"""The spread of activity through a square layout, whose outputs are the inputs of the next step."""

from __future__ import annotations

import numpy as np

from ..checked import is_int
from ..errors import BlockSparseError
from ..layout import BlockLayout
from .graph import Graph, directed_graph_of
from .paths import chosen_sources, search

# Columns of a power of the pattern that are computed at a time.
CHUNK = 512


def steps_from(layout: BlockLayout, block: int) -> np.ndarray:
    """Return the number of steps until activity from one block of features reaches each block, int64 `[blocks]`.

    It is 0 for the block itself, and -1 for blocks that are never reached.

    Args:
        layout: a layout with a square grid.
        block: index of the block in which activity starts.

    Raises:
        BlockSparseError: a grid that is not square; an index out of range; scipy is missing
            (`pip install scipy`).

    >>> import blocksparse as bs
    >>> bs.topology.steps_from(bs.BlockLayout([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]], 8), 0)
    array([ 0,  1,  2, -1])
    """
    graph = directed_graph_of(layout)
    if not is_int(block) or not 0 <= block < layout.grid[0]:
        raise BlockSparseError.expected("block", f"an int from 0 to {layout.grid[0] - 1}", repr(block))
    steps = np.full(layout.grid[0], -1, dtype=np.int64)
    reached, lengths = search(graph.adjacency, int(block))
    steps[reached] = lengths
    return steps


def steps_to_mix(
    layout: BlockLayout, *, level: str = "block", identity: bool = True, sources: int | None = None, seed: int = 0
) -> int:
    """Return the number of steps until every unit has reached every other.

    A step is a product with the weight, from input j to output i if block (i, j) is stored. With `identity`, the result
    is the longest of the shortest directed paths. Without it, it is the least t for which the t-th power of the pattern
    has no zero. Both are the same for layouts that store the diagonal, as all small-world patterns do.

    Args:
        layout: a layout with a square grid; on neuron level, with a square shape.
        level: "block" (default) or "neuron". On neuron level, units of one block of features must reach each other too.
        identity: whether a unit also keeps its own activity, as with a residual connection; True by default.
        sources: number of blocks to search from if `identity`, drawn with `seed`, which gives a lower bound; None
            (default) for all, or 1,000 if there are more than 20,000.
        seed: seed of the sample, 0 by default.

    Raises:
        BlockSparseError: a layout that is not square, or has a single unit; some units never reach others, or without
            identity, never all at the same time (the error names the period); fewer than two sources; scipy is missing
            (`pip install scipy`).

    >>> import blocksparse as bs
    >>> bs.topology.steps_to_mix(bs.patterns.barabasi_albert(576, block_size=1, m=8))
    4
    >>> cycle = bs.BlockLayout([[0, 0, 1], [1, 0, 0], [0, 1, 0]], block_size=1)
    >>> bs.topology.steps_to_mix(cycle)
    2
    """
    graph = directed_graph_of(layout, level)
    if graph.nodes < 2:
        raise BlockSparseError.expected("layout", "two units or more", repr(layout))
    _check_strongly_connected(graph, layout)
    if identity or graph.loops.all():
        return _longest_path(graph, chosen_sources(graph.weights.size, sources, seed))
    period = _period(graph)
    if period > 1:
        raise BlockSparseError.expected(
            "layout", "paths of all lengths between its units, or identity=True", f"period {period}: {layout!r}"
        )
    return _primitive_exponent(graph)


def _longest_path(graph: Graph, sources: np.ndarray) -> int:
    """Return the most steps from a source to any other unit, including other units of its own node."""
    ends = graph.adjacency.T.tocsr()
    steps = np.empty(graph.weights.size, dtype=np.int64)
    longest = 0
    for source in sources:
        reached, lengths = search(graph.adjacency, int(source))
        longest = max(longest, int(lengths[-1]))
        if graph.weights[source] > 1:
            steps[reached] = lengths
            into = ends.indices[ends.indptr[source] : ends.indptr[source + 1]]
            longest = max(longest, 1 if graph.loops[source] else 1 + int(steps[into].min()))
    return longest


def _primitive_exponent(graph: Graph) -> int:
    """Return the least power of a primitive pattern that has no zero."""
    pattern = graph.with_loops.T.tocsr().astype(np.float32)
    nodes = graph.weights.size
    exponent = 0
    for first in range(0, nodes, CHUNK):
        columns = min(CHUNK, nodes - first)
        reached = np.zeros((nodes, columns), dtype=np.float32)
        reached[first + np.arange(columns), np.arange(columns)] = 1
        steps = 0
        while not reached.all() or steps == 0:
            reached = (pattern @ reached > 0).astype(np.float32)
            steps += 1
        exponent = max(exponent, steps)
    return exponent


def _check_strongly_connected(graph: Graph, layout: BlockLayout) -> None:
    """Raise a BlockSparseError unless every unit has a path to every other."""
    from scipy.sparse import csgraph

    components = csgraph.connected_components(graph.adjacency, connection="strong", return_labels=False)
    if components > 1 or (graph.weights.size == 1 and not graph.loops[0]):
        got = f"{components} strongly connected components" if components > 1 else "no block"
        raise BlockSparseError.expected("layout", "a path from every unit to every other", f"{got}: {layout!r}")


def _period(graph: Graph) -> int:
    """Return the greatest common divisor of the lengths of all cycles of a strongly connected graph."""
    reached, lengths = search(graph.adjacency, 0)
    depth = np.empty_like(lengths)
    depth[reached] = lengths
    edges = graph.with_loops.tocoo()
    return int(np.gcd.reduce(depth[edges.row] + 1 - depth[edges.col]))
