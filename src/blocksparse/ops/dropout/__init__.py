"""Leaky ReLU and dropout in one pass, on the CPU.

    y = factor[code] x,  grad_x = factor[code] grad

The code of a number is a uint8: 0 if the number is dropped, else 1 if x > 0, else 2. It is dropped if one of 65,536
equally likely numbers is below `least`, so the dropped fraction is a multiple of 1 / 65,536; the other numbers are
scaled to keep the expectation. Which numbers are dropped depends on the seed and the position only, not on the backend,
the instruction set, the dtype or the number of threads.
"""

from __future__ import annotations

from torch import Tensor

from .op import LEVELS, DropoutNode, Factors, backward, forward

__all__ = ["LEVELS", "Factors", "backward", "dropout", "factors_of", "forward", "least_of", "scale_of"]


def dropout(x: Tensor, factors: Factors, seed: int, least: int) -> Tensor:
    """Return the outputs of `forward`, differentiable any number of times. x is a tensor on the CPU, seen by autograd.

    >>> import torch
    >>> dropout(torch.tensor([-1.0, 2.0]), factors_of(0, 0.5), seed=0, least=0)
    tensor([-0.5000,  2.0000])
    """
    y: Tensor = DropoutNode.apply(x, factors, seed, least, None)  # type: ignore[no-untyped-call]
    return y


def least_of(p: float) -> int:
    """Return how many of `LEVELS` levels are dropped for a probability p; at least one level stays."""
    return min(round(p * LEVELS), LEVELS - 1)


def factors_of(least: int, slope: float) -> Factors:
    """Return the factor for each code; `slope` is that of the negative side, 1 for dropout alone."""
    scale = scale_of(least)
    return 0.0, scale, slope * scale


def scale_of(least: int) -> float:
    """Return the factor of the numbers that are not dropped."""
    return LEVELS / (LEVELS - least)
