"""What the compiled backends ask of each tensor: as little as keeps them inside of the memory, since each step pays."""

from __future__ import annotations

import torch

from ..checks import row_stride as row_stride

STATES = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
