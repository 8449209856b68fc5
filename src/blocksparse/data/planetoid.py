"""Citation graphs (Cora, Citeseer, Pubmed) as the planetoid files have them."""

from __future__ import annotations

import collections
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BlockSparseError
from ..layout import import_scipy_sparse
from .table import first

NAMES = ("cora", "citeseer", "pubmed")


@dataclass(frozen=True)
class Graph:
    """Papers that cite each other.

    Args:
        name: of the graph.
        features: float32 `[nodes, features]`, which words a paper has.
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
    """A citation graph.

    Nodes of which the files have neither words nor a class, Citeseer has some, are of class 0 and without words.

    Args:
        name: "cora", "citeseer" or "pubmed".
        data_dir: a folder with the files `ind.NAME.*` of https://github.com/kimiyoung/planetoid, or with a `planetoid`
            that has them.

    Raises:
        BlockSparseError: an unknown name, no folder, a file that is missing or broken, or has anything but arrays.

    Source: Yang, Cohen, Salakhutdinov, Revisiting semi-supervised learning with graph embeddings (2016).
    """
    if name not in NAMES:
        raise BlockSparseError.expected("graph", f"one of {', '.join(NAMES)}", repr(name))
    if data_dir is None:
        raise BlockSparseError.expected(name, "its files in a folder given by --data-dir", "none")
    places = [Path(data_dir) / "planetoid", Path(data_dir)]
    folder = first(name, [place / f"ind.{name}.graph" for place in places]).parent
    paths = {part: folder / f"ind.{name}.{part}" for part in ("allx", "ally", "tx", "ty", "graph")}
    found = {part: _unpickled(path) for part, path in paths.items()}
    tested = _numbers(folder / f"ind.{name}.test.index")
    try:
        return _graph(name, found, tested)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BlockSparseError.expected(str(folder), f"the parts of {name}, which fit each other", error) from error


def _graph(name: str, found: dict[str, Any], tested: np.ndarray) -> Graph:
    sparse = import_scipy_sparse()
    known, count = found["allx"].shape[0], len(found["graph"])
    # The rows of tx and ty are in the order of the index file; between its numbers there may be nodes of neither.
    features = np.zeros((count, found["allx"].shape[1]), np.float32)
    labels = np.zeros((count, found["ally"].shape[1]))
    for into, all_, some in ((features, "allx", "tx"), (labels, "ally", "ty")):
        parts = [part.toarray() if sparse.issparse(part) else part for part in (found[all_], found[some])]
        into[:known], into[tested] = parts
    ends = [(a, b) for a, neighbours in found["graph"].items() for b in neighbours]
    edges = np.unique(np.sort(np.asarray(ends, np.int64), axis=1), axis=0)
    edges = edges[edges[:, 0] != edges[:, 1]]
    if edges.size and not 0 <= edges.min() <= edges.max() < count:
        raise ValueError(f"edges of nodes {edges.min()} to {edges.max()}, of {count}")
    return Graph(name, torch.from_numpy(features), torch.from_numpy(labels.argmax(1)), torch.from_numpy(edges.T.copy()))


def _unpickled(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return _Arrays(file, encoding="latin1").load()
    except BlockSparseError:
        raise
    except OSError as error:
        raise BlockSparseError.expected(str(path), "a readable file", error.strerror or error) from error
    except Exception as error:  # of a broken pickle anything may come
        raise BlockSparseError.expected(str(path), "a whole pickle of planetoid", error) from error


class _Arrays(pickle.Unpickler):
    """Of what a pickle may call, only what arrays, sparse matrices and dicts are made of: others run as programs."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "csr_matrix" and module.startswith("scipy.sparse"):
            return import_scipy_sparse().csr_matrix
        made_of = {
            "_reconstruct": np.empty(0).__reduce__()[0],
            "ndarray": np.ndarray,
            "dtype": np.dtype,
            "scalar": np.float64(0).__reduce__()[0],
            "defaultdict": collections.defaultdict,
            "list": list,
            "encode": _latin1,
        }
        if name in made_of and module.split(".")[0] in ("numpy", "collections", "__builtin__", "builtins", "_codecs"):
            return made_of[name]
        raise BlockSparseError.expected("planetoid", "a pickle of arrays and dicts", f"one that calls {module}.{name}")


def _latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


def _numbers(path: Path) -> np.ndarray:
    try:
        return np.array(path.read_text(encoding="ascii").split(), dtype=np.int64)
    except (OSError, ValueError) as error:
        raise BlockSparseError.expected(str(path), "a file of node numbers", error) from error
