"""Selects the blocks that each weight of a model keeps: by given layouts, or by scores and densities."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..checked import positive_fraction
from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout
from ..sparsity.selection import check_density, rank_scores, top_blocks
from ..sparsity.sparse_training.densities import erk
from ..surgery.prunable import Prunable

Criterion = str | Mapping[str, Tensor] | Callable[[str, Tensor], Tensor]
Weights = Mapping[str, Prunable]
Layouts = dict[str, BlockLayout]

CRITERIA = ("l2", "magnitude", "max", "lamp")
SCOPES = ("careful", "global", "layer", "erk")

# The scope "careful", measured in docs/results/one_shot.md: each weight keeps at least this fraction of the density,
MIN_DENSITY_FRACTION = 0.5
# and each row of blocks loses at most this fraction of its squared norm.
MAX_ROW_LOSS = 0.05

# A weight counts as trained if its largest singular value exceeds that of random numbers by this many deviations.
TRAINED_DEVIATIONS = 6.0
POWER_ITERATIONS = 12


class Selection(ABC):
    """A rule that gives weights their layouts.

    Attributes:
        weights: the weights that may become block-sparse, by name.
        target_density: the density that they should have together.
    """

    weights: Weights
    target_density: float

    @abstractmethod
    def layouts(self, names: Iterable[str]) -> Layouts:
        """Return the layouts of these weights if the others stay dense."""

    def excess(self, name: str) -> str:
        """Return why a weight needs more blocks than the density allows, or ""."""
        return ""

    @property
    def rounding(self) -> float:
        """Half a block of each weight as a density: no density can be met more closely."""
        half_blocks = sum(weight.blocks.size / 2 for weight in self.weights.values())
        return half_blocks / sum(map(padded_size, self.weights.values()))

    def density_of(self, layouts: Layouts) -> float:
        """Return the density of all weights together if some have these layouts and the others are dense."""
        dense = sum(weight.tensor.numel() for name, weight in self.weights.items() if name not in layouts)
        padded = {name: padded_size(weight) for name, weight in self.weights.items() if name in layouts}
        stored = sum(layouts[name].density * size for name, size in padded.items())
        return (stored + dense) / (sum(padded.values()) + dense)


@dataclass(frozen=True)
class Plan:
    """The layouts that weights get, and why other weights stay dense.

    Args:
        selection: the rule that selected the blocks.
        layouts: the layouts by name of the weight.
        reasons: why weights stay dense, by name.
        unexpected: those reasons that a warning always reports.
    """

    selection: Selection
    layouts: Layouts
    reasons: Mapping[str, str] = field(default_factory=dict)
    unexpected: Mapping[str, str] = field(default_factory=dict)

    def leave_dense(self, reasons: Mapping[str, str]) -> Plan:
        """Return the plan without the layouts of some weights, with the reasons why these stay dense."""
        layouts = {name: layout for name, layout in self.layouts.items() if name not in reasons}
        excess = {name: self.selection.excess(name) for name in reasons}
        added = {name: f"{reason}; it {excess[name]}" if excess[name] else reason for name, reason in reasons.items()}
        return replace(self, layouts=layouts, reasons={**self.reasons, **added})


class FixedSelection(Selection):
    """The layouts that a user gives for some of the weights."""

    def __init__(self, weights: Weights, layouts: Mapping[str, BlockLayout]):
        if not isinstance(layouts, Mapping):
            raise BlockSparseError.expected("layouts", "BlockLayouts by name of the weight", type(layouts).__name__)
        named = _select_names("layouts", layouts, weights)
        for name, weight in named.items():
            check_layout(layouts[name])
            weight.check_fit(layouts[name])
            check_finite_weight(weight)
        self.weights = {name: weight.in_blocks(layouts[name].block_shape) for name, weight in named.items()}
        self._layouts = layouts
        self.target_density = self.density_of(self.layouts(self.weights))

    def layouts(self, names: Iterable[str]) -> Layouts:
        return {name: self._layouts[name] for name in names}


class ScoredSelection(Selection):
    """The blocks with the highest scores.

    Args:
        weights: the dense weights by name.
        density: the density of all weights, or of each by name.
        criterion: the scores; see `sparsify`.
        scope: the weights that compete for blocks; see `sparsify`.
        limit_loss: whether, in the scope "careful", trained weights keep more blocks if they would lose too much.
    """

    def __init__(
        self,
        weights: Weights,
        density: float | Mapping[str, float],
        criterion: Criterion,
        scope: str,
        limit_loss: bool = False,
    ):
        if scope not in SCOPES:
            raise BlockSparseError.expected("scope", f"one of {', '.join(SCOPES)}", repr(scope))
        if not isinstance(criterion, Mapping) and not callable(criterion) and criterion not in CRITERIA:
            expected = f"one of {', '.join(CRITERIA)}, scores by name or a function"
            raise BlockSparseError.expected("criterion", expected, repr(criterion))
        self.weights = _select_names("density", density if isinstance(density, Mapping) else weights, weights)
        self.density, self.scope = density, scope
        self.blocks = {name: weight.blocks for name, weight in self.weights.items()}
        for value in density.values() if isinstance(density, Mapping) else [density]:
            positive_fraction("density", value)
        if isinstance(density, Mapping):
            for name, value in density.items():
                check_density(value, {name: self.blocks[name]}, "layer")
        elif scope in ("careful", "global"):
            check_density(density, self.blocks, "global")
        self.scores = {name: self._score(name, criterion) for name in self.weights}
        self._needed: dict[str, Tensor] = {}
        if (
            limit_loss
            and scope == "careful"
            and not isinstance(density, Mapping)
            and _is_trained(self.weights.values())
        ):
            self._needed = {name: _needed_blocks(weight) for name, weight in self.weights.items()}
        if isinstance(density, Mapping):
            sizes = {name: padded_size(weight) for name, weight in self.weights.items()}
            density = sum(size * density[name] for name, size in sizes.items()) / sum(sizes.values())
        self.target_density = density

    def layouts(self, names: Iterable[str]) -> Layouts:
        """Return the layouts of these weights, which compete for the density by the rule of the scope."""
        names = list(names)
        scores, blocks = {name: self.scores[name] for name in names}, {name: self.blocks[name] for name in names}
        densities: Sequence[float] = []
        masks: dict[str, Tensor] = {}
        if isinstance(self.density, Mapping):
            densities = [self.density[name] for name in names]
        elif self.scope == "erk":
            shapes = [(*self.weights[name].shape, *self.weights[name].matrix().shape[2:]) for name in names]
            densities = erk(shapes, self.density, self.weights[names[0]].block_shape)
        elif self.scope == "layer":
            densities = [self.density] * len(names)
        else:
            if self.scope == "careful":
                minimum = MIN_DENSITY_FRACTION * self.density
                scores = {name: _with_minimum(score, minimum) for name, score in scores.items()}
            masks = top_blocks(scores, blocks, self.density, "global")
        for name, density in zip(names, densities, strict=False):
            masks |= top_blocks({name: scores[name]}, {name: blocks[name]}, density, "layer")
        return {
            name: BlockLayout(mask | self._needed.get(name, mask), self.weights[name].block_shape)
            for name, mask in masks.items()
        }

    def excess(self, name: str) -> str:
        if name not in self._needed:
            return ""
        fraction = float(self._needed[name].float().mean())
        return f"needs {fraction:.0%} of its blocks to preserve {1 - MAX_ROW_LOSS:.0%} of each row's squared norm"

    def _score(self, name: str, criterion: Criterion) -> Tensor:
        """Return the scores of a weight's blocks, `[out_blocks, in_blocks]`."""
        weight, blocks = self.weights[name], self.blocks[name]
        check_finite_weight(weight)
        if isinstance(criterion, str):
            numbers = blocks.fold(weight.tensor.detach()).float().abs()
            if criterion == "lamp":
                return _lamp(numbers.double().square().sum(blocks.inside))
            if criterion == "max":
                return numbers.amax(blocks.inside)
            # Blocks of convolutions have more numbers but compete with others, so scores are means.
            return numbers.mean(blocks.inside) if criterion == "magnitude" else numbers.square().mean(blocks.inside)
        if isinstance(criterion, Mapping):
            if name not in criterion:
                raise BlockSparseError.expected("criterion", f"scores of {name}", f"those of {sorted(criterion)}")
            scores = criterion[name]
        else:
            scores = criterion(name, weight.padded().detach().clone())  # the function may write to its argument
        if not isinstance(scores, Tensor) or tuple(scores.shape) != weight.grid or not bool(scores.isfinite().all()):
            got = type(scores).__name__ if not isinstance(scores, Tensor) else f"{list(scores.shape)}"
            raise BlockSparseError.expected(f"the scores of {name}", f"finite numbers, {list(weight.grid)}", got)
        return scores.detach().double()


