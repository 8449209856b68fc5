"""What the compiled backends ask of each tensor: as little as keeps them inside of the memory, since each step pays."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import BlockSparseError

STATES = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def row_stride(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
    """The distance between the rows of this tensor, or of the one row of `[features]` to itself.

    Raises:
        BlockSparseError: another shape, dtype or device, or features apart from each other.
    """
    *rows, step = tensor.stride()
    if tensor.shape != shape or tensor.dtype is not dtype or tensor.device != device or (step != 1 != shape[-1]):
        got = f"{list(tensor.shape)} with strides {list(tensor.stride())}, {tensor.dtype}, {tensor.device}"
        raise BlockSparseError.expected(name, f"{list(shape)}, features side by side, {dtype}, {device}", got)
    return rows[0] if rows else 0
