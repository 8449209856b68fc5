"""Makes a dense model block-sparse in one shot."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checked import integer
from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout
from ..sparsity.pruning.strongest import check_density, strongest
from ..sparsity.sparse_training.densities import erk
from ..surgery.prunable import Prunable, Skip, survey
from ..surgery.replace import replace_with_sparse
from .speed import speed_up_of_weight

Criterion = str | Mapping[str, Tensor] | Callable[[str, Tensor], Tensor]

CRITERIA = ("l2", "magnitude", "max", "lamp")
SCOPES = ("global", "layer", "erk")

# The attribute in which a module keeps why weights were left dense, by the parameter's name, for the report.
REASONS = "_left_dense"


@torch.no_grad()
def sparsify(
    model: nn.Module,
    density: float | Mapping[str, float] = 0.1,
    block_size: int | tuple[int, int] = 32,
    *,
    criterion: Criterion = "l2",
    scope: str = "global",
    skip: Skip = (),
    layouts: Mapping[str, BlockLayout] | None = None,
    force: bool = False,
    tokens: int = 64,
    inplace: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """Makes a model's weights block-sparse: keeps the blocks with the highest scores and drops the others.

    Linear layers (those of the transformers library that are called Conv1D too), convolutions without groups and LSTMs
    become modules of `blocksparse.nn`; their biases and all else stay. Speed decides: a weight with which the product
    would be slower than dense on its device, as measured for `tokens` rows, stays dense and unpruned, unless it is
    forced. `report` tells which, and why. A layer whose weight the model reads itself (as T5 does of its `wo`, for the
    dtype) has to be skipped.

    Args:
        model: any module; as it is afterwards, unless `inplace`.
        density: the part of the numbers that is kept in the weights that become block-sparse, above 0 and at most 1;
            or one for each weight by its name, and those without a name stay dense.
        block_size: an int or (rows, columns) of the weights `[out, in]`; what is no multiple of it is padded.
        criterion: the score of a block: "l2" (its l2 norm for each number in it), "magnitude" (its mean |w|), "max"
            (its largest |w|) or "lamp" (sum w^2 over that of all blocks of the weight that have no less);
            scores `[out_blocks, in_blocks]` by the name of the weight; or a function of the name and the weight, padded
            to whole blocks, that gives them.
        scope: "global": one threshold over all weights, and the density is met to the nearest block of them all; a
            weight whose numbers are small as a whole loses most, at low densities all but a block, unless the
            criterion is "lamp", which knows no scale. "layer": each weight has it, to its nearest block;
            "erk": densities by `sparsity.erk`. Each weight keeps a block at least.
        skip: what stays dense: modules, or names of modules or weights.
        layouts: the blocks to keep by the name of the weight, in place of densities and scores.
        force: whether also what is slower becomes block-sparse. Nothing is measured then.
        tokens: rows of the inputs to be fast for; positions of the output of a convolution.
        inplace: whether the model itself is changed, and not a copy of it.
        optimizer: in place, the one that trains the model: it goes on with the new parameters, with what it has kept.

    Returns:
        The model; in place another object only where the model itself is one such layer.

    Raises:
        BlockSparseError: a density out of range or not possible, a model on the meta device or without a weight that
            can become block-sparse, names that it does not have, scores or layouts that do not fit, an optimizer
            without `inplace` or without the weights. Nothing is changed then.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
        >>> bs.sparsify(model, density=0.25, skip="2", force=True)
        Sequential(
          (0): Linear(in_features=256, out_features=512, block_size=(32, 32), nnz=32, density=0.25, bias=True)
          (1): ReLU()
          (2): Linear(in_features=512, out_features=10, bias=True)
        )

    Source of "lamp": Lee, Park, Mo, Ahn, Shin, Layer-adaptive sparsity for the magnitude-based pruning (2021).
    """
    integer("tokens", tokens, 1)
    if optimizer is not None and not inplace:
        raise BlockSparseError.expected(
            "optimizer", "inplace=True with it", "a copy of the model, which it does not train"
        )
    found = survey(model, block_size, skip)  # before the copy: what is refused costs nothing
    if not any(reason is None for _, reason in found):
        got = f"{type(model).__name__} with " + ("; ".join(f"{w.name}: {reason}" for w, reason in found[:5]) or "none")
        raise BlockSparseError.expected("model", "dense weights that can become block-sparse", got)
    weights = {weight.name: weight for weight, reason in found if reason is None}
    reasons = {weight.name: reason for weight, reason in found if reason is not None}
    if layouts is not None:
        chosen = _given(weights, layouts)
        weights |= {name: weights[name].in_blocks(layout.block_shape) for name, layout in chosen.items()}
    else:
        named = density.keys() if isinstance(density, Mapping) else weights
        _check_names("density", named, weights)
        choice = _Choice({name: weights[name] for name in weights if name in named}, density, criterion, scope)
        chosen = choice.layouts()
    reasons |= {name: "no density was given" for name in weights if name not in chosen}
    while not force:
        slower = _slower(weights, chosen, tokens)
        reasons |= slower
        rest = {name: layout for name, layout in chosen.items() if name not in slower}
        if not slower or not rest:
            chosen = rest
            break
        chosen = rest if layouts is not None else choice.layouts(list(rest))
    model = model if inplace else copy.deepcopy(model)
    model = replace_with_sparse(model, chosen, optimizer)
    for name, reason in reasons.items():
        module, _, parameter = name.rpartition(".")
        owner = model.get_submodule(module)
        owner.__dict__.setdefault(REASONS, {})[parameter] = reason
    return model


class _Choice:
    """The blocks to keep, of all weights or, when some are to stay dense after all, of the rest."""

    def __init__(
        self, weights: Mapping[str, Prunable], density: float | Mapping[str, float], criterion: Criterion, scope: str
    ):
        if scope not in SCOPES:
            raise BlockSparseError.expected("scope", f"one of {', '.join(SCOPES)}", repr(scope))
        if not isinstance(criterion, Mapping) and not callable(criterion) and criterion not in CRITERIA:
            expected = f"one of {', '.join(CRITERIA)}, scores by name or a function"
            raise BlockSparseError.expected("criterion", expected, repr(criterion))
        self.weights, self.density, self.scope = weights, density, scope
        self.blocks = {name: weight.blocks for name, weight in weights.items()}
        for value in density.values() if isinstance(density, Mapping) else [density]:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise BlockSparseError.expected("density", "a number above 0 and at most 1", repr(value))
        if isinstance(density, Mapping):
            for name, value in density.items():
                check_density(value, {name: self.blocks[name]}, "layer")
        elif scope == "global":
            check_density(density, self.blocks, scope)
        self.scores = {name: self._scores(name, criterion) for name in weights}

    def layouts(self, names: list[str] | None = None) -> dict[str, BlockLayout]:
        names = list(self.weights) if names is None else names
        scores, blocks = {name: self.scores[name] for name in names}, {name: self.blocks[name] for name in names}
        if isinstance(self.density, Mapping):
            densities = [self.density[name] for name in names]
        elif self.scope == "erk":
            shapes = [(*self.weights[name].shape, *self.weights[name].matrix().shape[2:]) for name in names]
            densities = erk(shapes, self.density, self.weights[names[0]].block_shape)
        elif self.scope == "layer":
            densities = [self.density] * len(names)
        else:
            return self._as_layouts(strongest(scores, blocks, self.density, "global"))
        masks: dict[str, Tensor] = {}
        for name, density in zip(names, densities, strict=True):
            masks |= strongest({name: scores[name]}, {name: blocks[name]}, density, "layer")
        return self._as_layouts(masks)

    def _as_layouts(self, masks: Mapping[str, Tensor]) -> dict[str, BlockLayout]:
        return {name: BlockLayout(mask, self.weights[name].block_shape) for name, mask in masks.items()}

    def _scores(self, name: str, criterion: Criterion) -> Tensor:
        weight, blocks = self.weights[name], self.blocks[name]
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
            scores = criterion(name, weight.padded().detach())
        if not isinstance(scores, Tensor) or tuple(scores.shape) != weight.grid or not bool(scores.isfinite().all()):
            got = type(scores).__name__ if not isinstance(scores, Tensor) else f"{list(scores.shape)}"
            raise BlockSparseError.expected(f"the scores of {name}", f"finite ones, {list(weight.grid)}", got)
        return scores.detach()


def _lamp(squares: Tensor) -> Tensor:
    """Returns the LAMP score of each block: its part of the squares left once all smaller blocks are gone."""
    ranked, order = squares.flatten().sort(descending=True, stable=True)
    parts = ranked / ranked.cumsum(0).clamp(min=torch.finfo(ranked.dtype).tiny)
    return torch.empty_like(parts).scatter_(0, order, parts).view_as(squares)


def _given(weights: Mapping[str, Prunable], layouts: Mapping[str, BlockLayout]) -> dict[str, BlockLayout]:
    _check_names("layouts", layouts, weights)
    for name, layout in layouts.items():
        check_layout(layout)
        weights[name].check_fit(layout)
    return {name: layouts[name] for name in weights if name in layouts}


def _check_names(what: str, names: Any, weights: Mapping[str, Prunable]) -> None:
    unknown = [name for name in names if name not in weights]
    if unknown or not names:
        known = ", ".join(list(weights)[:8]) + (", ..." if len(weights) > 8 else "")
        raise BlockSparseError.expected(what, f"names out of {known}", ", ".join(map(repr, unknown)) or "none")


def _slower(weights: Mapping[str, Prunable], layouts: Mapping[str, BlockLayout], tokens: int) -> dict[str, str]:
    """Why some of these weights are better left dense."""
    reasons = {}
    for name, layout in layouts.items():
        ratio = speed_up_of_weight(weights[name], layout, tokens)
        if ratio < 1:
            rows, columns = layout.block_shape
            what = f"{ratio:.2g} times as fast block-sparse" if ratio else "no backend here for block-sparse"
            reasons[name] = f"{what} (density {layout.density:.2g}, blocks of {rows} x {columns}, {tokens} tokens)"
    return reasons