def check_finite_weight(weight: Prunable) -> None:
    """Raise a BlockSparseError that names the weight if it has values that are not finite."""
    if not bool(weight.tensor.isfinite().all()):
        raise BlockSparseError.expected(f"the weight {weight.name}", "finite numbers", "inf or nan among them")


def _lamp(squares: Tensor) -> Tensor:
    """Return LAMP scores: the fraction of each block in the squares that remain once all smaller blocks are gone."""
    ranked, order = squares.flatten().sort(descending=True, stable=True)
    fractions = ranked / ranked.cumsum(0).clamp(min=torch.finfo(ranked.dtype).tiny)
    return torch.empty_like(fractions).scatter_(0, order, fractions).view_as(squares)


def _with_minimum(scores: Tensor, density: float) -> Tensor:
    """Return scores with infinity for a weight's best blocks up to this density, first the best of each row.

    Blocks of score -inf are not stored, so they stay as they are.
    """
    count = max(1, math.ceil(density * scores.numel()))
    sure, rank = torch.zeros_like(scores, dtype=torch.bool), rank_scores(scores)
    if count >= len(scores):
        sure[torch.arange(len(scores), device="cpu"), rank.argmax(1)] = True
    rest = rank.masked_fill(sure, rank.numel()).flatten()
    best = sure.view(-1).index_fill(0, rest.topk(count).indices, True).view_as(sure)
    return scores.masked_fill(best & (scores > -torch.inf), torch.inf)


