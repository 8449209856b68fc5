"""Scores blocks by their weights and their inputs: Wanda, for blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BlockSparseError
from ...surgery.prunable import Prunable, Skip, prunable
from .calibrate import Batches, as_rows, channel_axis, check_finite, observe
from .inputs import LAYERS, above, called, packed, products, unseen

# The part of its blocks that each weight has for certain, whatever the others need.
MIN_PART = 0.5


class ActivationScores(dict[str, Tensor]):
    """Scores `[out_blocks, in_blocks]` by the name of the weight, as `sparsify` takes them for its criterion."""

    by_magnitude: dict[str, str]
    """The weights whose inputs were not seen, with the reason: their scores are sums of |w|."""


def activation_scores(
    model: nn.Module, batches: Batches, block_size: int | tuple[int, int] = 32, skip: Skip = ()
) -> ActivationScores:
    """Scores each block on calibration data by the sum over it of |w_ij| * ||x_j||, Wanda's score of weights.

    x_j is input j over all tokens of all batches: of a convolution input channel j at all positions, of an LSTM's
    recurrent weight the state j after each step. Only sums of squares are kept, in float64. The model runs in its
    evaluation mode.

    Args:
        model: any module; as it is afterwards.
        batches: what the model is called with, some hundred samples say: an iterable of tensors, of tuples or lists of
            arguments, or of dicts of arguments by name.
        block_size: an int or (rows, columns).
        skip: what gets no score: modules, or names of modules or weights.

    Returns:
        float64 `[out_blocks, in_blocks]` for each weight that can become block-sparse, for
        `sparsify(model, criterion=scores, scope="layer")`: how much a score means differs from layer to layer. Scores
        of weights that no batch reaches are sums of |w|; `by_magnitude` lists them.

    Raises:
        BlockSparseError: as `reconstruct`; batches that reach no weight.

    >>> import torch, blocksparse as bs
    >>> layer = torch.nn.Linear(4, 2, bias=False)
    >>> layer.weight.data = torch.tensor([[1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 0.0, 0.0]])
    >>> bs.sparsity.activation_scores(layer, [torch.tensor([[3.0, 0, 1, 0], [4, 0, 0, 0]])], block_size=2)
    {'weight': tensor([[10.,  2.]], dtype=torch.float64)}

    Source: Sun et al., A simple and effective pruning approach for large language models (2023).
    """
    weights = prunable(model, block_size, skip)
    if not weights:
        raise BlockSparseError.expected("model", "dense weights that can become block-sparse", type(model).__name__)
    squares = _squares(model, batches, weights)
    scores = ActivationScores()
    scores.by_magnitude = {weight.name: unseen(weight) for weight in weights if weight.name not in squares}
    for weight in weights:
        scores[weight.name] = _scores(weight, squares.get(weight.name))
    return scores


def shares(model: nn.Module, batches: Batches, weights: Iterable[Prunable], density: float) -> dict[str, Tensor]:
    """Scores by which weights compete for blocks, `[out_blocks, in_blocks]` by name, from 0 to 1 for each number.

    A block's part of sum w_ij^2 ||x_j||^2 over all blocks of its weight that have no less, as LAMP scores w_ij^2. Half
    of the density each weight has for certain, and one that is not reached all of it: their blocks have 1 more.
    """
    weights, found = list(weights), {}
    squares = _squares(model, batches, weights)
    for weight in weights:
        matrix = weight.matrix().detach().double().square()
        if weight.name in squares:
            matrix = matrix * squares[weight.name].view(1, -1, *[1] * (matrix.dim() - 2))
        ranked, order = weight.blocks.sums(weight.blocks.matrix(matrix)).flatten().sort(descending=True, stable=True)
        parts = ranked / ranked.cumsum(0).clamp(min=torch.finfo(ranked.dtype).tiny)
        seen = weight.name in squares
        sure = round(density * (MIN_PART if seen else 1) * len(parts))
        parts[:sure] += 1
        parts[sure:] *= seen
        found[weight.name] = torch.empty_like(parts).scatter_(0, order, parts).view(weight.grid) / weight.blocks.size
    return found


def _squares(model: nn.Module, batches: Batches, weights: Iterable[Prunable]) -> dict[str, Tensor]:
    """||x_j||^2 of the inputs of each weight that is reached, float64 `[in]`."""
    by_module = called(model, weights)
    squares: dict[str, Tensor] = {}

    def see(module: nn.Module, args: tuple[Any, ...]) -> None:
        here = {weight.parameter: weight for weight in by_module[module]}
        for parameter, rows in _inputs(module, by_module[module], args):
            if parameter in here and len(rows):  # an expert may be called without a token
                name, sums = here[parameter].name, rows.double().square().sum(0)
                squares[name] = squares[name] + sums if name in squares else sums

    observe(model, batches, by_module, see)
    if not squares:
        raise BlockSparseError.expected("batches", "ones that reach a weight of the model", "none that does")
    for name, sums in squares.items():
        check_finite(name, sums)
    return squares


def _scores(weight: Prunable, squares: Tensor | None) -> Tensor:
    matrix = weight.matrix().detach().double().abs()
    if squares is not None:
        matrix = matrix * squares.sqrt().view(1, -1, *[1] * (matrix.dim() - 2))
    return weight.blocks.sums(weight.blocks.matrix(matrix))


def _inputs(module: nn.Module, weights: list[Prunable], args: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    """The names of a module's parameters, and what each is multiplied with in this call, `[tokens, features]`."""
    if type(module) in LAYERS:
        yield from _inputs_of_layers(module, args)
    elif type(module) is not nn.MultiheadAttention and weights[0].parameter == "weight":
        yield "weight", as_rows(args[0], channel_axis(weights[0]))
    else:
        for product in products(module, weights):
            rows = product.inputs(args, torch.arange(product.rows(args), device=args[0].device))
            for weight, part in zip(product.weights, rows.split(product.sizes, 1), strict=True):
                yield weight.parameter, part[:, : weight.matrix().shape[1]]


def _inputs_of_layers(module: Any, args: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    """Layer by layer: PyTorch does not give away what goes from one to the next."""
    x, state = packed(module, args)
    directions = 2 if module.bidirectional else 1
    for level in range(module.num_layers):
        before, x = x, above(module, level, x, state)
        after = as_rows(x.data).chunk(directions, dim=1)
        for suffix, states in zip(("", "_reverse"), after, strict=False):
            yield f"weight_ih_l{level}{suffix}", as_rows(before.data)
            yield f"weight_hh_l{level}{suffix}", states
