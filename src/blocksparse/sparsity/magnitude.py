"""Which blocks are the smallest: exact, without a sort, the same blocks every time."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..errors import BlockSparseError

NORMS = ("l2", "mean", "max")


def check_norm(norm: object) -> None:
    """Raises a BlockSparseError unless it is one of them."""
    if norm not in NORMS:
        raise BlockSparseError.expected("norm", f"one of {', '.join(NORMS)}", repr(norm))


def norms_of(blocks: Tensor, norm: str, dims: tuple[int, ...]) -> Tensor:
    """The l2 norm, the mean or the largest |w| over these dimensions; of single weights each is |w|."""
    blocks = blocks.detach()
    blocks = blocks if blocks.dtype in (torch.float32, torch.float64) else blocks.float()
    if norm == "mean":
        return blocks.abs().mean(dims)
    return torch.linalg.vector_norm(blocks, math.inf if norm == "max" else 2, dims)


def block_norms(values: Tensor, norm: str = "l2") -> np.ndarray:
    """The magnitude of each stored block, `[nnz]`: "l2", or the "mean" or "max" of |w|.

    >>> import torch
    >>> from blocksparse.sparsity.magnitude import block_norms
    >>> block_norms(torch.tensor([[[3.0, -4.0]], [[1.0, 0.0]]])).tolist()
    [5.0, 1.0]
    """
    return norms_of(values, norm, tuple(range(1, values.dim()))).cpu().numpy()


def smallest(magnitudes: np.ndarray, count: int) -> np.ndarray:
    """Bool `[n]`: True for the `count` smallest; of equals those that come first.

    >>> import numpy as np
    >>> from blocksparse.sparsity.magnitude import smallest
    >>> smallest(np.array([3.0, 1.0, 2.0, 1.0]), 1).tolist()
    [False, True, False, False]
    """
    if count <= 0:
        return np.zeros(magnitudes.size, dtype=bool)
    bound = np.partition(magnitudes, count - 1)[count - 1]
    chosen = magnitudes < bound
    chosen[np.flatnonzero(magnitudes == bound)[: count - np.count_nonzero(chosen)]] = True
    return chosen
