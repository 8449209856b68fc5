"""The example of the 2017 library's README on torch tensors, checked against the dense product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from blocksparse.convert import to_dense
from blocksparse.layout import BlockLayout
from blocksparse.matmul import BlocksparseMatMul
from blocksparse.measure import Samples, alternate


@dataclass(frozen=True)
class Example:
    """Sizes, errors against the dense float64 product, and times of "block-sparse" and "dense"."""

    hidden: int
    block: int
    batch: int
    layout: BlockLayout
    relative_error: float
    largest_error: float
    samples: Samples


def run(
    hidden: int = 4096, block: int = 32, batch: int = 64, *, seed: int = 0, rounds: int = 21, budget: float = 2.0
) -> Example:
    """Compute `y = bsmm(x, w)` in float32 for a random 0/1 pattern of about half of the blocks.

    >>> from blocksparse_lab.recipes import example_2017
    >>> example_2017.run(hidden=64, block=16, batch=8, rounds=2, budget=0.1).relative_error < 2e-6
    True
    """
    pattern = np.random.default_rng(seed).integers(2, size=(hidden // block, hidden // block))
    bsmm = BlocksparseMatMul(pattern, block_size=block)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, hidden, generator=generator)
    w = torch.randn(bsmm.w_shape, generator=generator)
    dense = to_dense(w, bsmm.layout)  # [in, out]

    y = bsmm(x, w).double()
    exact = x.double() @ dense.double()
    difference = y - exact
    samples = alternate({"block-sparse": lambda: bsmm(x, w), "dense": lambda: x @ dense}, rounds=rounds, budget=budget)
    return Example(
        hidden,
        block,
        batch,
        bsmm.layout,
        (difference.norm() / exact.norm()).item(),
        difference.abs().max().item(),
        samples,
    )
