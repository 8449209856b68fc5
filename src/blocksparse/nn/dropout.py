"""Dropout whose mask is drawn fast on the CPU and takes one byte per number."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checked import number
from ..ops import dropout
from ..ops.registry import can_bypass_dispatcher


class Dropout(nn.Module):
    """`torch.nn.Dropout`, drawn from another generator on the CPU: a twentieth of the time, a quarter of the memory.

    PyTorch draws a mask on the CPU in one thread, number by number, which takes longer than all products of a sparse
    layer, and keeps it as numbers of x's dtype. Here PyTorch's generator gives a seed for each call, and generators of
    our own 16 bits for each number, which are compared with p: it is rounded to them, and the scale follows. On other
    devices, in compiled graphs and under transforms it is PyTorch's own.

    Args:
        p: the part of the numbers that is set to 0, from 0 to below 1; the others are multiplied by 1 / (1 - p).

    Shapes: any; elementwise. With a second argument, `slope`, it is applied to a leaky ReLU of x, of that slope on the
    negative side: on the CPU in the same pass over memory.

    Raises:
        BlockSparseError: a p that is no number from 0 to below 1.

    Example:
        >>> import torch, blocksparse as bs
        >>> y = bs.nn.Dropout(0.25)(torch.ones(10_000))
        >>> y.unique(), bool((y == 0).sum() / 10_000 < 0.3)
        (tensor([0.0000, 1.3333]), True)
        >>> bs.nn.Dropout(0.25)(-torch.ones(10_000), slope=0.5).unique()
        tensor([-0.6667,  0.0000])
    """

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.p = number("p", p, 0, below=1)

    def forward(self, input: Tensor, slope: float = 1.0) -> Tensor:
        x, drops = input, self.training and self.p > 0
        direct = can_bypass_dispatcher(x) if drops else _saves(x, slope)
        if direct and x.device.type == "cpu":
            least, drawn = (dropout.least_of(self.p), seed()) if drops else (0, 0)
            order = _order(x)
            x = x.permute(order) if order else x
            y = dropout.dropout(x, dropout.factors_of(least, float(slope)), drawn, least)
            return y.permute([order.index(axis) for axis in range(x.dim())]) if order else y
        x = x if slope == 1 else F.leaky_relu(x, slope)
        return F.dropout(x, self.p) if drops else x

    def extra_repr(self) -> str:
        return f"{self.p:g}"


def _saves(x: Tensor, slope: float) -> bool:
    """Return whether the codes of a leaky ReLU alone are worth it: for the gradient PyTorch keeps x, four times as large."""
    return slope != 1 and x.requires_grad and torch.is_grad_enabled() and can_bypass_dispatcher(x) and x.is_contiguous()


def _order(x: Tensor) -> list[int]:
    """Return the axes as they lie in memory, where that is another order: images that are channels-last stay so."""
    if x.is_contiguous():
        return []
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return order if x.permute(order).is_contiguous() else []  # else it has gaps


def seed() -> int:
    """Return a seed for one call, drawn by PyTorch's generator."""
    return int(torch.randint(-(2**63), 2**63 - 1, (), device="cpu")) % 2**64
