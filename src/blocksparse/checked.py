"""Checks of models, numbers, sizes, masks and indices from users; they raise a BlockSparseError."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import BlockSparseError
from .optional_torch import is_tensor, torch

TOO_LARGE = 1 << 63  # for int64


def is_int(value: Any) -> bool:
    """Return whether the value is a Python or numpy integer, not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def boolean(name: str, value: Any) -> bool:
    """Return the value as a bool after a check: numbers and strings are refused."""
    if not isinstance(value, bool | np.bool_):
        raise BlockSparseError.expected(name, "True or False", repr(value))
    return bool(value)


def check_model(model: Any, argument: str = "model") -> None:
    """Raise a BlockSparseError that names the argument if it is not a module."""
    if not isinstance(model, torch.nn.Module):
        raise BlockSparseError.expected(argument, "a torch.nn.Module", type(model).__name__)


def integer(name: str, value: Any, least: int, below: int | None = None, of: str = "") -> int:
    """Return the value as an int after a check: `least` or more, and below `below` if given. Bools are refused.

    Without `below`, it has to be one that tensors can store. `of` is what `below` stands for, for the error.

    >>> from blocksparse.checked import integer
    >>> integer("m", 9, 1, below=4, of="the number of blocks")
    Traceback (most recent call last):
    ...
    blocksparse.errors.BlockSparseError: m: expected an int, 1 or more and below the number of blocks, 4, got 9
    """
    if not is_int(value) or value < least or value >= (TOO_LARGE if below is None else below):
        bound = "" if below is None else f" and below {of}{', ' if of else ''}{below}"
        if below is None and is_int(value) and value >= TOO_LARGE:
            bound = " and below 2^63"
        raise BlockSparseError.expected(name, f"an int, {least} or more{bound}", repr(value))
    return int(value)


def number(name: str, value: Any, least: float, most: float = math.inf, *, below: float = math.inf) -> float:
    """Return the value as a finite float after a check: from `least` to `most`, or below `below`. Bools are refused.

    >>> from blocksparse.checked import number
    >>> number("dropout", 1, 0, below=1)
    Traceback (most recent call last):
    ...
    blocksparse.errors.BlockSparseError: dropout: expected a number from 0 to below 1, got 1
    """
    real = is_int(value) or isinstance(value, float | np.floating)
    if not real or not abs(value) < math.inf or not least <= value <= most or value >= below:
        expected = f"a finite number, {least:g} or more"
        if min(most, below) < math.inf:
            expected = f"a number from {least:g} to " + (f"below {below:g}" if below <= most else f"{most:g}")
        raise BlockSparseError.expected(name, expected, repr(value))
    return float(value)


def positive_fraction(name: str, value: Any) -> float:
    """Return the value as a float after a check: above 0 and at most 1. Bools are refused."""
    real = is_int(value) or isinstance(value, float | np.floating)
    if not real or not 0 < value <= 1:
        raise BlockSparseError.expected(name, "a number above 0 and at most 1", repr(value))
    return float(value)


def checked_block(block_size: Any) -> tuple[int, int]:
    """Return (rows, columns) of a block size after a check."""
    pair = tuple(block_size) if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(pair) != 2 or not all(is_int(size) and size > 0 for size in pair):
        raise BlockSparseError.expected(
            "block_size", "a positive int or a pair of them (rows, columns)", repr(block_size)
        )
    if int(pair[0]) * int(pair[1]) >= 2**63:
        expected = "fewer than 2^63 elements, so that int64 can number them"
        raise BlockSparseError.expected("block_size", expected, repr(block_size))
    return int(pair[0]), int(pair[1])


def checked_grid(grid: Any) -> tuple[int, int]:
    """Return (out_blocks, in_blocks) after a check: at least 1 each, and fewer than 2^63 blocks."""
    if not isinstance(grid, tuple | list) or len(grid) != 2 or not all(is_int(n) and n > 0 for n in grid):
        raise BlockSparseError.expected("grid", "a pair of positive ints (out_blocks, in_blocks)", repr(grid))
    if int(grid[0]) * int(grid[1]) >= 2**63:
        raise BlockSparseError.expected("grid", "fewer than 2^63 blocks, so that int64 can number them", repr(grid))
    return int(grid[0]), int(grid[1])


