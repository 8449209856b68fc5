"""The layouts of an evolving network over time, their distances, and trees and embeddings of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..checked import integer
from ..errors import BlockSparseError
from ..layout import import_scipy_sparse
from .nnstd import Layer, Net, layers_of, nnstd


class Trajectory:
    """The layouts of a network at several moments. Layouts that do not change are stored once.

    >>> import torch, blocksparse as bs
    >>> model = torch.nn.Sequential(bs.nn.Linear(512, 512, density=0.1, block_size=4), bs.nn.Linear(512, 8))
    >>> method = bs.sparsity.SET(model, torch.optim.SGD(model.parameters(), lr=0.1), zeta=0.3, init="he")
    >>> trajectory = bs.topology.Trajectory()
    >>> for epoch in range(3):
    ...     trajectory.record(model, epoch)
    ...     _ = method.step()
    >>> len(trajectory), trajectory.labels
    (3, [0, 1, 2])
    >>> distances = trajectory.distances()
    >>> bool(distances[0, 1] < distances[0, 2])
    True
    """

    def __init__(self) -> None:
        self.labels: list[Any] = []
        """Label of each moment, such as an epoch or the name of a run."""
        self.nets: list[tuple[Layer, ...]] = []

    def record(self, net: Net, label: Any = None) -> None:
        """Record the current layouts of a network.

        Args:
            net: see `nnstd`.
            label: label of this moment; its index by default.

        Raises:
            BlockSparseError: `net` has no layout.
        """
        self.nets.append(layers_of(net))
        self.labels.append(len(self.labels) if label is None else label)

    def __len__(self) -> int:
        return len(self.nets)

    def distances(self) -> np.ndarray:
        """Return the distances between all moments, see `distances`."""
        return distances(self.nets)


def distances(nets: Sequence[Net], *, level: str = "neuron") -> np.ndarray:
    """Return the sparse topology distances between networks, float64 `[nets, nets]`, symmetric.

    Args:
        nets: networks, see `nnstd`, such as one network at several moments.
        level: see `nnstd`; "neuron" by default.

    Raises:
        BlockSparseError: as for `nnstd`.

    >>> import blocksparse as bs
    >>> nets = [[bs.patterns.random((32, 32), block_size=1, density=0.2, seed=seed)] for seed in (0, 0, 1)]
    >>> bs.topology.distances(nets).round(2)
    array([[0.  , 0.  , 0.67],
           [0.  , 0.  , 0.67],
           [0.67, 0.67, 0.  ]])
    """
    layers = [layers_of(net) for net in nets]
    matrix = np.zeros((len(layers), len(layers)))
    for i, j in zip(*np.triu_indices(len(layers), 1), strict=True):
        matrix[i, j] = matrix[j, i] = nnstd(layers[i], layers[j], level=level)
    return matrix


def linkage(distances: np.ndarray) -> np.ndarray:
    """Return the tree that joins the nearest networks first, by mean distances, as `scipy.cluster.hierarchy` draws it.

    Args:
        distances: `[nets, nets]`, of two networks or more.

    Returns:
        float64 `[nets - 1, 4]`, as of `scipy.cluster.hierarchy.linkage`: the two clusters that are joined, their
        distance, and their number of networks.

    Raises:
        BlockSparseError: the matrix is not symmetric with zeros on its diagonal; scipy is missing
            (`pip install scipy`).

    >>> import numpy as np, blocksparse as bs
    >>> bs.topology.linkage(np.array([[0, 0.1, 0.8], [0.1, 0, 0.6], [0.8, 0.6, 0]])).round(2)
    array([[0. , 1. , 0.1, 2. ],
           [2. , 3. , 0.7, 3. ]])
    """
    matrix = _check_distances(distances)
    import_scipy_sparse()  # raises an error that says how to install scipy
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    return hierarchy.linkage(squareform(matrix, checks=False), method="average")


def embedding(distances: np.ndarray, dimensions: int = 2) -> np.ndarray:
    """Return points whose distances are near the given ones, by classical scaling, float64 `[nets, dimensions]`.

    Signs are chosen such that no coordinate of the last network is below that of the first.

    Args:
        distances: `[nets, nets]`, of two networks or more.
        dimensions: dimensions of the points, 2 by default; those beyond what the distances span are 0.

    Raises:
        BlockSparseError: the matrix is not symmetric with zeros on its diagonal; no dimension.

    >>> import numpy as np, blocksparse as bs
    >>> bs.topology.embedding(np.array([[0, 3, 5], [3, 0, 4], [5, 4, 0.0]])).round(2).shape
    (3, 2)

    Source: Torgerson, Multidimensional scaling: theory and method (1952).
    """
    matrix = _check_distances(distances)
    integer("dimensions", dimensions, 1)
    centred = matrix**2
    centred = centred - centred.mean(0) - centred.mean(1)[:, None] + centred.mean()
    values, vectors = np.linalg.eigh(-centred / 2)
    points = np.zeros((len(matrix), dimensions))
    count = min(dimensions, len(matrix))
    points[:, :count] = (vectors * np.sqrt(np.maximum(values, 0)))[:, ::-1][:, :count]
    return points * np.where(points[-1] < points[0], -1, 1)


def _check_distances(distances: Any) -> np.ndarray:
    """Return the matrix, or raise a BlockSparseError unless it is symmetric with zeros on its diagonal."""
    matrix = np.asarray(distances, dtype=np.float64)
    square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] >= 2
    if not square or not np.isfinite(matrix).all() or not np.allclose(matrix, matrix.T) or matrix.diagonal().any():
        expected = "a symmetric matrix of two nets or more, with 0 on the diagonal"
        raise BlockSparseError.expected("distances", expected, f"shape {matrix.shape}" if not square else repr(matrix))
    return matrix
