"""The definition of ELUs of both signs with dropout, and of its mask, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import SUM_DTYPES, always_supported
from ..dropout.reference import drawn

# Random numbers are drawn for this number of elements of x at a time: first for elu(x), then for elu(-x).
DRAWS = 32


unsupported_reason = always_supported


def forward(x: Tensor, scale: float, seed: int, least: int) -> Tensor:
    wide = x.to(SUM_DTYPES[x.dtype])
    y = F.elu(torch.cat([wide, -wide], 1)) * scale
    return torch.where(keep_mask(x, seed, least), y, 0).to(x.dtype)


def backward(grad: Tensor, x: Tensor, scale: float, seed: int, least: int) -> Tensor:
    wide = x.to(SUM_DTYPES[x.dtype])
    upper, lower = grad.to(wide.dtype).chunk(2, 1)
    slope, above = (-wide.abs()).exp(), wide > 0
    both = torch.cat([torch.where(above, upper, upper * slope), torch.where(above, lower * slope, lower)], 1)
    of_x, of_minus_x = torch.where(keep_mask(x, seed, least), both, 0).chunk(2, 1)
    return ((of_x - of_minus_x) * scale).to(x.dtype)


def keep_mask(x: Tensor, seed: int, least: int) -> Tensor:
    """Return which numbers of y are not dropped: bool `[rows, 2 features]`."""
    count = x.numel()
    chunks = -(-count // DRAWS)
    draws = torch.from_numpy(drawn(2 * chunks * DRAWS, seed) >= least).view(chunks, 2, DRAWS)
    halves = [draws[:, i].reshape(-1)[:count].view(x.shape) for i in (0, 1)]
    return torch.cat(halves, 1).to(x.device)
