"""Removes neurons without incoming connections from layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..nn.linear import Linear
from ..nn.module import replace_data
from ..ops.linear import ACTIVATIONS
from .optimizer import check_optimizer
from .weight_handle import carry_state, remap_blocks


@torch.no_grad()
def compact(
    first: Linear,
    second: Linear,
    activation: Callable[[Tensor], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Tensor:
    """Remove the outputs of a layer without incoming connections from it and from the next layer, in place.

    Such a neuron is a constant, activation(bias). Its contribution to the next layer is added to that layer's bias, so
    the network computes the same up to rounding (and up to dropout between the layers). If the next layer has no bias,
    neurons that are connected to it stay unless their constant is 0. A row of blocks of several rows is removed only as
    a whole. The optimizer's state follows.

    Args:
        first, second: linear layers; the outputs of the first are the inputs of the second.
        activation: the elementwise function between them, besides the activation of `first` itself.
        optimizer: the optimizer that trains them, or None.

    Returns:
        int64, the old indices of the outputs of `first` that stay.

    Raises:
        BlockSparseError: layers that do not fit; block heights of the first that differ from block widths of the
            second; an optimizer without a parameter; layers of which nothing would stay. Nothing is changed then.

    >>> import torch, blocksparse as bs
    >>> first = bs.nn.Linear(8, 3, layout=bs.BlockLayout([[1] * 8, [0] * 8, [1] * 8], block_size=1))
    >>> second = bs.nn.Linear(3, 2, block_size=1)
    >>> bs.sparsity.compact(first, second, torch.relu)
    tensor([0, 2])
    >>> first.out_features, second.in_features
    (2, 2)
    """
    _check(first, second, optimizer)
    height, out = first.layout.block_shape[0], first.out_features
    constant = _constants(first, activation)
    removed = np.diff(first.layout.row_start) == 0
    if second.bias is None:
        has_outputs = np.bincount(second.layout.col_of_block, minlength=removed.size) > 0
        removed &= ~(has_outputs & (constant != 0).view(-1, height).any(1).cpu().numpy())
    if removed.all() or removed[second.layout.col_of_block].all():
        raise BlockSparseError(f"compact: no connections of {first} and {second} would stay: drop fewer blocks")
    stays = np.flatnonzero((~removed).repeat(height)[:out])
    if stays.size == out:
        return torch.from_numpy(stays)
    if second.bias is not None:
        constant = constant * torch.from_numpy(removed.repeat(height)).to(constant)
        moved = ops.linear(constant.to(second.values.dtype), second.values.detach(), second.layout)
        second.bias.add_(moved[: second.out_features])
    _shrink_outputs(first, removed, torch.from_numpy(stays), optimizer)
    _shrink_inputs(second, removed, stays.size, optimizer)
    return torch.from_numpy(stays)


def _check(first: Linear, second: Linear, optimizer: torch.optim.Optimizer | None) -> None:
    """Check that the second layer can follow the first, and that the optimizer can follow their blocks."""
    for name, layer in (("first", first), ("second", second)):
        if not isinstance(layer, Linear):
            raise BlockSparseError.expected(name, "a bs.nn.Linear", type(layer).__name__)
        check_optimizer(optimizer, layer.values, f"{name}.values")
    if first.bias is not None:
        check_optimizer(optimizer, first.bias, "first.bias")
    if second.in_features != first.out_features:
        raise BlockSparseError.expected("second", f"a layer with {first.out_features} inputs", second)
    if second.layout.block_shape[1] != first.layout.block_shape[0]:
        expected = f"blocks of {first.layout.block_shape[0]} columns, the rows of the first layer's blocks"
        raise BlockSparseError.expected("second", expected, second.layout.block_shape)


def _constants(first: Linear, activation: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return the outputs for absent inputs, `[out_features, padded]`; the padding is 0."""
    bias = first.bias if first.bias is not None else first.values.new_zeros(first.out_features)
    constant = ACTIVATIONS[first.activation](bias) if first.activation else bias
    constant = constant if activation is None else activation(constant)
    return F.pad(constant, (0, first.layout.shape[0] - first.out_features))


def _shrink_outputs(layer: Linear, removed: np.ndarray, stays: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    """Remove rows of blocks and their biases from a layer."""
    layout, bias = layer.layout, layer.bias
    rows = (np.cumsum(~removed) - 1)[layout.row_of_block]
    grid = (int(np.count_nonzero(~removed)), layout.grid[1])
    smaller = BlockLayout.from_indices(rows, layout.col_of_block, grid, layout.block_shape)
    layer.out_features = stays.numel()
    if bias is not None:
        source = stays.to(bias.device)
        carry_state(optimizer, bias, source)
        replace_data(bias, bias.detach()[source])
    layer.change_layout(smaller, layer.values.detach())


def _shrink_inputs(layer: Linear, removed: np.ndarray, inputs: int, optimizer: torch.optim.Optimizer | None) -> None:
    """Remove columns of blocks from a layer."""
    layout, values = layer.layout, layer.values
    stay = np.flatnonzero(~removed[layout.col_of_block])
    cols = (np.cumsum(~removed) - 1)[layout.col_of_block[stay]]
    grid = (layout.grid[0], int(np.count_nonzero(~removed)))
    smaller = BlockLayout.from_indices(layout.row_of_block[stay], cols, grid, layout.block_shape)
    source = torch.from_numpy(stay).to(values.device)
    carry_state(optimizer, values, source)
    layer.in_features = inputs
    layer.change_layout(smaller, remap_blocks(values.detach(), source))
