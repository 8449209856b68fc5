"""Dropout with a fast mask on the CPU that takes one byte per element."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checked import number
from ..ops import dropout
from ..ops.checks import SUM_DTYPES
from ..ops.registry import can_bypass_dispatcher


class Dropout(nn.Module):
    """`torch.nn.Dropout`, on the CPU with another generator: 1/20 of PyTorch's time and 1/4 of its memory.

    On the CPU, PyTorch draws the mask in one thread, which takes longer than all products of a sparse layer, and stores
    it in the dtype of x. Here PyTorch's generator draws one seed per call, and generators of our own draw 16 bits per
    element, so p is rounded to a multiple of 2^-16. Other devices, graphs and transforms use PyTorch's dropout.

    Args:
        p: the fraction of elements set to 0, from 0 to below 1; the others are multiplied by 1 / (1 - p).

    Shapes: any; elementwise. `forward(x, slope)` applies dropout to a leaky ReLU of x with that negative slope, on the
    CPU in the same pass over memory.

    Raises:
        BlockSparseError: p is not a number from 0 to below 1.

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
        """Return dropout(leaky_relu(input, slope)); slope 1 is no activation, and only training drops."""
        x, drops = input, self.training and self.p > 0
        direct = x.dtype in SUM_DTYPES and (can_bypass_dispatcher(x) if drops else _saves_memory(x, slope))
        if direct and x.device.type == "cpu":
            least, drawn = (dropout.least_of(self.p), seed()) if drops else (0, 0)
            order = _memory_order(x)
            x = x.permute(order) if order else x
            y = dropout.dropout(x, dropout.factors_of(least, float(slope)), drawn, least)
            return y.permute([order.index(axis) for axis in range(x.dim())]) if order else y
        x = x if slope == 1 else F.leaky_relu(x, slope)
        return F.dropout(x, self.p) if drops else x

    def extra_repr(self) -> str:
        return f"{self.p:g}"


def _saves_memory(x: Tensor, slope: float) -> bool:
    """Return whether our op saves memory for a leaky ReLU alone: PyTorch keeps x, four times as large as our codes."""
    return slope != 1 and x.requires_grad and torch.is_grad_enabled() and can_bypass_dispatcher(x) and x.is_contiguous()


def _memory_order(x: Tensor) -> list[int]:
    """Return the order of the axes in memory, such as channels-last; [] if x is contiguous or has gaps."""
    if x.is_contiguous():
        return []
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return order if x.permute(order).is_contiguous() else []


def seed() -> int:
    """Draw a seed for one call by PyTorch's generator; PyTorch's profiler refuses integers from 2^63 on."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))
