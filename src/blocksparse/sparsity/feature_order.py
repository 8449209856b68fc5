"""A search for an order of hidden features in which block-sparse weights keep more of their squared norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..checked import check_model, number
from ..errors import BlockSparseError
from ..nn.module import BlockSparseModule
from ..surgery.connections import FeatureGroup, Port, reorderable, trace_features
from ..surgery.model_tools import copy_model, evaluation_mode, parameter_device
from ..surgery.prunable import Prunable, Skip, prunable, skip_by_name
from .calibration.calibrate import arguments_of, batch_error, count_positional, parts_of, progress, sample_count

# The samples of an example to follow features on at first; all of them if these do not reach all layers.
SAMPLES = 8
# Steps of the search in a group. In the first ones blocks near the threshold count in part.
SOFT_STEPS, STEPS = 8, 12
# Random pairings of features per step; a pair exchanges its places if more is kept.
PAIRINGS = 30
# A new order must keep at least this much more, relative to the old one.
MIN_GAIN = 1e-3
# Outputs on the example may differ by this fraction of the largest output.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


@torch.no_grad()
def permute_features(
    model: nn.Module,
    example: Any,
    density: float = 0.1,
    block_size: int | tuple[int, int] = 32,
    *,
    skip: Skip = (),
) -> nn.Module:
    """Reorder hidden features so that large weights share blocks; outputs stay equal up to rounding.

    Call it before `sparsify`, which then keeps more of each weight at the same density. The hidden units between two
    linear layers, the channels between convolutions, and the features inside an attention head can be reordered
    without cost: rows of one weight and columns of the next move together, with biases and batch norms. The search
    assigns features with similar large weights to the same blocks.

    Args:
        model: a dense model; it stays as it is. Frozen parameters stay in their order if others are trained.
        example: inputs of the model, a few samples: a tensor, a tuple or list of arguments, or a dict of arguments by
            name. A call on them shows which layers read which features.
        density: the density to optimize for, 0.1 by default.
        block_size: an int or (rows, columns), 32 by default.
        skip: modules, names or shell patterns of weights that will stay dense.

    Returns:
        A copy of the model.

    Raises:
        BlockSparseError: a density out of range, an example that the model does not accept or for which it does not use
            all weights, or a model whose outputs change with the order, because functions that are not PyTorch's use
            its features.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
        >>> model[0].weight.data[::2] = 0  # every second hidden unit
        >>> ordered = bs.sparsity.permute_features(model, torch.randn(4, 32), density=0.5)
        >>> bs.from_zeros(ordered, 32, force=True)[0].layout.density
        0.5

    Source: Okanovic et al., High performance unstructured SpMM computation using tensor cores (2024), which reorders
    rows; here rows and columns of neighbors move together, as in Pool, Yu (2021).
    """
    check_model(model)
    density, skip = number("density", density, 0, 1), skip_by_name(model, skip)
    permuted = copy_model(model)
    args, kwargs = arguments_of(example, count_positional(model), parameter_device(model))
    before = _outputs(permuted, example, args, kwargs)
    if not all(bool(each.isfinite().all()) for each in before):
        raise BlockSparseError.expected("model", "finite outputs for the example", "inf or nan among them")
    weights = {id(weight.tensor): weight for weight in prunable(permuted, block_size, skip)}
    for group in progress(_find_groups(permuted, args, kwargs, weights), "features ordered:"):
        order = _best_order(group, weights, density)
        if order is not None:
            group.permute(order)
    for old, new in zip(before, _outputs(permuted, example, args, kwargs), strict=True):
        scale = old.abs().max().clamp(min=torch.finfo(old.dtype).tiny)
        if not bool((old - new).abs().max() <= TOLERANCE.get(old.dtype, 0.05) * scale):
            expected = "a model whose features can be reordered (PyTorch's functions between its layers)"
            raise BlockSparseError.expected("model", expected, f"{type(model).__name__}, whose outputs change")
    return permuted


def reorder_features(
    model: nn.Module, example: Any, density: float, block_size: int | tuple[int, int], skip: Skip
) -> nn.Module:
    """Return a copy of a model in which large weights share blocks, or the model itself if that is not possible."""
    few = list(islice(parts_of([example], SAMPLES), 1)) if sample_count(example) > SAMPLES else []
    for samples in (*few, example):
        # Outputs would change, the samples do not show all layers, or not all arguments have an axis of samples.
        with suppress(BlockSparseError):
            return permute_features(model, samples, density, block_size, skip=skip)
    return model


def _find_groups(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], weights: Mapping[int, Prunable]
) -> list[FeatureGroup]:
    """Return the groups of features that may be reordered.

    Values of block-sparse layers stay in their order, and so do frozen parameters if others are trained.

    Raises:
        BlockSparseError: a model that cannot be traced, or one of these weights that the call does not use, so that it
            is not known which features it reads.
    """
    try:
        found, trace = trace_features(model, tuple(args), kwargs)
    except Exception as error:  # modules may refuse to be traced
        raise BlockSparseError.expected("model", "a model whose calls can be traced", error) from error
    if unused := [weights[each].name for each in trace.unseen & weights.keys()]:
        expected = f"inputs for which the model uses all weights (more samples, or skip={unused[:1]})"
        raise BlockSparseError.expected("example", expected, f"some for which it does not use {unused[0]}")
    groups = reorderable(found)
    frozen: set[int] = set()
    if any(parameter.requires_grad for parameter in model.parameters()):
        frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    return [
        group
        for group in groups
        if not any(isinstance(port.module, BlockSparseModule) for port in group.ports)
        and not any(id(tensor) in frozen for port in group.ports for tensor, _ in port.tensors)
    ]


def _outputs(model: nn.Module, example: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the outputs of a model in evaluation mode that are floating-point tensors and not empty."""
    with evaluation_mode(model):
        try:
            leaves = tree_leaves(model(*args, **kwargs))
        except Exception as error:  # the user's module may raise anything
            raise batch_error(model, example, error) from error
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]


