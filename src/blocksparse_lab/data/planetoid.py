"""Citation graphs (Cora, Citeseer, Pubmed) from the planetoid files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blocksparse import files
from blocksparse.errors import BlockSparseError

from . import pickles
from .download import located

NAMES = ("cora", "citeseer", "pubmed")


@dataclass(frozen=True)
class Graph:
    """Papers that cite each other.

    Args:
        name: of the graph.
        features: float32 `[nodes, features]`, the words of each paper.
        labels: int64 `[nodes]`.
        edges: int64 `[2, edges]`, each pair once.
    """

    name: str
    features: Tensor
    labels: Tensor
    edges: Tensor

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1


def load(name: str = "cora", data_dir: str | Path | None = None) -> Graph:
    """Load a citation graph.

    Nodes without words and class in the files (Citeseer has some) get class 0 and no words.

    Args:
        name: "cora", "citeseer" or "pubmed".
        data_dir: folder with the files, which cannot be downloaded.

    Source: Yang, Cohen, Salakhutdinov, Revisiting semi-supervised learning with graph embeddings (2016).
    """
    if name not in NAMES:
        raise BlockSparseError.expected("graph", f"one of {', '.join(NAMES)}", repr(name))
    folder = located(name, (f"planetoid/ind.{name}.graph", f"ind.{name}.graph"), data_dir).parent
    paths = {part: folder / f"ind.{name}.{part}" for part in ("allx", "ally", "tx", "ty", "graph")}
    contents = {part: pickles.read(path, name, "a pickle of planetoid") for part, path in paths.items()}
    tested = _numbers(folder / f"ind.{name}.test.index", name)
    try:
        return _graph(name, contents, tested)
    except BlockSparseError:
        raise
    except ValueError as error:
        raise BlockSparseError.expected(str(folder), f"the parts of {name}, which fit each other", error) from error


def _graph(name: str, contents: dict[str, Any], tested: np.ndarray) -> Graph:
    """Build the graph from the unpickled files."""
    edges, count = _edges(contents["graph"])
    known, others = ([_matrix(part, contents[part]) for part in parts] for parts in (("allx", "ally"), ("tx", "ty")))
    if known[0].shape[0] != known[1].shape[0]:
        raise ValueError(f"{known[0].shape[0]} rows of words, {known[1].shape[0]} of classes")
    features, labels = (_rows(name, *pair, tested, count) for pair in zip(known, others, strict=True))
    return Graph(name, torch.from_numpy(features), torch.from_numpy(labels.argmax(1)), torch.from_numpy(edges))


def _rows(name: str, known: Any, others: Any, tested: np.ndarray, count: int) -> np.ndarray:
    """Return the rows of all nodes: those of allx or ally first, then those of tx or ty at the indices in `tested`."""
    first, wide = known.shape
    if others.shape[1] != wide or not wide:
        raise ValueError(f"{wide} and {others.shape[1]} columns")
    # The index file may skip nodes, which have neither words nor class.
    if len(tested) != others.shape[0] or len(np.unique(tested)) != len(tested):
        raise ValueError(f"{len(np.unique(tested))} numbers of nodes for {others.shape[0]} rows")
    if first > count or (len(tested) and not first <= tested.min() <= tested.max() < count):
        raise ValueError(f"{first} rows, and numbers from {tested.min()} to {tested.max()}, of {count} nodes")
    files.check_unpacked(name, 4 * count * wide, 0)
    rows = np.zeros((count, wide), np.float32)
    rows[:first], rows[tested] = known.toarray(), others.toarray()
    if not np.isfinite(rows).all():
        raise ValueError("numbers that are not finite")
    return rows


def _matrix(part: str, stored: Any) -> Any:
    """Convert a two-dimensional array, or scipy's sparse matrix, to a sparse matrix of float32."""
    from scipy.sparse import csr_array

    with np.errstate(all="ignore"):  # values that are not finite are refused later
        if isinstance(stored, pickles.Array):
            return csr_array(_array(part, stored, 2).astype(np.float32))
        parts = stored.parts if isinstance(stored, pickles.Csr) else {}
        shape = parts.get("_shape", parts.get("shape"))
        if not isinstance(shape, tuple) or len(shape) != 2 or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{part} without a shape of two dimensions")
        entry, column, ends = (_array(part, parts.get(key), 1) for key in ("data", "indices", "indptr"))
        if any(index.dtype.kind not in "iu" for index in (column, ends)):
            raise ValueError(f"{part} with indices of {column.dtype} and {ends.dtype}")
        made = csr_array((entry.astype(np.float32), column, ends), shape=shape)
    made.check_format(full_check=True)
    return made


def _array(part: str, stored: Any, dimensions: int) -> np.ndarray:
    """Return an array of a file, checked for its number of dimensions."""
    if not isinstance(stored, pickles.Array):
        raise ValueError(f"{part} without an array")
    array = stored.numpy()
    if array.ndim != dimensions:
        raise ValueError(f"an array {list(array.shape)} in {part}, where it has {dimensions} dimensions")
    return array


def _edges(graph: Any) -> tuple[np.ndarray, int]:
    """Return edges, int64 `[2, edges]`, each pair once, and the number of nodes."""
    if not isinstance(graph, dict) or not graph or not all(isinstance(some, list) for some in graph.values()):
        raise ValueError("a graph that is no dict of lists")
    # A hostile pickle may share one long list among many nodes.
    if sum(map(len, graph.values())) > pickles.MAX_STEPS:
        raise ValueError("a graph with more neighbours than its file has room for")
    ends = [(a, b) for a, neighbours in graph.items() for b in neighbours]
    wrong = [end for pair in ends for end in pair if type(end) is not int or not 0 <= end < len(graph)]
    if wrong:
        got = wrong[0] if type(wrong[0]) is int else f"a {type(wrong[0]).__name__}"
        raise ValueError(f"edges of node {got}, of {len(graph)}")
    edges = np.unique(np.sort(np.array(ends, np.int64).reshape(-1, 2), axis=1), axis=0)
    return edges[edges[:, 0] != edges[:, 1]].T.copy(), len(graph)


def _numbers(path: Path, name: str) -> np.ndarray:
    """Read the node numbers of the index file."""
    fields = files.read(path, name).split()
    # Up to 18 digits fit into int64.
    if not all(text.isdigit() and len(text) <= 18 for text in fields):
        raise BlockSparseError.expected(str(path), "a file of node numbers", "something else")
    return np.array([int(text) for text in fields], np.int64)
