"""How activity spreads through a square layout: from inputs to outputs, which are the inputs of the next step."""

from __future__ import annotations

import numpy as np

from ..checked import is_int
from ..errors import BlockSparseError
from ..layout import BlockLayout
from .graph import Graph, arrows_of
from .paths import chosen_sources, search

# Columns of a power of the layout that are in memory at a time.
CHUNK = 512


def steps_from(layout: BlockLayout, block: int) -> np.ndarray:
    """After how many steps activity that begins in one block of features first reaches each: int64 `[blocks]`.

    0 for the block itself, -1 for those that it never reaches.

    Args:
        layout: on a square grid.
        block: where it begins.

    Raises:
        BlockSparseError: a grid that is not square, no such block; scipy is missing
            (`pip install blocksparse-torch[lab]`).

    >>> import blocksparse as bs
    >>> bs.topology.steps_from(bs.BlockLayout([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]], 8), 0)
    array([ 0,  1,  2, -1])
    """
    arrows = arrows_of(layout)
    if not is_int(block) or not 0 <= block < layout.grid[0]:
        raise BlockSparseError.expected("block", f"an int from 0 to {layout.grid[0] - 1}", repr(block))
    steps = np.full(layout.grid[0], -1, dtype=np.int64)
    reached, lengths = search(arrows.adjacency, int(block))
    steps[reached] = lengths
    return steps


def steps_to_mix(
    layout: BlockLayout, *, level: str = "block", identity: bool = True, sources: int | None = None, seed: int = 0
) -> int:
    """After how many steps every unit has reached every other.

    A step is one product with the weight: from input j to output i where block (i, j) is stored. With `identity` a
    unit also holds what it has, as over a residual connection or where the diagonal is stored (in all patterns of
    small worlds it is): the longest of the shortest directed paths. Without it, the least t such that every entry of
    the t-th power of the weight's pattern is there, as in t layers or time steps without residual connections; for
    layouts that store the diagonal both are the same.

    Args:
        layout: on a square grid; on neuron level, of a square shape.
        level: "block" or "neuron": on the latter, units of one block of features must reach each other too.
        identity: see above.
        sources: with identity, search from this many blocks only, drawn with `seed`, so that it may take more steps;
            None for all, or for 1,000 where there are more than 20,000.
        seed: of the sample.

    Raises:
        BlockSparseError: a layout that is not square, or of a single unit; one on which some units never reach some
            others, or without identity never all at the same time (said with the period); fewer than two sources;
            scipy is missing (`pip install blocksparse-torch[lab]`).

    >>> import blocksparse as bs
    >>> bs.topology.steps_to_mix(bs.patterns.barabasi_albert(576, block_size=1, m=8))
    4
    >>> cycle = bs.BlockLayout([[0, 0, 1], [1, 0, 0], [0, 1, 0]], block_size=1)
    >>> bs.topology.steps_to_mix(cycle)
    2
    """
    arrows = arrows_of(layout, level)
    if arrows.nodes < 2:
        raise BlockSparseError.expected("layout", "two units or more", repr(layout))
    _check_strong(arrows, layout)
    if identity or arrows.loops.all():
        return _longest(arrows, chosen_sources(arrows.weights.size, sources, seed))
    period = _period(arrows)
    if period > 1:
        raise BlockSparseError.expected(
            "layout", "paths of all lengths between its units, or identity=True", f"period {period}: {layout!r}"
        )
    return _exponent(arrows)


def _longest(arrows: Graph, sources: np.ndarray) -> int:
    """The most steps from one of the sources to any other unit, another one of the same node among them."""
    ends = arrows.adjacency.T.tocsr()
    steps = np.empty(arrows.weights.size, dtype=np.int64)
    most = 0
    for source in sources:
        reached, lengths = search(arrows.adjacency, int(source))
        most = max(most, int(lengths[-1]))
        if arrows.weights[source] > 1:
            steps[reached] = lengths
            into = ends.indices[ends.indptr[source] : ends.indptr[source + 1]]
            most = max(most, 1 if arrows.loops[source] else 1 + int(steps[into].min()))
    return most


def _exponent(arrows: Graph) -> int:
    """The least power of a primitive pattern that has no gap."""
    pattern = arrows.with_loops.T.tocsr().astype(np.float32)
    nodes = arrows.weights.size
    most = 0
    for first in range(0, nodes, CHUNK):
        columns = min(CHUNK, nodes - first)
        reached = np.zeros((nodes, columns), dtype=np.float32)
        reached[first + np.arange(columns), np.arange(columns)] = 1
        steps = 0
        while not reached.all() or steps == 0:
            reached = (pattern @ reached > 0).astype(np.float32)
            steps += 1
        most = max(most, steps)
    return most


def _check_strong(arrows: Graph, layout: BlockLayout) -> None:
    from scipy.sparse import csgraph

    parts = csgraph.connected_components(arrows.adjacency, connection="strong", return_labels=False)
    if parts > 1 or (arrows.weights.size == 1 and not arrows.loops[0]):
        got = f"{parts} parts that do not all lead to each other" if parts > 1 else "no block"
        raise BlockSparseError.expected("layout", "a path from every unit to every other", f"{got}: {layout!r}")


def _period(arrows: Graph) -> int:
    """The greatest common divisor of the lengths of all cycles of a strongly connected graph."""
    reached, lengths = search(arrows.adjacency, 0)
    depth = np.empty_like(lengths)
    depth[reached] = lengths
    edges = arrows.with_loops.tocoo()
    return int(np.gcd.reduce(depth[edges.row] + 1 - depth[edges.col]))
