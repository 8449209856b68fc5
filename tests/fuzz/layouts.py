"""Layouts and data of cases: from empty to full, with empty rows and columns, a single block, or hubs."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from torch import Tensor

from blocksparse import BlockLayout

from .calls import ACTIVATIONS, DTYPES

FILLINGS = ("random", "random", "random", "none", "full", "empty rows", "empty columns", "one block", "hubs")
TOKENS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def draw_tokens(rng: Random, most: int = 200) -> int:
    """Draw 0, 1, few, or most often about the width of a panel."""
    near = rng.choice(TOKENS) + rng.randint(-1, 1)
    return min(most, rng.choice((0, 1, 1, rng.randint(2, 8), near, near, near, rng.randint(0, 200))))


def draw_layout(rng: Random, block: tuple[int, int], most: int, longest: int = 40) -> dict:
    """Draw a layout whose dense matrix has up to `most` elements."""
    rows = rng.randint(1, max(1, min(longest, most // (block[0] * block[1]))))
    cols = rng.randint(1, max(1, min(longest, most // (block[0] * block[1] * rows))))
    grid = [rows, cols] if rng.random() < 0.5 or block[0] != block[1] else [cols, rows]
    return {
        "grid": grid,
        "block": list(block),
        "filling": rng.choice(FILLINGS),
        "density": rng.choice((0.02, 0.1, 0.3, 0.5, 0.9)),
        "wide": rng.random() < 0.2,
    }


def draw_block(rng: Random, sizes: tuple[int, ...], most: int) -> tuple[int, int]:
    """Draw a square block of one of these sizes, or two independent sides, often short ones."""
    if rng.random() < 0.5:
        return (rng.choice(sizes),) * 2
    return tuple(rng.randint(1, rng.choice((20, most))) for _ in range(2))


def build_layout(case: dict, numbers: np.random.Generator) -> BlockLayout:
    """Build the layout that a case describes; a `wide` one has int64 indices."""
    grid, filling, density = tuple(case["grid"]), case["filling"], case["density"]
    mask = numbers.random(grid) < density
    if filling in ("none", "one block"):
        mask[:] = False
    if filling == "full":
        mask[:] = True
    if filling == "empty rows":
        mask[numbers.random(grid[0]) < 0.5] = False
    if filling == "empty columns":
        mask[:, numbers.random(grid[1]) < 0.5] = False
    if filling == "hubs":
        mask[numbers.integers(grid[0])] = True
        mask[:, numbers.integers(grid[1])] = True
    if filling == "one block":
        mask[numbers.integers(grid[0]), numbers.integers(grid[1])] = True
    layout = BlockLayout(mask, tuple(case["block"]))
    if case["wide"]:
        wide = BlockLayout.__new__(BlockLayout)
        index = (layout.row_start, layout.col_of_block)
        wide._fill(*(array.astype(np.int64) for array in index), grid, layout.block_shape)
        return wide
    return layout


def normal(numbers: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(numbers.standard_normal(shape, dtype=np.float32))


def vary(numbers: np.random.Generator, data: Tensor, kind: str) -> Tensor:
    """Return data of one magnitude ("normal"), over a range of 2^20 ("wide"), of whole numbers, or with zeros."""
    if kind == "wide":
        return data * torch.exp2(torch.from_numpy(numbers.integers(-10, 10, data.shape).astype(np.float32)))
    if kind == "whole":
        return (2 * data).round()
    return data * torch.from_numpy(numbers.random(data.shape) < 0.5) if kind == "zeros" else data


def draw_options(rng: Random) -> dict:
    """Draw the options that linear products and convolutions share."""
    return {
        "dtype": rng.choice(list(DTYPES)),
        "offset": rng.choice((0, 0, 1, 3)),
        "spread": rng.choice(("normal", "normal", "wide", "whole", "zeros")),
        "bias": rng.random() < 0.5,
        "activation": rng.choice(ACTIVATIONS),
        "threads": 2 if rng.random() < 0.1 else 1,
    }


def touched(layout: BlockLayout, columns: bool) -> Tensor:
    """Return whether each feature of the rows, or of the columns, has a block."""
    side = 1 if columns else 0
    blocks = np.zeros(layout.grid[side], dtype=bool)
    blocks[layout.col_of_block if columns else layout.row_of_block] = True
    return torch.from_numpy(np.repeat(blocks, layout.block_shape[side]))


def take_blocks(dense: Tensor, layout: BlockLayout) -> Tensor:
    """Return the stored blocks of a dense weight, of any number of axes."""
    (rows, cols), (high, wide) = layout.grid, layout.block_shape
    blocks = dense.reshape(rows, high, cols, wide, *dense.shape[2:]).transpose(1, 2)
    return blocks[to_index(layout.row_of_block), to_index(layout.col_of_block)]


def to_index(index: np.ndarray) -> Tensor:
    """Return a layout's index as a tensor that can index others."""
    return torch.from_numpy(index.astype(np.int64))
