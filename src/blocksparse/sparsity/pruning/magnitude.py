"""Which blocks are the smallest: exact, without a sort, of equal ones the same random ones every time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...surgery.blocks import Blocks, reduce_blocks
from ...surgery.weight_handle import WeightHandle

NORMS = ("l2", "mean", "max")
Order = Callable[[np.ndarray], np.ndarray]
"""Numbers of places by which equal ones are put in order."""


def check_norm(norm: object) -> None:
    if norm not in NORMS:
        raise BlockSparseError.expected("norm", f"one of {', '.join(NORMS)}", repr(norm))


def block_norms(values: Tensor, norm: str = "l2") -> Tensor:
    """The magnitude of each stored block, `[nnz]`: "l2", or the "mean" or "max" of |w|; differentiable.

    Args:
        values: `[nnz, block_out, block_in]`, with a convolution's `*kernel` behind or not. Norms of 16-bit values are
            float32.
        norm: which.

    Raises:
        BlockSparseError: another norm, or values that are no blocks.

    >>> import torch, blocksparse as bs
    >>> values = torch.tensor([[[3.0, -4.0]], [[1.0, 0.0]]])
    >>> bs.sparsity.block_norms(values), bs.sparsity.block_norms(values, "max")
    (tensor([5., 1.]), tensor([4., 1.]))

    Source: `blocksparse_norm` of openai/blocksparse (2017). The sum of the l2 norms is the penalty of the group lasso.
    """
    check_norm(norm)
    if not isinstance(values, Tensor) or values.dim() < 3:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise BlockSparseError.expected("values", "blocks [nnz, block_out, block_in, ...]", got)
    return _norms(values, norm, tuple(range(1, values.dim())))


Norms = TypeVar("Norms", Tensor, np.ndarray)


def per_number(norms: Norms, blocks: Blocks, norm: str) -> Norms:
    """Norms per number in the block, as blocks of convolutions have more numbers but compete with others."""
    return norms / blocks.size**0.5 if norm == "l2" else norms


def dense_norms(blocks: Blocks, dense: Tensor, norm: str = "l2") -> Tensor:
    """The magnitude of each block of a dense weight, `[out_blocks, in_blocks]`, without gradients."""
    return reduce_blocks(blocks, dense, partial(norms_of, norm=norm, dims=blocks.inside))


def norms_of(blocks: Tensor, norm: str, dims: tuple[int, ...]) -> Tensor:
    """The l2 norm, the mean or the largest |w| over these dimensions, without gradients."""
    return _norms(blocks.detach(), norm, dims)


def magnitudes(stored: WeightHandle, norm: str = "l2") -> np.ndarray:
    """The norms of all stored blocks of a weight as numbers, to choose by."""
    return stored.gather(block_norms(stored.local, norm)).cpu().numpy()


def _norms(blocks: Tensor, norm: str, dims: tuple[int, ...]) -> Tensor:
    blocks = blocks if blocks.dtype in (torch.float32, torch.float64) else blocks.float()
    if norm == "mean":
        return blocks.abs().mean(dims)
    return torch.linalg.vector_norm(blocks, math.inf if norm == "max" else 2, dims)


def scattered(places: np.ndarray, seed: int = 0) -> np.ndarray:
    """A random number of 64 bits for each place, uint64, by which equals are put in order.

    It depends on the place and the seed only: the same on every process, for any part of the places.

    Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators (2014): SplitMix64.
    """
    x = places.astype(np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def smallest(magnitudes: np.ndarray, count: int, order: Order = scattered) -> np.ndarray:
    """Bool `[n]`: True for the `count` smallest; of equals those whose positions come first in a random order."""
    if count <= 0:
        return np.zeros(magnitudes.size, dtype=bool)
    bound = np.partition(magnitudes, count - 1)[count - 1]
    chosen = magnitudes < bound
    equal, missing = np.flatnonzero(magnitudes == bound), count - np.count_nonzero(chosen)
    if missing < equal.size:
        equal = equal[order(equal).argsort()[:missing]]
    chosen[equal] = True
    return chosen
