"""A layout as a graph of its blocks or its neurons.

On block level a node is a block of features. On neuron level it is a feature, and a stored block connects all of its
outputs to all of its inputs. Neurons of one block of features have the same neighbors, so one node with their number as
its weight represents them all, and measures of neurons are exact without listing neurons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout, import_scipy_sparse

LEVELS = ("block", "neuron")


@dataclass(frozen=True)
class Graph:
    """A graph whose nodes represent one or several neurons with the same neighbors."""

    adjacency: Any
    """A scipy CSR matrix [n, n] of ones, float64, with an empty diagonal; symmetric except in `directed_graph_of`."""
    weights: np.ndarray
    """int64 [n]: the number of neurons of each node; all 1 on block level."""
    loops: np.ndarray
    """bool [n]: whether the diagonal block of a node is stored, which connects its neurons to each other."""

    @property
    def nodes(self) -> int:
        """The number of nodes on this level: blocks or neurons."""
        return int(self.weights.sum())

    @property
    def degrees(self) -> np.ndarray:
        """int64 [n]: the number of neighbors of a neuron of each node."""
        return (self.adjacency @ self.weights).astype(np.int64) + self.loops * (self.weights - 1)

    @property
    def edges(self) -> int:
        """The number of edges on this level, without self-loops."""
        return int(self.weights @ self.degrees) // 2

    @property
    def within(self) -> np.ndarray:
        """int64 [n]: the distance of two neurons of one node; 0 if there are no two, or no path."""
        distance = np.where(self.loops, 1, np.where(np.diff(self.adjacency.indptr) > 0, 2, 0))
        return np.where(self.weights > 1, distance, 0)

    @property
    def with_loops(self) -> Any:
        """The adjacency with a 1 on the diagonal for each node with a loop, a scipy CSR matrix."""
        return (self.adjacency + import_scipy_sparse().diags_array(self.loops.astype(float))).tocsr()

    def expanded(self) -> Any:
        """Return the adjacency of all neurons, a scipy CSR matrix."""
        node = np.repeat(np.arange(self.weights.size), self.weights)
        whole = self.with_loops[node][:, node]
        whole.setdiag(0)
        whole.eliminate_zeros()
        return whole


def graph_of(layout: BlockLayout, level: str = "block") -> Graph:
    """Return the layout as an undirected graph, cached on the layout.

    A square grid (on neuron level: a square shape) has a node per block of features, and an edge between i and j if
    block (i, j) or (j, i) is stored. Any other layout is a bipartite graph: first the outputs, then the inputs.
    """
    layout = at_level(layout, level)
    return layout.derived(("graph", level), lambda: _undirected_graph(layout, level))


def directed_graph_of(layout: BlockLayout, level: str = "block") -> Graph:
    """Return the directed graph of a square layout, whose edges lead from inputs (rows) to outputs (columns)."""
    layout = at_level(layout, level)
    if not _is_square(layout, level):
        expected = "a square grid" if level == "block" else "a square shape"
        raise BlockSparseError.expected("layout", f"{expected}, whose outputs are inputs again", repr(layout))
    sources, ends = layout.col_of_block.astype(np.int64), layout.row_of_block
    return Graph(_adjacency(sources, ends, layout.grid[0]), _weights(layout, level, 0), _loops(layout))


def at_level(layout: BlockLayout, level: str) -> BlockLayout:
    """Return the layout, or on neuron level one with square blocks if its shape is square."""
    check_layout(layout)
    check_level(level)
    block = layout.block_shape
    if level == "neuron" and layout.shape[0] == layout.shape[1] and block[0] != block[1]:
        side = math.gcd(*block)
        return layout.derived("square blocks", lambda: refined(layout, (side, side)))
    return layout


def check_level(level: str) -> None:
    """Raise a BlockSparseError unless `level` is "block" or "neuron"."""
    if not isinstance(level, str) or level not in LEVELS:
        raise BlockSparseError.expected("level", " or ".join(map(repr, LEVELS)), repr(level))


def refined(layout: BlockLayout, block: tuple[int, int]) -> BlockLayout:
    """Return a layout with the same connections in smaller blocks, which divide those of the layout.

    >>> import blocksparse as bs
    >>> from blocksparse.topology.graph import refined
    >>> refined(bs.BlockLayout([[True, False]], block_size=(4, 2)), (2, 2)).mask().int()
    tensor([[1, 0],
            [1, 0]], dtype=torch.int32)
    """
    if block == layout.block_shape:
        return layout
    height, width = layout.block_shape[0] // block[0], layout.block_shape[1] // block[1]
    rows = layout.row_of_block[:, None, None] * height + np.arange(height)[:, None]
    cols = layout.col_of_block.astype(np.int64)[:, None, None] * width + np.arange(width)
    rows, cols = np.broadcast_arrays(rows, cols)
    grid = (layout.grid[0] * height, layout.grid[1] * width)
    return BlockLayout.from_indices(rows.reshape(-1), cols.reshape(-1), grid, block)


def matrix_of(layout: BlockLayout) -> Any:
    """Return the mask of a layout as a scipy CSR matrix of ones, float32."""
    ones = np.ones(layout.nnz, dtype=np.float32)
    return import_scipy_sparse().csr_matrix((ones, layout.col_of_block, layout.row_start), shape=layout.grid)


def _undirected_graph(layout: BlockLayout, level: str) -> Graph:
    """Build the graph of `graph_of`."""
    rows, cols = layout.row_of_block, layout.col_of_block.astype(np.int64)
    weights, loops = _weights(layout, level, 0), _loops(layout)
    if not _is_square(layout, level):
        cols = cols + layout.grid[0]
        weights = np.concatenate([weights, _weights(layout, level, 1)])
        loops = np.zeros(weights.size, dtype=bool)
    return Graph(_adjacency(np.r_[rows, cols], np.r_[cols, rows], weights.size), weights, loops)


def _is_square(layout: BlockLayout, level: str) -> bool:
    """Return whether outputs and inputs are the same nodes."""
    sides = layout.grid if level == "block" else layout.shape
    return sides[0] == sides[1]


def _weights(layout: BlockLayout, level: str, axis: int) -> np.ndarray:
    """Return the neurons of each block of outputs (axis 0) or inputs (axis 1); 1 on block level."""
    return np.full(layout.grid[axis], layout.block_shape[axis] if level == "neuron" else 1, dtype=np.int64)


def _loops(layout: BlockLayout) -> np.ndarray:
    """Return a mask of the rows whose diagonal block is stored."""
    loops = np.zeros(layout.grid[0], dtype=bool)
    loops[layout.row_of_block[layout.row_of_block == layout.col_of_block]] = True
    return loops


def _adjacency(sources: np.ndarray, ends: np.ndarray, nodes: int) -> Any:
    """Return the CSR matrix of these edges without self-loops and duplicates."""
    sparse = import_scipy_sparse()
    not_loops = sources != ends
    # float64, which csgraph would otherwise convert to in each search.
    ones = np.ones(int(not_loops.sum()))
    matrix = sparse.csr_matrix((ones, (sources[not_loops], ends[not_loops])), shape=(nodes, nodes))
    matrix.data[:] = 1  # scipy has added duplicates
    return matrix