def checked_block_slices(key: Any, grid: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the first and the end of the rows and of the columns that `layout[key]` selects, after a check."""
    keys = key if isinstance(key, tuple) else (key,)
    keys = (*keys, slice(None)) if len(keys) == 1 else keys
    pairs = []
    for index, size in zip(keys, grid, strict=False):
        if is_int(index) and -size <= index < size:
            index = slice(int(index) % size, int(index) % size + 1)
        is_slice = isinstance(index, slice) and index.step in (None, 1) and _has_int_ends(index)
        first, end, _ = index.indices(size) if is_slice else (0, 0, 1)
        pairs.append((first, end))
    if len(keys) != 2 or any(first >= end for first, end in pairs):
        expected = f"ints or slices with step 1 that select rows and columns of {grid} blocks"
        raise BlockSparseError.expected("layout[...]", expected, repr(key))
    return pairs


def _has_int_ends(index: slice) -> bool:
    return all(end is None or is_int(end) for end in (index.start, index.stop))


def checked_mask(mask: Any) -> np.ndarray:
    """Return a bool matrix `[out_blocks, in_blocks]` from a matrix of bools, or of 0s and 1s."""
    array = checked_array("mask", "a bool matrix [out_blocks, in_blocks]", mask)
    if array.ndim != 2 or 0 in array.shape:
        raise BlockSparseError.expected(
            "mask", "2-D [out_blocks, in_blocks], neither of them 0", f"shape {array.shape}"
        )
    if array.dtype == bool:
        return array
    if not np.issubdtype(array.dtype, np.integer):
        raise BlockSparseError.expected("mask", "bool (of a float weight, say `mask != 0`)", f"dtype {array.dtype}")
    if not np.isin(array, (0, 1)).all():
        raise BlockSparseError.expected("mask", "0s and 1s", f"values {array.min()} to {array.max()}")
    return array.astype(bool)


def checked_indices(name: str, index: Any, bound: int) -> np.ndarray:
    """Return a vector of int64 from 0 to below the bound; it can be the caller's own array, so do not write to it."""
    array = checked_ints(name, index)
    if array.size and (array.min() < 0 or array.max() >= bound):
        expected = f"indices from 0 to {bound - 1}" if bound else "no indices, as there is nothing to index"
        raise BlockSparseError.expected(name, expected, f"{array.min()} to {array.max()}")
    return array.astype(np.int64, copy=False)


def checked_pairs(rows: Any, cols: Any, grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and columns of blocks of a grid, two vectors of one length."""
    rows, cols = checked_indices("rows", rows, grid[0]), checked_indices("cols", cols, grid[1])
    if rows.shape != cols.shape:
        got = f"{rows.size} rows and {cols.size} columns"
        raise BlockSparseError.expected("rows and cols", "vectors of equal length", got)
    return rows, cols


def checked_ints(name: str, index: Any) -> np.ndarray:
    """Return a vector of ints, of any length and int dtype."""
    array = checked_array(name, "a vector of ints", index)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise BlockSparseError.expected(name, "a vector of ints", f"shape {array.shape}, dtype {array.dtype}")
    return array


def check_state(state: Any, reference: Mapping[str, torch.Tensor]) -> None:
    """Raise a BlockSparseError unless the tensors of a state have the names, shapes and dtypes of the reference.

    An int64 scalar is a count, so it must not be negative.
    """
    if not isinstance(state, Mapping) or set(state) != set(reference):
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise BlockSparseError.expected("state", sorted(reference), got)
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            got = f"{tensor.layout} on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise BlockSparseError.expected(f"{name} in the state", "a dense tensor", got)
        own = reference[name]
        if tensor.shape != own.shape or tensor.dtype != own.dtype:
            expected, got = (f"{each.dtype} {list(each.shape)}" for each in (own, tensor))
            raise BlockSparseError.expected(f"{name} in the state", expected, got)
        if own.dim() == 0 and own.dtype == torch.int64 and int(tensor) < 0:
            raise BlockSparseError.expected(f"{name} in the state", "0 or more", int(tensor))


STALE = (
    "after a change of the layout, load the optimizer's state of the same time, or start again with "
    "optimizer.state.clear()"
)


def check_optimizer_state(
    state: Mapping[str, Any], parameter: torch.Tensor, name: str, *, scalars: bool = True, remedy: str = STALE
) -> None:
    """Raise a BlockSparseError unless an optimizer's state of a parameter has its shape, or is one number.

    The factored second moments of Adafactor, with the last or the second last axis averaged, are accepted too.

    Args:
        state: the optimizer's state of this parameter.
        parameter: the parameter in the shape that it has when the optimizer steps.
        name: the parameter's name, for the error.
        scalars: whether one number, such as a count of steps, is accepted.
        remedy: a hint at the end of the error.
    """
    for key, value in state.items():
        if averaged_axis(key, value, parameter.shape) is not None:
            continue
        if key in STATES_OF_BLOCKS:
            check_state_of_blocks(key, value, parameter.shape)
            continue
        size = value.numel() if isinstance(value, torch.Tensor) else 1
        if isinstance(value, list | tuple | deque):
            size = sum(each.numel() if isinstance(each, torch.Tensor) else 1 for each in value)
        if (size != 1 or not scalars) and not (isinstance(value, torch.Tensor) and value.shape == parameter.shape):
            got = shape_of(value)
            raise BlockSparseError.expected(
                f"{key} in the optimizer's state",
                f"the shape of {name}, {list(parameter.shape)}" + (", or one number" if scalars else ""),
                f"{got}; {remedy}",
            )


# States with some numbers for each block: `BlockClock` counts the block's steps, and 1 marks a block that has had no
# gradient yet.
BLOCK_AGE, BLOCK_IS_NEW = "block_age", "block_is_new"
STATES_OF_BLOCKS = {BLOCK_AGE: 2, BLOCK_IS_NEW: 1}


def is_state_of_blocks(name: str, value: Any, shape: torch.Size) -> bool:
    """Return whether a state of a parameter of this shape has some numbers for each block, `[nnz, numbers]`."""
    numbers = STATES_OF_BLOCKS.get(name)
    return numbers is not None and isinstance(value, torch.Tensor) and list(value.shape) == [shape[0], numbers]


def check_state_of_blocks(name: str, value: Any, shape: torch.Size) -> None:
    """Raise a BlockSparseError unless a state has its numbers for each block of a parameter of this shape."""
    if not is_state_of_blocks(name, value, shape):
        raise BlockSparseError.expected(
            f"{name} in the optimizer's state",
            f"numbers of all blocks, {[shape[0], STATES_OF_BLOCKS[name]]} (load the state that was saved with these "
            "layouts)",
            shape_of(value),
        )


def averaged_axis(name: str, value: Any, shape: torch.Size) -> int | None:
    """Return the axis, -1 or -2, that a factored second moment averages over; None for other state.

    Args:
        name: the key in the optimizer's state.
        value: the state.
        shape: the shape of the parameter.

    >>> import torch
    >>> from blocksparse.checked import averaged_axis
    >>> averaged_axis("row_var", torch.zeros(9, 8, 1), torch.Size([9, 8, 4]))
    -1
    >>> averaged_axis("exp_avg_sq_col", torch.zeros(9, 4), torch.Size([9, 8, 4]))
    -2
    """
    axis = -1 if "row" in name or name.endswith("_r") else -2 if "col" in name or name.endswith("_c") else None
    if axis is None or not isinstance(value, torch.Tensor) or len(shape) < 2:
        return None
    without, averaged = list(shape), list(shape)
    without.pop(axis)
    averaged[axis] = 1
    return axis if list(value.shape) in (without, averaged) else None


def shape_of(value: Any) -> object:
    """Return what an error shows of a value: the shape of a tensor, else the name of the type."""
    return list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def checked_array(name: str, expected: str, value: Any) -> np.ndarray:
    """Convert a tensor, list or other value to an array, or raise a BlockSparseError."""
    try:
        return value.detach().cpu().numpy() if is_tensor(value) else np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists; dtypes and devices that numpy lacks
        raise BlockSparseError.expected(name, expected, f"{type(value).__name__} ({error})") from error
