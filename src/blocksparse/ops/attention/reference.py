"""The definition of block-sparse attention: scores of all queries and keys, masked where a query does not see a key."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layout import BlockLayout
from ..checks import accumulator, always_supported
from .rules import Rules, cap, drop, spans_of, without_nan

unsupported_reason = always_supported


def attention(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], rules: Rules, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return softmax(scale q k^T) v over the visible keys, `[batch, heads, queries, d_v]`; 0 if there are none.

    With `return_lse`, also return the logarithm of the summed exponentials, `[batch, heads, queries]`.
    """
    wide, (batch, heads, queries, _), keys = accumulator(q.dtype), q.shape, k.shape[2]
    k, v = (each.to(wide).repeat_interleave(heads // k.shape[1], 1) for each in (k, v))
    seen = torch.stack([_stored(layout, rules.row, queries, keys) for layout in layouts]).to(q.device)
    spans = spans_of(rules, queries, keys, q.device)
    number = torch.arange(keys, device=q.device)
    if spans is not None:
        start, end = spans[:, :, None, :, None]
        seen = seen & (number >= start) & (number < end)
    k, v, bad = without_nan(k, v)
    is_nan = (seen & bad[..., None, :]).any(-1)
    nothing = ~seen.any(-1, keepdim=True)
    scores = cap(rules.scale * (q.to(wide) @ k.mT), rules.softcap)
    # A query without visible keys sees all, because softmax needs one; its result is set to 0.
    scores = scores.masked_fill(~(seen | nothing), -torch.inf)
    head = torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1)
    weights = drop(scores.softmax(-1), rules, head, torch.arange(queries, device=q.device)[:, None], number)
    y = (weights @ v).masked_fill(nothing, 0).masked_fill(is_nan[..., None], torch.nan).to(q.dtype)
    if not return_lse:
        return y, None
    return y, scores.logsumexp(-1).masked_fill(nothing.squeeze(-1), -torch.inf).masked_fill(is_nan, torch.nan)


def _stored(layout: BlockLayout, row: int, queries: int, keys: int) -> Tensor:
    """Return the mask of the keys in stored blocks, bool `[queries, keys]`."""
    height, width = layout.block_shape
    mask = layout.mask().repeat_interleave(height, 0).repeat_interleave(width, 1)
    return mask[row : row + queries, :keys]
