"""The definition of block-sparse attention: scores of all queries and keys, masked where a query does not see a key."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layout import BlockLayout
from ..checks import accumulator, always_supported

unsupported_reason = always_supported


def attention(q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], causal: bool, scale: float) -> Tensor:
    """Return softmax(scale q k^T) v over the visible keys, `[batch, heads, queries, d_v]`; 0 if there are none."""
    wide = accumulator(q.dtype)
    seen = torch.stack([_seen(layout, causal) for layout in layouts]).to(q.device)
    nothing = ~seen.any(-1, keepdim=True)
    scores = scale * (q.to(wide) @ k.to(wide).mT)
    # A query without visible keys sees all, because softmax needs one; its result is set to 0.
    weights = scores.masked_fill(~(seen | nothing), -torch.inf).softmax(-1)
    return (weights @ v.to(wide)).masked_fill(nothing, 0).to(q.dtype)


def _seen(layout: BlockLayout, causal: bool) -> Tensor:
    """Return the mask of visible keys, bool `[queries, keys]`."""
    height, width = layout.block_shape
    mask = layout.mask().repeat_interleave(height, 0).repeat_interleave(width, 1)
    return mask.tril() if causal else mask
