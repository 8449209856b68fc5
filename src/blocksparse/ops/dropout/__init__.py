"""Leaky ReLU and dropout in one pass, on the CPU and without autograd.

    y = factor[code] x,  grad_x = factor[code] grad

The code of a number, a uint8, is 0 where it is dropped, else 1 where x > 0, else 2. It is dropped where one of 65,536
equally likely numbers is below `least`: the part that goes is a whole multiple of 1 / 65,536, and the scale of what
stays follows, so that the expectation is kept. What is drawn depends on the seed and on the place only: not on the
backend, the instruction set, the dtype, or the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...checked import integer
from ...errors import BlockSparseError
from ..registry import Op
from . import cpu, reference

__all__ = ["LEVELS", "Factors", "backward", "factors_of", "forward", "least_of"]

DROPOUT = Op("dropout", cpu, reference, elsewhere=reference)

LEVELS = 2**16

Factors = tuple[float, float, float]


def least_of(p: float) -> int:
    """Returns how many of `LEVELS` levels are dropped for p; at least one stays."""
    return min(round(p * LEVELS), LEVELS - 1)


def factors_of(least: int, slope: float) -> Factors:
    """Returns the factor for each code; `slope` is that of the negative side, 1 for dropout alone."""
    scale = scale_of(least)
    return 0.0, scale, slope * scale


def scale_of(least: int) -> float:
    """Returns the factor of what stays."""
    return LEVELS / (LEVELS - least)


def forward(x: Tensor, factors: Factors, seed: int, least: int) -> tuple[Tensor, Tensor]:
    """The outputs and the codes, both of x's shape and contiguous.

    >>> import torch
    >>> y, code = forward(torch.tensor([-1.0, 2.0]), factors_of(0, 0.5), seed=0, least=0)
    >>> y, code
    (tensor([-0.5000,  2.0000]), tensor([2, 1], dtype=torch.uint8))
    """
    integer("seed", seed, 0, below=2**64), integer("least", least, 0, below=LEVELS)
    _check_factors(factors)
    found: tuple[Tensor, Tensor] = DROPOUT.on(x.device, x.dtype).forward(_plain(x), factors, seed, least)
    return found


def backward(grad: Tensor, code: Tensor, factors: Factors) -> Tensor:
    """The gradient of x."""
    _check_factors(factors)
    if code.shape != grad.shape or code.dtype is not torch.uint8 or code.device != grad.device:
        expected = f"uint8 {list(grad.shape)} on {grad.device}, as grad"
        raise BlockSparseError.expected("code", expected, f"{code.dtype} {list(code.shape)} on {code.device}")
    grad_x: Tensor = DROPOUT.on(grad.device, grad.dtype).backward(_plain(grad), _plain(code), factors)
    return grad_x


def _check_factors(factors: Factors) -> None:
    if len(factors) != 3 or not all(isinstance(factor, int | float) for factor in factors):
        raise BlockSparseError.expected("factors", "three numbers, one for each code", factors)


def _plain(tensor: Tensor) -> Tensor:
    """In one piece, and as it lies in memory where PyTorch had put off a change of sign."""
    return tensor.resolve_neg().contiguous()
