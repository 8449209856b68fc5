"""The definition of dropout with a leaky ReLU, and of its random numbers, in numpy and plain PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..checks import always_supported

# Random numbers per stream (a part), and generators per stream.
PART, LANES = 4096, 8
WARM_UP = 18
# Parts that are drawn at a time; bounds the memory.
PARTS = 2048


unsupported_reason = always_supported


def forward(x: Tensor, factors: tuple[float, float, float], seed: int, least: int) -> tuple[Tensor, Tensor]:
    keep = torch.from_numpy(drawn(x.numel(), seed) >= least).view(x.shape)
    code = torch.where(keep, torch.where(x > 0, 1, 2), 0).to(torch.uint8)
    return backward(x, code, factors), code


def backward(grad: Tensor, code: Tensor, factors: tuple[float, float, float]) -> Tensor:
    sums = torch.float64 if grad.dtype == torch.float64 else torch.float32
    of = torch.tensor(factors, dtype=sums)[code.long()]
    # `where` instead of a product with 0, which is NaN for infinity.
    return torch.where(code == 0, 0, grad.to(sums) * of).to(grad.dtype)


def drawn(count: int, seed: int) -> np.ndarray:
    """Draw `count` uint16: each part has eight SFC64 generators, which take turns; their lowest bits come first.

    Source: Doty-Humphrey, PractRand (2010), whose sfc64 with three words of seed this is.
    """
    parts = -(-count // PART)
    pieces = [_streams(np.arange(first, min(first + PARTS, parts)), seed) for first in range(0, parts, PARTS)]
    return np.concatenate([np.empty(0, np.uint16), *pieces])[:count]


def _streams(parts: np.ndarray, seed: int) -> np.ndarray:
    """Return the random uint16 numbers of these parts of a tensor, from generators (sfc64) of each part."""
    b = (parts[:, None] * LANES + np.arange(LANES)).astype(np.uint64)
    a, c, counter = np.full_like(b, seed), np.zeros_like(b), np.uint64(1)
    words = np.empty((len(parts), PART // (4 * LANES), LANES), dtype="<u8")
    for i in range(-WARM_UP, words.shape[1]):
        word = a + b + counter
        counter += np.uint64(1)
        a, b = b ^ (b >> np.uint64(11)), c + (c << np.uint64(3))
        c = ((c << np.uint64(24)) | (c >> np.uint64(40))) + word
        if i >= 0:
            words[:, i] = word
    return words.reshape(-1).view("<u2").astype(np.uint16)
