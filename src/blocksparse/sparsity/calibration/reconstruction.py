"""Pruning a trained model with some calibration data, without training it: SparseGPT, for blocks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...checked import number
from ...errors import BlockSparseError
from ...layout import BlockLayout
from ...nn.conv import margins
from ...surgery.prunable import Prunable, Skip, prunable
from ...surgery.replace import replace_with_sparse
from ..pruning.magnitude import dense_norms
from ..pruning.strongest import check_density, strongest
from .calibrate import Batches, as_rows, check_batches, check_finite, observe
from .least_squares import best_columns, block_counts, least_squares


@dataclass(frozen=True)
class Reconstruction:
    """The result of `reconstruct`.

    Args:
        model: with block-sparse weights.
        layouts: of these, by the name of the dense weight.
        errors: of each weight that was fitted, |X (W - V)^T|^2 / |X W^T|^2 on the calibration data.
        by_magnitude: the weights that were not fitted, with the reason: they keep their largest blocks as they are.
    """

    model: nn.Module
    layouts: Mapping[str, BlockLayout]
    errors: Mapping[str, float]
    by_magnitude: Mapping[str, str]


@torch.no_grad()
def reconstruct(
    model: nn.Module,
    batches: Batches,
    density: float = 0.1,
    block_size: int | tuple[int, int] = 32,
    *,
    skip: Skip = (),
    damping: float = 0.01,
) -> Reconstruction:
    """Makes a block-sparse copy of a trained model whose layers reproduce the outputs of the dense ones.

    Layer by layer, in the order in which they run, with the inputs X that the layers before, pruned already, give them.
    With H = X^T X + damping * mean(diag(X^T X)), the error of a weight V in the place of W is tr((W - V) H (W - V)^T).
    Each row of blocks gets as many blocks as it has among the best by the score of the optimal brain surgeon,
    sum w_ij^2 / (H^-1)_jj. It chooses them one after the other, always the one that lowers the error most, and their
    values are the exact least squares solution. So the blocks that stay make up for those that go. The score costs one
    inversion of H for a layer, the choice (in) (kept in)^2 multiplications for a row of blocks, all in float64.

    Fitted are linear layers (also the Conv1D of transformers) and torch.nn.Conv2d. Convolutions of other kinds, LSTMs,
    and what no batch reaches keep their largest blocks.

    Args:
        model: any module; it stays as it is.
        batches: the model's inputs, some thousand tokens for layers of some thousand inputs: a list, or another
            iterable for several passes, of tensors, of tuples or lists of arguments, or of dicts of arguments by name.
        density: the part of the blocks that each weight keeps, to the nearest block and at least one.
        block_size: an int or (rows, columns).
        skip: what stays dense, the output layer say: modules, or names of modules or weights.
        damping: larger for few batches.

    Raises:
        BlockSparseError: no batch, an iterator that is used up after one pass, inputs of a layer that are not finite, a
            density that leaves a weight without a block, no weight that can become block-sparse, something to skip that
            the model does not have.

    >>> import torch, blocksparse as bs
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(200, 4) @ torch.randn(4, 64)        # 64 inputs, but only 4 that are independent
    >>> layer = torch.nn.Linear(64, 16)
    >>> made = bs.sparsity.reconstruct(layer, [x], density=0.25, block_size=8)
    >>> made.model
    Linear(in_features=64, out_features=16, block_size=(8, 8), nnz=4, density=0.25, bias=True)
    >>> made.errors["weight"] < 1e-3
    True

    Source: Frantar, Alistarh, SparseGPT (2023); Hassibi, Stork, Optimal brain surgeon (1993), for the score.
    """
    density, damping = number("density", density, 0, 1), number("damping", damping, 0)
    check_batches(batches)
    if iter(batches) is batches:
        raise BlockSparseError.expected("batches", "a list, or another iterable for several passes", "an iterator")
    names = {weight.name for weight in _checked(prunable(model, block_size, skip), density)}
    model = copy.deepcopy(model)
    weights = [weight for weight in prunable(model, block_size) if weight.name in names]
    order = _order(model, batches, weights)
    layouts: dict[str, BlockLayout] = {}
    errors: dict[str, float] = {}
    for weight in order:
        moments = _moments(model, batches, weight)
        try:
            layouts[weight.name], errors[weight.name] = _fit(weight, moments, density, damping)
        except torch.linalg.LinAlgError as error:
            expected = f"more, so that the Hessian of {weight.name} can be inverted"
            raise BlockSparseError.expected("damping", expected, damping) from error
    by_magnitude = {weight.name: _unfitted(weight) for weight in weights if weight.name not in layouts}
    for weight in weights:
        if weight.name in by_magnitude:
            scores = dense_norms(weight.blocks, weight.tensor)
            mask = strongest({weight.name: scores}, {weight.name: weight.blocks}, density, "layer")[weight.name]
            layouts[weight.name] = BlockLayout(mask, weight.block_shape)
    return Reconstruction(replace_with_sparse(model, layouts), layouts, errors, by_magnitude)


def _checked(weights: list[Prunable], density: float) -> list[Prunable]:
    if not weights:
        raise BlockSparseError.expected("model", "dense weights that can become block-sparse", "none")
    check_density(density, {weight.name: weight.blocks for weight in weights}, "layer")
    return weights


def _unfitted(weight: Prunable) -> str:
    return "no batch reaches it" if _can_fit(weight) else f"a {type(weight.module).__name__} is not fitted"


def _can_fit(weight: Prunable) -> bool:
    return (weight.matrix().dim() == 2 and weight.parameter == "weight") or type(weight.module) is nn.Conv2d


def _order(model: nn.Module, batches: Batches, weights: list[Prunable]) -> list[Prunable]:
    """The weights that can be fitted and are reached, in the order of their first calls."""
    by_module = {weight.module: weight for weight in weights if _can_fit(weight)}
    order: dict[nn.Module, None] = {}
    observe(model, batches, by_module, lambda module, args: order.setdefault(module))
    return [by_module[module] for module in order]


def _moments(model: nn.Module, batches: Batches, weight: Prunable) -> Tensor:
    """X^T X of what reaches the weight: float64 `[in * taps, in * taps]`, zeros where it is padded."""
    matrix = weight.matrix()
    size, padded = matrix[0].numel(), weight.shape[1] * matrix.shape[2:].numel()
    moments = torch.zeros(padded, padded, dtype=torch.float64, device=matrix.device)

    def see(module: nn.Module, args: tuple[Any, ...]) -> None:
        rows = _rows(module, args[0], weight)
        moments[:size, :size] += rows.T @ rows

    observe(model, batches, [weight.module], see)
    check_finite(weight.name, moments)
    return moments


def _rows(module: nn.Module, x: Tensor, weight: Prunable) -> Tensor:
    """What each output is a product of, `[tokens, in * taps]`: of a convolution the patches under its kernel."""
    if not isinstance(module, nn.Conv2d):
        return as_rows(x)
    images = x if x.dim() == 4 else x.unsqueeze(0)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    images = F.pad(images, margins(module), mode)
    return as_rows(F.unfold(images, module.kernel_size, module.dilation, stride=module.stride), axis=1)


def _fit(weight: Prunable, moments: Tensor, density: float, damping: float) -> tuple[BlockLayout, float]:
    """Sets the weight to its best blocks, zeros elsewhere; returns their layout and the relative error."""
    matrix = weight.matrix()
    dense = weight.padded().detach().flatten(1).double()
    (height, width), (rows, columns) = weight.block_shape, weight.grid
    width *= matrix.shape[2:].numel()
    mean = moments.diagonal().mean().item()
    hessian = moments + damping * (mean or 1) * torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
    target, fitted = dense @ hessian, torch.zeros_like(dense)
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    counts = block_counts(dense, hessian, (height, width), max(1, round(density * rows * columns)))
    for row, count in enumerate(counts.tolist()):
        here = slice(row * height, (row + 1) * height)
        chosen = best_columns(target[here], hessian, width, count)
        mask[row, chosen.cpu()] = True
        inputs = (chosen[:, None] * width + torch.arange(width, device=chosen.device)).flatten()
        fitted[here, inputs] = least_squares(target[here], hessian, inputs)
    lost, all_ = dense - fitted, (dense @ moments * dense).sum().item()
    error = (lost @ moments * lost).sum().item() / all_ if all_ > 0 else 0.0
    matrix.copy_(fitted[: matrix.shape[0], : matrix[0].numel()].reshape(matrix.shape))
    return BlockLayout(mask, weight.block_shape), error
