"""Read layouts of training runs from checkpoints, and compute distances between them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from blocksparse import checkpoint
from blocksparse.checked import integer
from blocksparse.checkpoint import part
from blocksparse.errors import BlockSparseError
from blocksparse.nn.module import BlockSparseModule
from blocksparse.state_indices import layout_of_indices
from blocksparse.topology.nnstd import Layer, layers_of, nnstd

from . import charlm, classify, gpt, language_model

LARGEST = 5_000  # output blocks of a layer; matching more takes minutes and gigabytes


@dataclass(frozen=True)
class RunLayouts:
    """Block-sparse weights of a run, by name. If each layer feeds the next (`fed`), whole nets are compared."""

    name: str
    layers: dict[str, Layer]
    fed: bool


def read(run: str | Path) -> RunLayouts:
    """Read the layouts of a run's newest checkpoint; a dense run has none."""
    path = Path(run) / "last.safetensors"
    name = Path(run).resolve().name
    with checkpoint.opened(path) as (tensors, about):
        task = checkpoint.task_of(about)
        if task.get("kind") == classify.KIND:
            model = task.get("model")
            sizes = model.get("sizes") if isinstance(model, dict) else None
            if not isinstance(sizes, list) or not sizes:
                raise BlockSparseError.expected(str(path), "the sizes of its layers", f"{model!r:.200}")
            # A layer with a connection for every few inputs has more bytes than inputs.
            most = sum(tensor.nbytes for tensor in tensors.values())
            features = integer(f"{path}, its inputs", sizes[0], 1, most + 1, "what its tensors have bytes for")
            return RunLayouts(name, _perceptron(path, part(tensors, "model."), features), fed=True)
    if task.get("kind") not in (charlm.KIND, gpt.KIND):
        wanted = "a run of train charlm, train gpt or train mlp"
        raise BlockSparseError.expected(str(path), wanted, task.get("kind", "something else"))
    modules = language_model.load(path).named_modules()
    layers = {name: layers_of(module)[0] for name, module in modules if isinstance(module, BlockSparseModule)}
    return RunLayouts(name, layers, fed=False)


def distances(nets: Sequence[RunLayouts]) -> tuple[list[list[float | None]], list[str]]:
    """Return the sparse topology distances of runs, None for pairs that cannot be compared, and the reasons."""
    matrix: list[list[float | None]] = [[None] * len(nets) for _ in nets]
    refused = {net.name: reason for net in nets if (reason := _refusal(net))}
    reasons = [f"{name}: {reason}" for name, reason in refused.items()]
    for i, a in enumerate(nets):
        for j, b in enumerate(nets[: i + 1]):
            if a.name in refused or b.name in refused:
                continue
            try:
                matrix[i][j] = matrix[j][i] = _distance(a, b)
            except BlockSparseError as error:
                reasons.append(f"{b.name} and {a.name}: {error}")
    return matrix, reasons


def _refusal(net: RunLayouts) -> str:
    """Return why a net cannot be compared, or ""."""
    most = max((layer.layout.grid[0] for layer in net.layers.values()), default=0)
    if most > LARGEST:
        return f"a layer of {most:,} blocks of outputs, more than {LARGEST:,}"
    return "" if most else "no block-sparse weights"


def _distance(a: RunLayouts, b: RunLayouts) -> float:
    """Return the distance of whole nets, or the mean distance of their layers."""
    if a.fed and b.fed:
        return nnstd(list(a.layers.values()), list(b.layers.values()))
    if list(a.layers) != list(b.layers):
        raise BlockSparseError.expected("nets", "the same layers", f"{', '.join(a.layers)} and {', '.join(b.layers)}")
    return float(np.mean([nnstd(a.layers[name], b.layers[name]) for name in a.layers]))


def _perceptron(path: Path, tensors: dict[str, Tensor], features: int) -> dict[str, Layer]:
    """Return the layers of a `SparseMLP`; pruning may have changed their sizes, which are those of the biases."""
    layers: dict[str, Layer] = {}
    names = {match[0] for name in tensors if (match := re.match(r"layers\.\d{1,9}(?=\.)", name))}
    for name in sorted(names, key=_number):
        if (bias := tensors.get(f"{name}.bias")) is None:
            raise BlockSparseError.expected(f"{path}, {name}", "a bias", "none")
        outputs = bias.numel()
        crow, cols, values = (tensors.get(f"{name}.{key}") for key in ("crow_indices", "col_indices", "values"))
        if crow is not None:
            if cols is None or values is None or values.dim() != 3 or not outputs or not values.numel():
                raise BlockSparseError.expected(
                    f"{path}, {name}", "blocks with their indices, and outputs", "something else"
                )
            height, width = values.shape[1:]
            grid = -(-outputs // height), -(-features // width)
            layout = layout_of_indices(crow.clone(), cols.clone(), grid, (height, width))
            whole = layout.shape == (outputs, features)
            used = None if whole else (np.arange(layout.shape[0]) < outputs, np.arange(layout.shape[1]) < features)
            layers[name] = Layer(layout, used)
        features = outputs
    return layers


def _number(name: str) -> int:
    return int(name.split(".")[1])