def _needed_blocks(weight: Prunable) -> Tensor:
    """Return a mask of the blocks without which a row of blocks would lose too much of its squared norm."""
    squares, order = weight.blocks.sums(weight.tensor.detach().double().square()).sort(1)
    lost = squares.cumsum(1) <= MAX_ROW_LOSS * squares.sum(1, keepdim=True)
    return torch.empty_like(lost).scatter_(1, order, ~lost)


def _is_trained(weights: Iterable[Prunable]) -> bool:
    """Return whether training has left its mark on some weight: a singular value that random numbers do not have.

    Return True too if no weight is large enough to tell.
    """
    unknown = True
    for weight in weights:
        excess = _excess_over_random(weight.matrix().detach().flatten(1))
        if excess is not None and excess > TRAINED_DEVIATIONS:
            return True
        unknown &= excess is None
    return unknown


def _excess_over_random(matrix: Tensor) -> float | None:
    """Return by how much the largest singular value exceeds that of random numbers, in deviations of its square.

    Return None for zeros and for matrices of fewer than four rows or columns.

    Source: Johnstone, On the distribution of the largest eigenvalue in principal components analysis (2001).
    """
    if min(matrix.shape) < 4 or not matrix.any():
        return None
    matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
    matrix = matrix / matrix.abs().max()
    scale = float(matrix.square().mean().sqrt())
    vector = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0), device="cpu").to(matrix) / scale
    for _ in range(POWER_ITERATIONS):
        vector = matrix.T @ (matrix @ (vector / vector.norm())) / scale**2
    rows, columns = (math.sqrt(side) for side in matrix.shape)
    deviation = (rows + columns) * (1 / rows + 1 / columns) ** (1 / 3)
    return (float(vector.norm()) - (rows + columns) ** 2) / deviation


def padded_size(weight: Prunable) -> int:
    """Return the number of elements in all blocks of a weight, padding included."""
    return weight.blocks.size * math.prod(weight.grid)


def _select_names(argument: str, names: Iterable[str], weights: Weights) -> dict[str, Prunable]:
    """Return the weights with these names, in the order of `weights`."""
    names = list(names)
    unknown = [name for name in names if name not in weights]
    if unknown or not names:
        known = ", ".join(list(weights)[:8]) + (", ..." if len(weights) > 8 else "")
        raise BlockSparseError.expected(argument, f"names out of {known}", ", ".join(map(repr, unknown)) or "none")
    return {name: weight for name, weight in weights.items() if name in names}
