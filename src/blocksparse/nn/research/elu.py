"""ELUs of x and -x, concatenated, with dropout, in one pass over memory on the CPU."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checked import number
from ...errors import BlockSparseError
from ...ops import concat_elu as op
from ...ops import dropout
from ...ops.checks import SUM_DTYPES
from ...ops.conv import is_channels_last
from ...ops.registry import can_bypass_dispatcher
from ..dropout import seed


def concat_elu(x: Tensor, p: float = 0.0) -> Tensor:
    """Concatenate elu(x) and elu(-x): `[n, channels, *] -> [n, 2 channels, *]`.

    On the CPU the forward pass and the gradient each take one pass over memory; only x is saved for the gradient.

    Args:
        x: `[n, channels, *]`, channels-last or not; the result has the same memory format.
        p: the fraction of outputs set to 0, as by `Dropout` in training. Default: 0.

    Raises:
        BlockSparseError: x has no channels, or p is not a number from 0 to below 1.

    >>> import torch, blocksparse as bs
    >>> bs.nn.concat_elu(torch.tensor([[2.0, -2.0]]))
    tensor([[ 2.0000, -0.8647, -0.8647,  2.0000]])

    Source: Salimans, Karpathy, Chen, Kingma, PixelCNN++ (2017), after the CReLU of Shang et al. (2016).
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise BlockSparseError.expected("x", "[n, channels, *]", got)
    p = number("p", p, 0, below=1)
    if x.device.type != "cpu" or x.dtype not in SUM_DTYPES or not can_bypass_dispatcher(x):
        return F.dropout(F.elu(torch.cat([x, -x], 1), inplace=True), p)
    least = dropout.least_of(p)
    drawn = dropout.scale_of(least), seed() if least else 0, least
    n, channels, *space = x.shape
    if space and is_channels_last(x):
        rows = op.concat_elu(x.movedim(1, -1).reshape(-1, channels), *drawn)
        return rows.view(n, *space, 2 * channels).movedim(-1, 1)
    samples = op.concat_elu(x.reshape(n, math.prod(x.shape[1:])), *drawn)
    return samples.view(n, 2 * channels, *space)
