"""Degrees of the rows and columns of a layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..layout import BlockLayout, check_layout
from .graph import check_level


@dataclass(frozen=True)
class DegreeDistribution:
    """The number of outputs and of inputs with each degree; see `degree_distribution`."""

    out: dict[int, int]
    """{degree: number of rows with it}, by rising degree."""
    in_: dict[int, int]
    """{degree: number of columns with it}, by rising degree."""


def degrees(layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out_degrees, in_degrees): the stored blocks of `layout` per row and per column, int64.

    >>> import blocksparse as bs
    >>> bs.topology.degrees(bs.BlockLayout([[True, True, False], [False, True, False]], block_size=4))
    (tensor([2, 1]), tensor([1, 2, 0]))
    """
    check_layout(layout)
    return layout.crow_indices().diff().long(), torch.bincount(layout.col_indices(), minlength=layout.grid[1])


def degree_distribution(layout: BlockLayout, level: str = "block") -> DegreeDistribution:
    """Count the rows and columns with each number of stored blocks, or neurons with each number of weights.

    Args:
        layout: a layout of any shape; the diagonal counts.
        level: "block" (default) or "neuron".

    Raises:
        BlockSparseError: an unknown level.

    >>> import blocksparse as bs
    >>> found = bs.topology.degree_distribution(bs.patterns.banded((20, 20), block_size=4))
    >>> found.out
    {2: 2, 3: 3}
    >>> bs.topology.degree_distribution(bs.patterns.banded((20, 20), block_size=4), level="neuron").out
    {8: 8, 12: 12}
    """
    check_level(level)
    scales = layout.block_shape if level == "neuron" else (1, 1)
    out, in_ = degrees(layout)
    return DegreeDistribution(_histogram(out, scales[1], scales[0]), _histogram(in_, scales[0], scales[1]))


def hub_load(layout: BlockLayout) -> float:
    """Return the most blocks in a row or column of `layout` / their mean: 1 if all have the same, 0 without blocks.

    >>> import blocksparse as bs
    >>> bs.topology.hub_load(bs.BlockLayout([[True, True, True], [True, False, False]], block_size=4))
    1.5
    """
    check_layout(layout)
    if layout.nnz == 0:
        return 0.0
    return max(float(counts.max() / counts.double().mean()) for counts in degrees(layout))


def _histogram(counts: torch.Tensor, scale: int, each: int) -> dict[int, int]:
    """Return {count * scale: rows with it * each}."""
    degree, rows = np.unique(counts.numpy(), return_counts=True)
    return dict(zip((degree * scale).tolist(), (rows * each).tolist(), strict=True))
