"""ELUs of both signs side by side, and dropout behind them, in one pass on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checked import number
from ..errors import BlockSparseError
from ..ops import concat_elu as op
from ..ops import dropout
from ..ops.conv import is_channels_last
from ..ops.registry import is_eager
from .dropout import seed


def concat_elu(x: Tensor, p: float = 0.0) -> Tensor:
    """Concatenates elu(x) and elu(-x): `[n, channels, *] -> [n, 2 channels, *]`.

    On the CPU it takes one pass over memory, and one for the gradient, which keeps nothing but x.

    Args:
        x: `[n, channels]` with any axes behind, channels-last or not; as y is then.
        p: the part of the outputs that is set to 0, as by `Dropout` in training.

    Raises:
        BlockSparseError: an x without channels, a p that is no number from 0 to below 1.

    >>> import torch, blocksparse as bs
    >>> bs.nn.concat_elu(torch.tensor([[2.0, -2.0]]))
    tensor([[ 2.0000, -0.8647, -0.8647,  2.0000]])

    Source: Salimans, Karpathy, Chen, Kingma, PixelCNN++ (2017), after the CReLU of Shang et al. (2016).
    """
    if x.dim() < 2:
        raise BlockSparseError.expected("x", "[n, channels, *]", list(x.shape))
    p = number("p", p, 0, below=1)
    if x.device.type != "cpu" or not is_eager(x) or not x.is_floating_point():
        return F.dropout(F.elu(torch.cat([x, -x], 1), inplace=True), p)
    least = dropout.least_of(p)
    y: Tensor = _ConcatElu.apply(x, dropout.scale_of(least), seed() if least else 0, least)  # type: ignore[no-untyped-call]
    return y


class _ConcatElu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, seed: int, least: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.drawn = scale, seed, least
        return _like(x, op.forward(_rows(x), *ctx.drawn), 2 * x.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            found = _gradient(_rows(grad, like=x), _rows(x), *ctx.drawn)
        else:
            found = op.backward(_rows(grad, like=x), _rows(x), *ctx.drawn)
        return _like(x, found, x.shape[1]), None, None, None


def _rows(x: Tensor, like: Tensor | None = None) -> Tensor:
    """[rows, features]: of positions if `like` is channels-last, else of samples."""
    like = x if like is None else like
    return x.movedim(1, -1).flatten(0, -2) if like.dim() > 2 and is_channels_last(like) else x.flatten(1)


def _like(x: Tensor, rows: Tensor, channels: int) -> Tensor:
    n, _, *space = x.shape
    if x.dim() > 2 and is_channels_last(x):
        return rows.view(n, *space, channels).movedim(-1, 1)
    return rows.view(n, channels, *space)


def _gradient(grad: Tensor, x: Tensor, scale: float, seed: int, least: int) -> Tensor:
    """What `ops.concat_elu.backward` computes, differentiable in both."""
    upper, lower = torch.where(op.kept(x, seed, least), grad, 0).chunk(2, 1)
    slope = (-x.abs()).exp()
    return scale * torch.where(x > 0, upper - lower * slope, upper * slope - lower)
