"""ELUs of both signs side by side, and dropout behind them, in one pass on the CPU."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ...checked import number
from ...errors import BlockSparseError
from ...ops import concat_elu as op
from ...ops import dropout
from ...ops.checks import SUM_DTYPES
from ...ops.conv import is_channels_last
from ...ops.registry import is_eager
from ..dropout import seed


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
    if x.device.type != "cpu" or x.dtype not in SUM_DTYPES or not is_eager(x) or forward_ad._current_level >= 0:
        return F.dropout(F.elu(torch.cat([x, -x], 1), inplace=True), p)
    least = dropout.least_of(p)
    drawn = dropout.scale_of(least), seed() if least else 0, least
    n, channels, *space = x.shape
    if space and is_channels_last(x):
        rows: Tensor = _ConcatElu.apply(x.movedim(1, -1).reshape(-1, channels), *drawn)  # type: ignore[no-untyped-call]
        return rows.view(n, *space, 2 * channels).movedim(-1, 1)
    samples: Tensor = _ConcatElu.apply(x.reshape(n, math.prod(x.shape[1:])), *drawn)  # type: ignore[no-untyped-call]
    return samples.view(n, 2 * channels, *space)


class _ConcatElu(torch.autograd.Function):
    """`ops.concat_elu` of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, seed: int, least: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.drawn = scale, seed, least
        return op.forward(x, *ctx.drawn)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        plain = is_eager(grad, x) and not torch.is_grad_enabled()  # enabled for second derivatives
        plain = plain and not torch._C._functorch.is_legacy_batchedtensor(grad)  # by `is_grads_batched`, say
        return (op.backward if plain else _gradient)(grad, x, *ctx.drawn), None, None, None


def _gradient(grad: Tensor, x: Tensor, scale: float, seed: int, least: int) -> Tensor:
    """What `ops.concat_elu.backward` computes, differentiable in both."""
    upper, lower = torch.where(op.kept(x, seed, least), grad, 0).chunk(2, 1)
    slope = (-x.abs()).exp()
    return scale * torch.where(x > 0, upper - lower * slope, upper * slope - lower)
