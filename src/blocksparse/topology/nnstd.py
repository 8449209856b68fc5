"""The neural network sparse topology distance (NNSTD) of two networks.

Neurons with the same inputs do the same work, whatever their index in the layer. So each layer's neurons are matched
first, and the next layer's inputs are renumbered by the match. Neurons of one block have the same inputs and outputs.
So layers are compared in units: the largest groups of neurons that divide the blocks and padding of both networks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from ..errors import BlockSparseError
from ..layout import BlockLayout, import_scipy_sparse
from ..nn.module import BlockSparseModule
from .graph import check_level, matrix_of, refined

# Above this density dense products count common inputs faster than sparse ones.
DENSE_FROM = 0.1


@dataclass(frozen=True)
class Layer:
    """A layout, and bool masks of its outputs and inputs that are not padding; None if there is no padding."""

    layout: BlockLayout
    used: tuple[np.ndarray, np.ndarray] | None = None


Net = BlockLayout | nn.Module | Layer | Iterable[BlockLayout | nn.Module | Layer]


@dataclass(frozen=True)
class Matching:
    """The distance of two networks and their matched neurons; see `nnstd_matching`."""

    distance: float
    """Mean over the layers, from 0 (the same connections) to 1 (none in common)."""
    layers: tuple[float, ...]
    """Distance of each layer."""
    matches: tuple[np.ndarray, ...]
    """Match of each layer, int64 `[n_out]`: neuron (or block) `match[i]` of the second network is matched to i."""
    ambiguous: tuple[int, ...]
    """For each layer, the number of neurons (or blocks) with the same inputs as another one of the layer, in both
    networks; neurons that share a block in both do not count. Their match is arbitrary, which may increase the distance
    of the next layer."""


def nnstd(a: Net, b: Net, *, level: str = "neuron") -> float:
    """Return the sparse topology distance of two networks, from 0 to 1.

    The distance of two neurons with sets of inputs A and B is |A xor B| / |A or B|, or 0 if both are empty. In each
    layer the neurons of the two networks are matched with the least sum of distances (Hungarian method), and the next
    layer's inputs of the second network are renumbered by the match. A layer's distance is the mean over its neurons,
    that of the networks the mean over their layers.

    A renumbered copy has distance 0 if all neurons of a layer have different, non-empty inputs. Otherwise the match is
    arbitrary; `nnstd_matching` counts such neurons. Time grows with the cube and memory with the square of a layer's
    neurons, where neurons that share a block in both networks count once.

    Args:
        a, b: a layout; a list of layouts (the layers from the input on); a module; or a model, whose block-sparse
            weights are compared in the order of `model.modules()`, without padding. Sizes must be equal, blocks may
            differ.
        level: "neuron" (default), or "block" to match whole blocks with padding, for networks with the same blocks.
            Without padding the distance is the same.

    Raises:
        BlockSparseError: different sizes or numbers of layers; layers that do not feed each other; no block-sparse
            weight; different blocks on level "block"; scipy is missing (`pip install scipy`).

    >>> import numpy as np, blocksparse as bs
    >>> net = [bs.patterns.random((64, 64), block_size=1, density=0.2, seed=seed) for seed in (0, 1)]
    >>> other = [bs.patterns.random((64, 64), block_size=1, density=0.2, seed=seed) for seed in (2, 3)]
    >>> bs.topology.nnstd(net, net), 0.7 < bs.topology.nnstd(net, other) < 0.9
    (0.0, True)
    >>> order = np.random.default_rng(0).permutation(64)
    >>> shuffled = [bs.BlockLayout(net[0].mask()[order], 1), bs.BlockLayout(net[1].mask()[:, order], 1)]
    >>> bs.topology.nnstd(net, shuffled)
    0.0

    Source: Liu, van der Lee, Yaman, Atashgahi, Ferraro, Sokar, Pechenizkiy, Mocanu, Topological insights into sparse
    neural networks (2020).
    """
    return nnstd_matching(a, b, level=level).distance


def nnstd_matching(a: Net, b: Net, *, level: str = "neuron") -> Matching:
    """Return the distance of `nnstd`, that of each layer, and the matched neurons.

    Args:
        a, b, level: see `nnstd`. Neurons are numbered without padding, blocks with it.

    Raises:
        BlockSparseError: as for `nnstd`.

    >>> import blocksparse as bs
    >>> a = bs.BlockLayout([[1, 1, 0], [0, 1, 1]], block_size=1)
    >>> b = bs.BlockLayout([[0, 1, 1], [1, 0, 0]], block_size=1)
    >>> found = bs.topology.nnstd_matching(a, b)
    >>> found.distance, found.matches[0], found.ambiguous
    (0.25, array([1, 0]), (0,))
    """
    check_level(level)
    first, second = layers_of(a), layers_of(b)
    units = _units(first, second, level)
    import_scipy_sparse()  # says how to get scipy
    from scipy.optimize import linear_sum_assignment

    distances: list[float] = []
    matches: list[np.ndarray] = []
    ambiguous: list[int] = []
    match: np.ndarray | None = None
    for i, pair in enumerate(zip(first, second, strict=True)):
        inputs, other = (_input_matrix(layer, (units[i + 1], units[i]), level) for layer in pair)
        if match is not None:
            other = other[:, match]
        cost = _distances(inputs, other)
        row, match = linear_sum_assignment(cost)
        distances.append(float(cost[row, match].mean()))
        each = units[i + 1] if level == "neuron" else 1
        matches.append((match[:, None] * each + np.arange(each)).ravel())
        ambiguous.append((_count_repeated_rows(inputs) + _count_repeated_rows(other)) * each)
    return Matching(float(np.mean(distances)), tuple(distances), tuple(matches), tuple(ambiguous))


def layers_of(net: Net) -> tuple[Layer, ...]:
    """Return the layers of a network that `nnstd` accepts; later changes of a model do not affect them."""
    if isinstance(net, Layer):
        return (net,)
    if isinstance(net, BlockLayout):
        return (Layer(net),)
    if isinstance(net, nn.Module):
        layers = tuple(_layer(module) for module in net.modules() if isinstance(module, BlockSparseModule))
        if not layers:
            raise BlockSparseError.expected("net", "a model with block-sparse weights", type(net).__name__)
        return layers
    if not isinstance(net, Iterable) or isinstance(net, str):
        raise BlockSparseError.expected("net", "a layout, a model, or a list of its layers", type(net).__name__)
    layers = tuple(layer for each in net for layer in layers_of(each))
    if not layers:
        raise BlockSparseError.expected("net", "one layer or more", "none")
    return layers


def _layer(module: BlockSparseModule) -> Layer:
    """Return the layout and the padding masks of a module."""
    if module.used is None:
        return Layer(module.layout)
    out, in_ = module.used
    return Layer(module.layout, (out.numpy(), in_.numpy()))


def _units(first: Sequence[Layer], second: Sequence[Layer], level: str) -> list[int]:
    """Return the size of the units of the networks' inputs and of each layer's outputs, after checks of all sizes."""
    if len(first) != len(second):
        raise BlockSparseError.expected("nets", "the same number of layers", f"{len(first)} and {len(second)}")
    units = [0] * (len(first) + 1)
    for i, (one, other) in enumerate(zip(first, second, strict=True)):
        if level == "block" and one.layout.block_shape != other.layout.block_shape:
            got = f"{one.layout.block_shape} and {other.layout.block_shape} in layer {i}"
            raise BlockSparseError.expected("nets", 'the same blocks for level "block"', got)
        if _sizes(one, level) != _sizes(other, level):
            got = f"{_sizes(one, level)} and {_sizes(other, level)} (out, in) in layer {i}"
            raise BlockSparseError.expected("nets", "layers of the same sizes", got)
        for layer in (one, other):
            units[i + 1] = math.gcd(units[i + 1], _unit(layer, 0, level))
            units[i] = math.gcd(units[i], _unit(layer, 1, level))
    for i, (before, after) in enumerate(pairwise(first)):
        outputs, inputs = _sizes(before, level)[0], _sizes(after, level)[1]
        if outputs != inputs:
            got = f"{outputs} outputs of layer {i} and {inputs} inputs of the next"
            raise BlockSparseError.expected("net", "layers that feed each other (or compare them one by one)", got)
    return units


def _sizes(layer: Layer, level: str) -> tuple[int, ...]:
    """Return (out, in) of a layer in blocks, or in neurons without padding."""
    if level == "block":
        return layer.layout.grid
    return layer.layout.shape if layer.used is None else tuple(int(used.sum()) for used in layer.used)


def _unit(layer: Layer, axis: int, level: str) -> int:
    """Return the largest number that divides the block and every position where padding begins or ends."""
    block = layer.layout.block_shape[axis]
    if level == "block" or layer.used is None:
        return block
    return int(np.gcd.reduce(np.flatnonzero(np.diff(layer.used[axis])) + 1, initial=block))


def _input_matrix(layer: Layer, units: tuple[int, int], level: str) -> Any:
    """Return a CSR matrix with a 1 for each unit that is an input of a unit, float32, without padding."""
    matrix = matrix_of(refined(layer.layout, units) if level == "neuron" else layer.layout)
    if level == "neuron" and layer.used is not None:
        out, in_ = (np.flatnonzero(used[::unit]) for used, unit in zip(layer.used, units, strict=True))
        matrix = matrix[out][:, in_]
    return matrix


def _distances(a: Any, b: Any) -> np.ndarray:
    """Return |A xor B| / |A or B| for the inputs A of each row of `a` and B of each row of `b`, float64."""
    dense = min(a.nnz, b.nnz) > DENSE_FROM * math.prod(a.shape)
    common = a.toarray() @ b.toarray().T if dense else (a @ b.T).toarray()
    either = np.diff(a.indptr)[:, None] + np.diff(b.indptr) - common.astype(np.float64)
    return np.divide(either - common, either, out=np.zeros_like(either), where=either > 0)


def _count_repeated_rows(matrix: Any) -> int:
    """Count the rows that equal another row."""
    matrix.sort_indices()
    indices, starts = matrix.indices, matrix.indptr
    rows = Counter(indices[start:end].tobytes() for start, end in pairwise(starts))
    return sum(count for count in rows.values() if count > 1)
