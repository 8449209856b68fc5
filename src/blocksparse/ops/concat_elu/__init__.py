"""ELUs of x and of -x side by side, with dropout behind them, in one pass, on the CPU and without autograd.

    y = scale [elu(x), elu(-x)]

x is `[rows, features]`, y `[rows, 2 features]`. Of y a number is dropped where one of 65,536 equally likely ones is
below `least`, as in `ops.dropout`: what is drawn depends on the seed and on the place in x. Nothing is kept for the
gradient but x: the numbers are drawn again.
"""

from __future__ import annotations

from torch import Tensor

from ...checked import integer
from ...errors import BlockSparseError
from ..dropout import LEVELS
from ..registry import Op
from . import cpu, reference

__all__ = ["backward", "forward", "kept"]

CONCAT_ELU = Op("concat_elu", cpu, reference, elsewhere=reference)
kept = reference.kept


def forward(x: Tensor, scale: float = 1.0, seed: int = 0, least: int = 0) -> Tensor:
    """y, contiguous.

    >>> import torch
    >>> forward(torch.tensor([[2.0, -2.0]]))
    tensor([[ 2.0000, -0.8647, -0.8647,  2.0000]])

    Source: Salimans, Karpathy, Chen, Kingma, PixelCNN++ (2017), after the CReLU of Shang et al. (2016).
    """
    _check(x, seed, least)
    y: Tensor = CONCAT_ELU.on(x.device, x.dtype).forward(x.contiguous(), scale, seed, least)
    return y


def backward(grad: Tensor, x: Tensor, scale: float = 1.0, seed: int = 0, least: int = 0) -> Tensor:
    """The gradient at x from that at y, contiguous."""
    _check(x, seed, least)
    if grad.shape != (x.shape[0], 2 * x.shape[1]) or grad.dtype != x.dtype or grad.device != x.device:
        expected = f"{x.dtype} {[x.shape[0], 2 * x.shape[1]]} on {x.device} for x {list(x.shape)}"
        raise BlockSparseError.expected("grad", expected, f"{grad.dtype} {list(grad.shape)} on {grad.device}")
    found = CONCAT_ELU.on(x.device, x.dtype).backward(grad.contiguous(), x.contiguous(), scale, seed, least)
    grad_x: Tensor = found
    return grad_x


def _check(x: Tensor, seed: int, least: int) -> None:
    integer("seed", seed, 0, below=2**64), integer("least", least, 0, below=LEVELS)
    if x.dim() != 2:
        raise BlockSparseError.expected("x", "[rows, features]", list(x.shape))
