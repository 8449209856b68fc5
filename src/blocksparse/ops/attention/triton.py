"""Block-sparse attention on a GPU: PyTorch's FlexAttention, or gathered rows for what it cannot do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layout import BlockLayout
from . import gathered
from .flex import compiled_flex, flex
from .gathered import Result
from .rules import Rules


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why FlexAttention cannot serve these tensors, or None if it can."""
    if device.type != "cuda":
        return f"it serves tensors on a GPU, not on {device}"
    return "FlexAttention does not serve torch.float64" if dtype == torch.float64 else None


def attention(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], rules: Rules, return_lse: bool = False
) -> Result:
    # Flex attention drops no weights; a mask that depends on data would be compiled once per call.
    if return_lse or rules.dropout or rules.spans is not None:
        return gathered.attention(q, k, v, layouts, rules, return_lse)
    return flex(q, k, v, layouts, rules, compiled_flex()), None
