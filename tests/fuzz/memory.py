"""Operands with the strides that callers may use, each in an allocation of exactly its size."""

from __future__ import annotations

from contextlib import contextmanager
from random import Random

import torch
from torch import Tensor

from blocksparse.ops import workspace
from blocksparse.ops.linear import cpu as linear_cpu

ROWS = ("plain", "plain", "apart", "offset", "expanded", "sliding", "columns")


def draw_rows(rng: Random) -> str:
    """Draw the strides of a matrix: contiguous, with gaps, at an odd address, one row repeated, overlapping,
    column-major.
    """
    how = rng.choice(ROWS)
    return f"{how} {rng.randint(1, 17)}" if how in ("apart", "offset", "sliding") else how


def rows(data: Tensor, dtype: torch.dtype, how: str) -> Tensor:
    """Copy `[n, features]` to memory with these strides, and NaN between and before the rows.

    If rows share memory, the last one written is kept.
    """
    n, features = data.shape
    how, *numbers = how.split()
    step = int(numbers[0]) if numbers else 0
    if how == "columns":
        return _full(features, n, dtype=dtype).t().copy_(data)
    stride = {"apart": features + step, "expanded": 0, "sliding": min(step, features)}.get(how, features)
    offset = step if how == "offset" else 0
    memory = _full(offset + (max(n - 1, 0) * stride + features if n else 0), dtype=dtype)
    placed = memory.as_strided((n, features), (stride, 1), offset)
    for i in range(n) if stride < features else ():
        placed[i] = data[i]
    return placed if stride < features else placed.copy_(data)


def whole(data: Tensor, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """Return a contiguous copy, `offset` elements after an aligned address."""
    return _full(offset + data.numel(), dtype=dtype)[offset:].view(data.shape).copy_(data)


def _full(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@contextmanager
def tight():
    """Make the CPU backends allocate new memory in each call, of exactly the requested size and full of NaN."""
    empty, least, working = torch.empty, workspace.MIN_BYTES, linear_cpu.working_memory

    # Bytes of 0xFF are NaN in every float dtype.
    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 0xFF)

    torch.empty, workspace.MIN_BYTES = poisoned, 1 << 62
    linear_cpu.working_memory = lambda size: poisoned(size, dtype=torch.uint8)
    try:
        yield
    finally:
        torch.empty, workspace.MIN_BYTES, linear_cpu.working_memory = empty, least, working
