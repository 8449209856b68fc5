"""Cases of the linear products that the tests of both front ends share."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from linear_backends import ACTIVATIONS
from strategies import layouts

BLOCK_SIZES = [1, 4, 8, 16, 32, 64, 128, (8, 32), (32, 8), (16, 64), (12, 20), (128, 4)]


def strided(rows: int, columns: int, dtype: torch.dtype, strides: str) -> torch.Tensor:
    """Random numbers [rows, columns]: one way to lay them out in memory."""
    if strides == "transposed":
        return torch.randn(columns, rows, dtype=dtype).T
    if strides == "rows apart":
        return torch.randn(rows, columns + 3, dtype=dtype)[:, 2 : columns + 2]
    if strides == "every other row":
        return torch.randn(2 * rows, columns, dtype=dtype)[::2]
    if strides == "one row for all":
        return torch.randn(1, columns, dtype=dtype).expand(rows, columns)
    return torch.randn(rows, columns, dtype=dtype)


STRIDES = ["contiguous", "transposed", "rows apart", "every other row", "one row for all"]

PRODUCTS = {
    "layout": layouts(max_grid=5, blocks=[1, 2, 3, 4, 5, 8, 16, 24, 32]),
    "tokens": st.sampled_from([0, 1, 2, 7, 16, 17, 33, 48, 65]),
    "activation": st.sampled_from(list(ACTIVATIONS)),
    "with_bias": st.booleans(),
    "strides": st.sampled_from(STRIDES),
    "seed": st.integers(0, 2**31),
}