def _best_order(group: FeatureGroup, weights: Mapping[int, Prunable], density: float) -> np.ndarray | None:
    """Return an order of a group's features that keeps more of the weights, or None if none was found."""
    energies = [
        energy
        for axis, ports in enumerate((group.producers, group.consumers))
        for port in ports
        if port.tensors and (weight := weights.get(id(port.tensors[0][0]))) is not None
        for energy in _energies(port, weight, axis)
    ]
    search = _Search(energies, group.sections, density) if energies else None
    if search is None or len(search.capacity) < 2:
        return None
    first = best = search.cell_of_place
    first_kept = best_kept = search.kept(first)
    for start in (search.cell_of_place, search.sorted_by_energy()):
        cells = start
        for step in range(STEPS):
            gain = search.gains(cells, 2.0**step if step < SOFT_STEPS else None)
            cells = _exchange(gain, search.assign(gain))
            if (kept := search.kept(cells)) > best_kept:
                best, best_kept = cells, kept
    if best_kept < (1 + MIN_GAIN) * first_kept:
        return None
    order = np.empty(group.size, np.int64)
    order[np.argsort(first.numpy(), kind="stable")] = np.argsort(best.numpy(), kind="stable")
    return order


def _energies(port: Port, weight: Prunable, axis: int) -> list[tuple[Tensor, np.ndarray]]:
    """Return the squared norms of each feature in the blocks across, and the line of blocks of each feature's place.

    They are fractions of the weight's squared norm, `[features, blocks]`; one tensor for each line of a feature, such
    as query and key. The columns of a flattened channel are close together, so they count as one line.
    """
    squares = weight.matrix().detach().cpu().float().square()
    squares = squares.flatten(2).sum(2) if squares.dim() > 2 else squares
    squares = (squares / squares.sum().clamp(min=torch.finfo(torch.float32).tiny)).movedim(axis, 0)
    width, line = weight.block_shape[1 - axis], weight.blocks.block_of_line(axis)
    positions = port.positions
    lines = [positions] if axis == 1 else list(positions.T[:, :, None])
    return [(_sum_blocks(squares[torch.from_numpy(each)].sum(1), width), line[each[:, 0]]) for each in lines]


def _sum_blocks(values: Tensor, width: int) -> Tensor:
    """Return the sums over groups of columns, `[rows, columns / width]`."""
    return F.pad(values, (0, -values.shape[1] % width)).unflatten(1, (-1, width)).sum(2)


