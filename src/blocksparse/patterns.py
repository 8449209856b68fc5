"""Layouts by construction."""

from __future__ import annotations

import numpy as np

from .layout import BlockLayout


def dense(shape, block_size=32):
    layout = BlockLayout([[True]], block_size)
    grid = (shape[0] // layout.block_shape[0], shape[1] // layout.block_shape[1])
    return BlockLayout(np.ones(grid, dtype=bool), block_size)


def random(shape, block_size=32, density=0.1, seed=0):
    layout = BlockLayout([[True]], block_size)
    grid = (shape[0] // layout.block_shape[0], shape[1] // layout.block_shape[1])
    rng = np.random.default_rng(seed)
    n = round(density * grid[0] * grid[1])
    keys = rng.choice(grid[0] * grid[1], n, replace=False)
    return BlockLayout.from_indices(keys // grid[1], keys % grid[1], grid, block_size)
