"""Which blocks of each weight are kept: by scores and densities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

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

# In the scope "careful": of the density each weight has this part for certain, and of its squares each row of blocks
# loses no more than this. Measured in docs/results/one_shot.md.
FLOOR = 0.5
LOSS = 0.05

# By how many standard deviations the norms of a trained weight's blocks differ more than by chance.
TRACE = 4.0


class Kept:
    """Weights by name, and which blocks they keep."""

    asked: float
    """The density that the weights are to have together."""

    def __init__(self, weights: Weights):
        self.weights = weights

    @property
    def half_a_block(self) -> float:
        """What half a block of each weight is of all their numbers: as near as rounding comes to a density."""
        return _mean({name: 0.5 / math.prod(weight.grid) for name, weight in self.weights.items()}, self.weights)

    def layouts(self, names: Iterable[str]) -> Layouts:
        """The layouts of these weights, when the others stay dense."""
        raise NotImplementedError

    def why(self, name: str) -> str:
        """Why this weight keeps more than its part, or nothing."""
        return ""

    def density_of(self, layouts: Layouts) -> float:
        """The density of all weights together when some have these layouts and the others are dense."""
        dense = sum(weight.tensor.numel() for name, weight in self.weights.items() if name not in layouts)
        padded = {name: _padded(weight) for name, weight in self.weights.items() if name in layouts}
        stored = sum(layouts[name].density * number for name, number in padded.items())
        return (stored + dense) / (sum(padded.values()) + dense)


class Given(Kept):
    """The layouts that a user gives some of the weights."""

    def __init__(self, weights: Weights, layouts: Mapping[str, BlockLayout]):
        if not isinstance(layouts, Mapping):
            raise BlockSparseError.expected("layouts", "BlockLayouts by the names of weights", type(layouts).__name__)
        named = _named("layouts", layouts, weights)
        for name, weight in named.items():
            check_layout(layouts[name])
            weight.check_fit(layouts[name])
        super().__init__({name: weight.in_blocks(layouts[name].block_shape) for name, weight in named.items()})
        self._layouts = layouts
        self.asked = self.density_of(self.layouts(self.weights))

    def layouts(self, names: Iterable[str]) -> Layouts:
        return {name: self._layouts[name] for name in names}


class Choice(Kept):
    """The blocks with the highest scores, of all weights or, when some are to stay dense after all, of the rest.

    If `bounded`, weights keep more in the scope "careful" where they would lose too much.
    """

    def __init__(
        self,
        weights: Weights,
        density: float | Mapping[str, float],
        criterion: Criterion,
        scope: str,
        bounded: bool = False,
    ):
        if scope not in SCOPES:
            raise BlockSparseError.expected("scope", f"one of {', '.join(SCOPES)}", repr(scope))
        if not isinstance(criterion, Mapping) and not callable(criterion) and criterion not in CRITERIA:
            expected = f"one of {', '.join(CRITERIA)}, scores by name or a function"
            raise BlockSparseError.expected("criterion", expected, repr(criterion))
        super().__init__(_named("density", density if isinstance(density, Mapping) else weights, weights))
        self.density, self.scope = density, scope
        self.blocks = {name: weight.blocks for name, weight in self.weights.items()}
        for value in density.values() if isinstance(density, Mapping) else [density]:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise BlockSparseError.expected("density", "a number above 0 and at most 1", repr(value))
        if isinstance(density, Mapping):
            for name, value in density.items():
                check_density(value, {name: self.blocks[name]}, "layer")
        elif scope in ("careful", "global"):
            check_density(density, self.blocks, "global")
        self.scores = {name: self._scores(name, criterion) for name in self.weights}
        self.needed: dict[str, Tensor] = {}
        if bounded and scope == "careful" and not isinstance(density, Mapping) and _trained(self.weights.values()):
            self.needed = {name: _needed(weight) for name, weight in self.weights.items()}
        of_all = density if isinstance(density, Mapping) else dict.fromkeys(self.weights, density)
        self.asked = _mean(of_all, self.weights)

    def layouts(self, names: Iterable[str]) -> Layouts:
        names = list(names)
        scores, blocks = {name: self.scores[name] for name in names}, {name: self.blocks[name] for name in names}
        if isinstance(self.density, Mapping):
            densities = [self.density[name] for name in names]
        elif self.scope == "erk":
            shapes = [(*self.weights[name].shape, *self.weights[name].matrix().shape[2:]) for name in names]
            densities = erk(shapes, self.density, self.weights[names[0]].block_shape)
        elif self.scope == "layer":
            densities = [self.density] * len(names)
        else:
            if self.scope == "careful":
                scores = {name: _with_floor(score, FLOOR * self.density) for name, score in scores.items()}
            best = top_blocks(scores, blocks, self.density, "global")
            return self._as_layouts({name: mask | self.needed.get(name, mask) for name, mask in best.items()})
        masks: dict[str, Tensor] = {}
        for name, density in zip(names, densities, strict=True):
            masks |= top_blocks({name: scores[name]}, {name: blocks[name]}, density, "layer")
        return self._as_layouts(masks)

    def why(self, name: str) -> str:
        if name not in self.needed:
            return ""
        need = float(self.needed[name].float().mean())
        return f"it takes {need:.0%} of its blocks to lose no more than {LOSS:.0%} of the squares of each row"

    def _as_layouts(self, masks: Mapping[str, Tensor]) -> Layouts:
        return {name: BlockLayout(mask, self.weights[name].block_shape) for name, mask in masks.items()}

    def _scores(self, name: str, criterion: Criterion) -> Tensor:
        weight, blocks = self.weights[name], self.blocks[name]
        if not bool(weight.tensor.isfinite().all()):
            raise BlockSparseError.expected(f"the weight {name}", "finite numbers", "inf or nan among them")
        if isinstance(criterion, str):
            numbers = blocks.fold(weight.tensor.detach()).float().abs()
            if criterion == "lamp":
                return _lamp(numbers.double().square().sum(blocks.inside))
            if criterion == "max":
                return numbers.amax(blocks.inside)
            # Per number in the block, as blocks of convolutions have more numbers but compete with others.
            return numbers.mean(blocks.inside) if criterion == "magnitude" else numbers.square().mean(blocks.inside)
        if isinstance(criterion, Mapping):
            if name not in criterion:
                raise BlockSparseError.expected("criterion", f"scores of {name}", f"those of {sorted(criterion)}")
            scores = criterion[name]
        else:
            scores = criterion(name, weight.padded().detach().clone())  # it may write to it
        if not isinstance(scores, Tensor) or tuple(scores.shape) != weight.grid or not bool(scores.isfinite().all()):
            got = type(scores).__name__ if not isinstance(scores, Tensor) else f"{list(scores.shape)}"
            raise BlockSparseError.expected(f"the scores of {name}", f"finite ones, {list(weight.grid)}", got)
        return scores.detach()


def _lamp(squares: Tensor) -> Tensor:
    """Returns the LAMP score of each block: its part of the squares left once all smaller blocks are gone."""
    ranked, order = squares.flatten().sort(descending=True, stable=True)
    parts = ranked / ranked.cumsum(0).clamp(min=torch.finfo(ranked.dtype).tiny)
    return torch.empty_like(parts).scatter_(0, order, parts).view_as(squares)


def _with_floor(scores: Tensor, density: float) -> Tensor:
    """The scores, infinite where a block stays for certain: the best ones, and that of each row if there are enough."""
    count = max(1, math.ceil(density * scores.numel()))
    sure, rank = torch.zeros_like(scores, dtype=torch.bool), rank_scores(scores)
    if count >= len(scores):
        sure[torch.arange(len(scores)), rank.argmax(1)] = True
    rest = rank.masked_fill(sure, rank.numel()).flatten()
    return scores.masked_fill(sure.view(-1).index_fill(0, rest.topk(count).indices, True).view_as(sure), torch.inf)


def _needed(weight: Prunable) -> Tensor:
    """The blocks without which a row of blocks would lose too much of its sum of squares; bool."""
    squares, order = weight.blocks.sums(weight.tensor.detach().double().square()).sort(1)
    lost = squares.cumsum(1) <= LOSS * squares.sum(1, keepdim=True)
    return torch.empty_like(lost).scatter_(1, order, ~lost)


def _trained(weights: Iterable[Prunable]) -> bool:
    """Whether the norms of some weight's blocks differ by more than chance, as they do not where numbers were drawn."""
    unknown = True
    for weight in weights:
        blocks = weight.blocks
        whole = blocks.sums(torch.ones_like(weight.tensor)) == blocks.size
        squares = blocks.fold(weight.tensor.detach().double().square()).movedim(2, 1).flatten(2)[whole]
        if len(squares) < 4 or squares.shape[1] < 4:
            continue
        unknown = False
        by_chance = squares.var(1).mean() / squares.shape[1]
        if squares.mean(1).var() > by_chance * (1 + TRACE * math.sqrt(2 / (len(squares) - 1))):
            return True
    return unknown


def _mean(densities: Mapping[str, float], weights: Weights) -> float:
    """The density of weights together, by their numbers in whole blocks."""
    sizes = {name: _padded(weight) for name, weight in weights.items()}
    return sum(size * densities[name] for name, size in sizes.items()) / sum(sizes.values())


def _padded(weight: Prunable) -> int:
    """The numbers in all blocks, of padding too."""
    return weight.blocks.size * math.prod(weight.grid)


def _named(what: str, names: Iterable[str], weights: Weights) -> dict[str, Prunable]:
    """The weights of these names, in their own order."""
    names = list(names)
    unknown = [name for name in names if name not in weights]
    if unknown or not names:
        known = ", ".join(list(weights)[:8]) + (", ..." if len(weights) > 8 else "")
        raise BlockSparseError.expected(what, f"names out of {known}", ", ".join(map(repr, unknown)) or "none")
    return {name: weight for name, weight in weights.items() if name in names}