class _Search:
    """A search for the cell of each feature: places whose lines are in the same blocks of all weights.

    Attributes:
        cell_of_place: int64 `[features]`, the cell of each feature's present place.
        capacity: int64 `[cells]`, the number of places in each cell.
    """

    def __init__(self, energies: list[tuple[Tensor, np.ndarray]], sections: np.ndarray, density: float):
        self.energies, self.density = [energy for energy, _ in energies], density
        keys = np.stack([sections, *(line for _, line in energies)], 1)
        _, first, cells = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        self.cell_of_place = torch.from_numpy(cells.reshape(-1))
        self.capacity = torch.bincount(self.cell_of_place)
        self.sections = torch.from_numpy(sections)
        self.section_of_cell = self.sections[torch.from_numpy(first)]
        self.line_of_cell = [
            torch.from_numpy(np.unique(line[first], return_inverse=True)[1].reshape(-1)) for _, line in energies
        ]

    def _blocks(self, cells: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return the squared norms of a weight's blocks, and those of the blocks that are kept, in falling order."""
        lines, energy = self.line_of_cell[index], self.energies[index]
        blocks = energy.new_zeros(int(lines.max()) + 1, energy.shape[1]).index_add_(0, lines[cells], energy)
        return blocks, blocks.flatten().topk(max(1, round(self.density * blocks.numel()))).values

    def kept(self, cells: Tensor) -> float:
        """Return the sum over weights of the fraction of its squared norm that it keeps."""
        return sum(float(self._blocks(cells, index)[1].sum()) for index in range(len(self.energies)))

    def gains(self, cells: Tensor, sharpness: float | None) -> Tensor:
        """Return what each feature adds to each cell, `[features, cells]`, with -inf for cells of other sections.

        Blocks count if they are kept now; with a sharpness, those near the threshold count in part.
        """
        gain = self.energies[0].new_zeros(len(cells), len(self.capacity))
        for index, (lines, energy) in enumerate(zip(self.line_of_cell, self.energies, strict=True)):
            blocks, kept = self._blocks(cells, index)
            if sharpness is None:
                counts = (blocks >= kept[-1]).float()
            else:
                counts = ((blocks / kept[-1].clamp(min=torch.finfo(kept.dtype).tiny) - 1) * sharpness).sigmoid()
            gain += energy @ counts[lines].T
        return gain.masked_fill_(self.sections[:, None] != self.section_of_cell, -torch.inf)

    def sorted_by_energy(self) -> Tensor:
        """Return cells such that features of large weights come first in each section."""
        energy = sum(energy.sum(1) for energy in self.energies)
        features = np.lexsort((-energy.cpu().numpy(), self.sections.numpy()))  # type: ignore[union-attr]
        places = np.lexsort((self.cell_of_place.numpy(), self.sections.numpy()))
        cells = torch.empty_like(self.cell_of_place)
        cells[torch.from_numpy(features)] = self.cell_of_place[torch.from_numpy(places)]
        return cells

    def assign(self, gain: Tensor) -> Tensor:
        """Assign features to their best cells until these are full.

        Features with the largest difference between their best and second-best cell are first.
        """
        cells, room = torch.empty_like(self.cell_of_place), self.capacity.clone()
        gain, left = gain.clone(), torch.arange(len(cells), device="cpu")
        while left.numel():
            best, second = gain[left].topk(2, 1).values.unbind(1)
            order = (best - second).argsort(descending=True)
            wanted = gain[left].argmax(1)[order]
            by_cell = wanted.argsort(stable=True)
            rank = torch.empty_like(by_cell)
            rank[by_cell] = torch.arange(len(by_cell), device="cpu") - torch.searchsorted(
                wanted[by_cell], wanted[by_cell]
            )
            fits = rank < room[wanted]
            cells[left[order[fits]]] = wanted[fits]
            room -= torch.bincount(wanted[fits], minlength=len(room))
            left = left[order[~fits]]
            gain[:, room == 0] = -torch.inf
        return cells


def _exchange(gain: Tensor, cells: Tensor) -> Tensor:
    """Exchange the cells of random pairs of features where this gains."""
    generator = torch.Generator().manual_seed(0)
    cells = cells.clone()
    for _ in range(PAIRINGS):
        a, b = torch.randperm(len(cells), generator=generator, device="cpu")[: len(cells) // 2 * 2].view(2, -1)
        better = gain[a, cells[b]] + gain[b, cells[a]] > gain[a, cells[a]] + gain[b, cells[b]]
        a, b = a[better], b[better]
        cells[a], cells[b] = cells[b], cells[a]
    return cells
