"""Rows of tensors by position, as fast for rows of one number as for larger ones."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

HUGE = 1 << 22  # bytes, from which NumPy asks for huge pages
ALIGNMENT = 64  # bytes, as in PyTorch


def true_positions(mask: Tensor) -> Tensor:
    """Return the positions of the True elements of a vector, int64."""
    if mask.device.type != "cpu":
        return mask.nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))  # many times as fast as PyTorch's


def take_rows(tensor: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of a tensor at these positions, a new tensor."""
    rows = _with_short_rows(tensor)
    out = _empty((len(positions), *rows.shape[1:]), tensor)
    return torch.index_select(rows, 0, positions, out=out).view(-1, *tensor.shape[1:])


def put_rows(tensor: Tensor, positions: Tensor, rows: Tensor) -> None:
    """Set the rows of a tensor at these positions."""
    _with_short_rows(tensor).index_copy_(0, positions, _with_short_rows(rows.to(tensor)))


def fill_rows(tensor: Tensor, positions: Tensor, value: float) -> None:
    """Fill the rows of a contiguous tensor at these positions with a number."""
    _with_short_rows(tensor).index_fill_(0, positions, value)


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Allocate a contiguous tensor; a large one on the CPU by NumPy, which asks the system for huge pages.

    Then its first write takes a third of the time.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < HUGE:
        return like.new_empty(shape)
    memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(like.dtype).view(shape)


def _with_short_rows(tensor: Tensor) -> Tensor:
    """Return a vector if a row is one number, since PyTorch is ten times as fast on it; else the tensor."""
    return tensor.view(-1) if tensor.shape[1:].numel() == 1 and tensor.is_contiguous() else tensor
