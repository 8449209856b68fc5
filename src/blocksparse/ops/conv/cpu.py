"""The convolutions on the CPU."""

from __future__ import annotations

import torch


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    return "the kernels are being written"
