"""Scores of blocks by their weights and inputs: Wanda for blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BlockSparseError
from ...surgery.prunable import Prunable, Skip, prunable
from .calibrate import Batches, as_rows, channel_axis, check_batches, check_finite, observe
from .inputs import LAYERS, by_called_module, pack_inputs, products, run_level, why_unobserved

# Each weight keeps at least this fraction of its blocks, whatever others need, and a recurrent weight this one.
MIN_FRACTION, MIN_FRACTION_RECURRENT = 0.5, 0.75

# For shares of energy, no more batches are run once layers with this fraction of the weights have so many rows.
COVERED_FRACTION, MAX_ROWS = 0.9, 1024


class ActivationScores(dict[str, Tensor]):
    """Scores `[out_blocks, in_blocks]` by the name of the weight, a `criterion` of `sparsify`."""

    by_magnitude: dict[str, str]
    """Weights whose inputs were not observed, with the reason; their scores are sums of |w|."""


def activation_scores(
    model: nn.Module, batches: Batches, block_size: int | tuple[int, int] = 32, skip: Skip = ()
) -> ActivationScores:
    """Score each block on calibration data by the sum of |w_ij| * ||x_j||, Wanda's score, over its weights.

    x_j is input j over all tokens of all batches: an input channel at all positions for a convolution, a state after
    each step for an LSTM's recurrent weight. The model runs in evaluation mode; only sums of squares are stored, in
    float64.

    Args:
        model: any module; it does not change.
        batches: inputs of the model, some hundred samples: an iterable of tensors, of tuples or lists of arguments, or
            of dicts of arguments by name.
        block_size: an int, 32 by default, or (rows, columns).
        skip: modules, or names of modules or weights, that get no score; none by default.

    Returns:
        float64 `[out_blocks, in_blocks]` for each weight that can become block-sparse. Scores of different layers do
        not compare, so use `sparsify(model, criterion=scores, scope="layer")`. Weights that no batch reaches are scored
        by sums of |w|, and listed in `by_magnitude`.

    Raises:
        BlockSparseError: as for `reconstruct`; batches that reach no weight.

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
    squares = _input_squares(model, batches, weights)
    scores = ActivationScores()
    scores.by_magnitude = {weight.name: why_unobserved(weight) for weight in weights if weight.name not in squares}
    for weight in weights:
        scores[weight.name] = _scores(weight, squares.get(weight.name))
    return scores


def energy_shares(model: nn.Module, batches: Batches, weights: Iterable[Prunable], density: float) -> dict[str, Tensor]:
    """Return scores by which all weights compete for blocks, `[out_blocks, in_blocks]` by name, per value of a block.

    A block's score is its share of the energy, the sum of w_ij^2 ||x_j||^2, of all blocks of its weight with as much
    energy or more, as LAMP does for w_ij^2. 1 is added to the best blocks of a weight up to half of the density, so
    that these stay; up to 3/4 of it in recurrent layers, and up to all of it if no batch reaches the weight. States of
    a recurrent layer have more energy than its inputs, but a layer with few blocks for inputs hardly depends on them.
    """
    weights, scores = list(weights), {}
    squares = _input_squares(model, batches, weights, MAX_ROWS)
    for weight in weights:
        matrix = weight.matrix().detach().double().square()
        if weight.name in squares:
            matrix = matrix * squares[weight.name].view(1, -1, *[1] * (matrix.dim() - 2))
        ranked, order = weight.blocks.sums(weight.blocks.matrix(matrix)).flatten().sort(descending=True, stable=True)
        shares = ranked / ranked.cumsum(0).clamp(min=torch.finfo(ranked.dtype).tiny)
        reached = weight.name in squares
        is_recurrent = isinstance(weight.module, nn.RNNBase | nn.RNNCellBase)
        minimum = MIN_FRACTION_RECURRENT if is_recurrent else MIN_FRACTION
        count = round(density * (minimum if reached else 1) * len(shares))
        shares[:count] += 1
        shares[count:] *= reached
        scores[weight.name] = torch.empty_like(shares).scatter_(0, order, shares).view(weight.grid) / weight.blocks.size
    return scores


def _input_squares(
    model: nn.Module, batches: Batches, weights: Iterable[Prunable], max_rows: int | None = None
) -> dict[str, Tensor]:
    """Return ||x_j||^2 of the inputs of each weight that is reached, float64 `[in]` by name.

    With `max_rows`, batches are read until nearly all weights have so many rows of inputs.
    """
    weights = list(weights)
    by_module = by_called_module(model, weights)
    squares: dict[str, Tensor] = {}
    counts = dict.fromkeys((weight.name for weight in weights), 0)
    sizes = {weight.name: weight.tensor.numel() for weight in weights}

    def needed() -> Iterator[Any]:
        for batch in batches:
            yield batch
            covered = sum(sizes[name] for name, count in counts.items() if max_rows and count >= max_rows)
            if covered >= COVERED_FRACTION * sum(sizes.values()):
                break

    def observer(module: nn.Module, args: tuple[Any, ...]) -> None:
        by_parameter = {weight.parameter: weight for weight in by_module[module]}
        for parameter, rows in _inputs(module, by_module[module], args):
            if parameter in by_parameter and len(rows):  # an expert may be called without a token
                name, sums = by_parameter[parameter].name, rows.double().square().sum(0)
                squares[name] = squares[name] + sums if name in squares else sums
                counts[name] += len(rows)

    check_batches(batches)
    observe(model, needed(), by_module, observer)
    if not squares:
        raise BlockSparseError.expected("batches", "ones that reach a weight of the model", "none that does")
    for name, sums in squares.items():
        check_finite(name, sums)
    return squares


def _scores(weight: Prunable, squares: Tensor | None) -> Tensor:
    """Return Wanda's scores of a weight's blocks, or sums of |w| without squares."""
    matrix = weight.matrix().detach().double().abs()
    if squares is not None:
        matrix = matrix * squares.sqrt().view(1, -1, *[1] * (matrix.dim() - 2))
    return weight.blocks.sums(weight.blocks.matrix(matrix))


def _inputs(module: nn.Module, weights: list[Prunable], args: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameter names of a module, and the inputs that each multiplies in this call, `[tokens, features]`."""
    if type(module) in LAYERS:
        yield from _inputs_of_levels(module, args)
    elif type(module) is not nn.MultiheadAttention and weights[0].parameter == "weight":
        yield "weight", as_rows(args[0], channel_axis(weights[0]))
    else:
        for product in products(module, weights):
            rows = product.inputs(args, torch.arange(product.rows(args), device=args[0].device))
            for weight, part in zip(product.weights, rows.split(product.sizes, 1), strict=True):
                yield weight.parameter, part[:, : weight.matrix().shape[1]]


def _inputs_of_levels(module: Any, args: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    """Run a recurrent layer level by level, since PyTorch does not return what passes between levels."""
    x, state = pack_inputs(module, args)
    directions = 2 if module.bidirectional else 1
    for level in range(module.num_layers):
        before, x = x, run_level(module, level, x, state)
        after = as_rows(x.data).chunk(directions, dim=1)
        for suffix, states in zip(("", "_reverse"), after, strict=False):
            yield f"weight_ih_l{level}{suffix}", as_rows(before.data)
            yield f"weight_hh_l{level}{suffix}", states
