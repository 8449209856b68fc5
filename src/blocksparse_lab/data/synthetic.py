"""Synthetic data: rows of noise with a pattern of their class, and growing graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blocksparse.errors import BlockSparseError

from .planetoid import Graph


@dataclass(frozen=True)
class Synthetic:
    """Normal noise, plus +-`strength` by class in the features that carry it, with fixed random signs; for large nets.

    Seed and index determine a row, in any batch; rows are not stored.

    Args:
        features: of a row.
        rows: to train on.
        tested: rows to test on.
        seed: of everything.
        classes: their names.
        carriers: number of features that carry the class, evenly spread; None for all.
        strength: in standard deviations of the noise.

    >>> import numpy as np
    >>> from blocksparse_lab.data.synthetic import Synthetic
    >>> x, y = Synthetic(features=1000, rows=64, tested=16).take(np.arange(8))
    >>> x.shape, y.shape
    (torch.Size([8, 1000]), torch.Size([8]))
    """

    features: int = 65_536
    rows: int = 512
    tested: int = 128
    seed: int = 0
    classes: tuple[str, ...] = ("0", "1")
    carriers: int | None = None
    strength: float = 1.0
    name = "synthetic"

    def __post_init__(self) -> None:
        for name in ("features", "rows", "tested"):
            if getattr(self, name) < 1:
                raise BlockSparseError.expected(name, "a positive int", getattr(self, name))
        if self.carriers is not None and not 1 <= self.carriers <= self.features:
            raise BlockSparseError.expected("carriers", f"an int from 1 to {self.features:,}", self.carriers)

    def take(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return rows by index, float32 `[n, features]`, and their labels, int64 `[n]`."""
        signs = np.random.default_rng([self.seed, 0]).integers(2, size=(len(self.classes), self.features)) * 2 - 1
        if self.carriers is not None:
            places = np.arange(self.carriers) * self.features // self.carriers
            mute = np.ones(self.features, bool)
            mute[places] = False
            signs[:, mute] = 0
        features, labels = np.empty((len(rows), self.features), np.float32), np.empty(len(rows), np.int64)
        for at, row in enumerate(rows):
            rng = np.random.default_rng([self.seed, 1, int(row)])
            labels[at] = rng.integers(len(self.classes))
            rng.standard_normal(out=features[at], dtype=np.float32)
            features[at] += self.strength * signs[labels[at]]
        return torch.from_numpy(features), torch.from_numpy(labels)

    def held_out(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows to test on, whose indices follow those to train on, in batches."""
        end = self.rows + self.tested
        return (self.take(np.arange(at, min(at + batch, end))) for at in range(self.rows, end, batch))

    def digest(self) -> dict[str, Any]:
        """Return facts that identify the data, ready for JSON."""
        some = {} if self.carriers is None else {"carriers": self.carriers, "strength": self.strength}
        return {
            **some,
            "name": self.name,
            "rows": self.rows,
            "features": self.features,
            "classes": len(self.classes),
            "tested": self.tested,
            "seed": self.seed,
        }


def growing_graph(
    nodes: int = 100_000, classes: int = 7, m: int = 4, features: int = 64, within: float = 0.7, seed: int = 0
) -> Graph:
    """Grow a graph by preferential attachment: each new node joins `m` others, more likely those with many edges.

    Args:
        nodes, features: numbers of both; a node has about a tenth of the features, those of its class twice as often.
        classes: drawn for each node.
        m: edges of a new node; hubs keep growing.
        within: fraction of edges within a class; the others join any node.
        seed: of everything.

    >>> from blocksparse_lab.data.synthetic import growing_graph
    >>> graph = growing_graph(nodes=1000)
    >>> graph.edges.shape, graph.features.shape
    (torch.Size([2, 3830]), torch.Size([1000, 64]))

    Source: Barabasi, Albert, Emergence of scaling in random networks (1999); the classes are added.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=nodes)
    draws, stays = rng.random((nodes, m)), rng.random((nodes, m)) < within
    # A node appears once for itself and once per edge, in the list of its class and in that of all.
    of_class: list[list[int]] = [[] for _ in range(classes)]
    of_all: list[int] = []
    edges = []
    for node, label in enumerate(labels.tolist()):
        near = of_class[label]
        others = {
            some[int(draws[node, nth] * len(some))]
            for nth in range(m)
            if (some := near if stays[node, nth] and near else of_all)
        }
        edges += [(node, other) for other in others]
        for one in (node, *others, *[node] * len(others)):
            of_all.append(one)
            of_class[labels[one]].append(one)
    own = rng.integers(classes, size=features) == labels[:, None]
    seen = rng.random((nodes, features)) < np.where(own, 0.2, 0.1)
    pairs = torch.tensor(edges).T
    return Graph("growing", torch.from_numpy(seen.astype(np.float32)), torch.from_numpy(labels), pairs)
