"""Hypothesis strategies that several tests share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from blocksparse import BlockLayout

FILLINGS = ("random", "none", "full", "empty row", "empty column", "one block")


def grids(most=12) -> st.SearchStrategy[tuple[int, int]]:
    """(out_blocks, in_blocks), each from 1 to `most`."""
    return st.tuples(st.integers(1, most), st.integers(1, most))


@st.composite
def layouts(draw, max_grid=6, blocks=(1, 2, 3, 4, 8)) -> BlockLayout:
    """Layouts of up to max_grid x max_grid blocks: square and rectangular blocks, empty rows and columns, none, all."""
    grid = draw(grids(max_grid))
    block = draw(st.tuples(st.sampled_from(blocks), st.sampled_from(blocks)))
    filling = draw(st.sampled_from(FILLINGS))
    mask = np.full(grid, filling == "full")
    if filling in ("random", "empty row", "empty column"):
        bits = draw(st.lists(st.booleans(), min_size=mask.size, max_size=mask.size))
        mask = np.array(bits, dtype=bool).reshape(grid)
    row, col = draw(st.integers(0, grid[0] - 1)), draw(st.integers(0, grid[1] - 1))
    if filling == "empty row":
        mask[row] = False
    elif filling == "empty column":
        mask[:, col] = False
    elif filling == "one block":
        mask[row, col] = True
    return BlockLayout(mask, block)
