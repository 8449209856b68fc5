"""Dropout whose mask is drawn fast on the CPU, and takes a byte a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checked import number
from ..layout import LARGE
from ..ops import workspace

LEVELS = 2**16


class Dropout(nn.Module):
    """`torch.nn.Dropout`, drawn from another generator on the CPU: a twentieth of the time, a quarter of the memory.

    PyTorch draws a mask on the CPU in one thread, number by number, which takes longer than all products of a sparse
    layer, and keeps it as numbers of x's dtype. Here PyTorch's generator gives a seed for each call, and numpy's SFC64
    16 bits for each number, which are compared with p: it is rounded to them, and the scale follows. On other devices,
    and in compiled graphs, it is PyTorch's own.

    Args:
        p: the part of the numbers that is set to 0, from 0 to below 1; the others are multiplied by 1 / (1 - p).

    Shapes: any; elementwise.

    Raises:
        BlockSparseError: a p that is no number from 0 to below 1.

    Example:
        >>> import torch, blocksparse as bs
        >>> y = bs.nn.Dropout(0.25)(torch.ones(10_000))
        >>> y.unique(), bool((y == 0).sum() / 10_000 < 0.3)
        (tensor([0.0000, 1.3333]), True)
    """

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.p = number("p", p, 0, below=1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.p)
        least = min(round(self.p * LEVELS), LEVELS - 1)
        return _Masked.apply(x, _kept(x.shape, least), LEVELS / (LEVELS - least))

    def extra_repr(self) -> str:
        return f"{self.p:g}"


class _Masked(torch.autograd.Function):
    """x * mask * scale, of which only the mask is kept, as it is."""

    @staticmethod
    def forward(x: Tensor, mask: Tensor, scale: float) -> Tensor:
        if x.dtype not in (torch.float32, torch.float64):
            return (x * mask).mul_(scale)
        # PyTorch would first make a whole mask of x's dtype, numpy goes piece by piece.
        y = workspace.empty_like(x)
        np.multiply(x.detach().numpy(), mask.numpy(), out=y.numpy())
        return y.mul_(scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.scale = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return _Masked.apply(grad, mask, ctx.scale), None, None


def _kept(shape: torch.Size, least: int) -> Tensor:
    """Bool: True where one of `LEVELS` numbers is `least` or more."""
    seed = torch.randint(-(2**63), 2**63 - 1, (), device="cpu")
    bits = np.random.SFC64(int(seed) % 2**64)
    kept = np.empty(shape.numel(), dtype=bool)
    # Part by part: what is drawn never takes much memory.
    for first in range(0, kept.size, LARGE):
        part = kept[first : first + LARGE]
        drawn = bits.random_raw(-(-part.size // 4)).view(np.uint16)[: part.size]
        np.greater_equal(drawn, np.uint16(least), out=part)
    return torch.from_numpy(kept).view(shape)
