"""Sizes and inputs padded to whole blocks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..layout import BlockLayout


def padded_to(size: int, block: int) -> int:
    """Round a size up to a multiple of the block."""
    return -(-size // block) * block


def padded_shape(shape: tuple[int, int], block_shape: tuple[int, int]) -> tuple[int, int]:
    """Return the shape (out, in) of the layout of a weight: both sizes rounded up to whole blocks."""
    return padded_to(shape[0], block_shape[0]), padded_to(shape[1], block_shape[1])


def pad(x: Tensor, layout: BlockLayout | None) -> Tensor:
    """Return x `[rows, features]` padded with zeros to the inputs of the layout of its weight; None for dense ones."""
    return x if layout is None or layout.shape[1] == x.shape[1] else F.pad(x, (0, layout.shape[1] - x.shape[1]))
