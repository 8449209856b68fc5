"""The rules of a call of attention: which keys of its blocks a query sees, and what happens to its scores."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# A dropped weight is one whose 32 random bits are below this fraction.
LEVELS = 2**32


class Rules(NamedTuple):
    """The settings of a call: its window, its place in the layout, and what happens to the scores.

    Queries end where the keys end: query i is at the position i + keys - queries, and the layout's row of the first
    query is `row`.

    row: the number of queries of the layout before the first one of the call.
    left, right: the keys that a query sees before and after its position; None for all.
    spans: int32 `[2, batch or 1, queries]`, the first visible key and the end, within the window; None if the window is
        the only rule.
    scale: the factor of the scores.
    softcap: scores become softcap * tanh(score / softcap); 0 for no cap.
    dropout: the fraction of the weights that are dropped.
    seed: int64, a scalar, for dropout.
    """

    row: int = 0
    left: int | None = None
    right: int | None = None
    spans: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    dropout: float = 0.0
    seed: Tensor | None = None

    @property
    def has_window(self) -> bool:
        return self.left is not None or self.right is not None

    @property
    def changes_weights(self) -> bool:
        """Whether scores are capped or weights dropped."""
        return self.softcap != 0 or self.dropout != 0

    @property
    def drop_below(self) -> int:
        return min(round(self.dropout * LEVELS), LEVELS - 1)


def spans_of(rules: Rules, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Return the spans of a call, int32 `[2, batch or 1, queries]`; None if every query sees all keys of its blocks."""
    if rules.spans is not None or not rules.has_window:
        return rules.spans
    return _window_spans(queries, keys, rules.left, rules.right, device)


@lru_cache(maxsize=32)
def _window_spans(queries: int, keys: int, left: int | None, right: int | None, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return window_spans(queries, keys, left, right, device)[:, None]


def window_spans(queries: int, keys: int, left: int | None, right: int | None, device: torch.device) -> Tensor:
    """Return the first key in the window of each query and the end of the window, int32 `[2, queries]`."""
    position = torch.arange(queries, dtype=torch.int32, device=device) + (keys - queries)
    start = torch.zeros_like(position) if left is None else (position - left).clamp(min=0)
    end = torch.full_like(position, keys) if right is None else (position + (right + 1)).clamp(min=0, max=keys)
    return torch.stack([start, end])


def data_spans(
    queries: int, keys: int, left: int | None, right: int | None, cu_seqlens: Tensor | None, lengths: Tensor | None
) -> Tensor:
    """Return spans within the window that also end at the borders of documents, and at the lengths of sequences."""
    device = next(each for each in (cu_seqlens, lengths) if each is not None).device
    start, end = window_spans(queries, keys, left, right, device)[:, None].unbind(0)
    if cu_seqlens is not None:
        borders = cu_seqlens.to(torch.int32)
        position = torch.arange(queries, dtype=torch.int32, device=device) + (keys - queries)
        ends = borders[1:].contiguous()
        document = torch.searchsorted(ends, position, right=True).clamp(max=len(ends) - 1)
        start, end = start.maximum(borders[document]), end.minimum(ends[document])
    if lengths is not None:
        end = end.minimum(lengths.to(torch.int32)[:, None])
        start = start.expand_as(end)
    return torch.stack([start, end])


def drop(weights: Tensor, rules: Rules, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Drop some weights, and scale the others to keep the expectation.

    The choice depends on the seed, and on the numbers of heads (batch * heads + head), queries and keys, which
    broadcast; it is that of the compiled core.
    """
    if rules.seed is None:
        return weights
    high, low = (rules.seed >> 32) & _BITS, rules.seed & _BITS
    of_head = _mix(low ^ _mix((high + heads * 0x9E3779B9) & _BITS))
    of_query = _mix((of_head + queries * 0x85EBCA6B) & _BITS)
    keep = _mix((of_query + keys * 0x9E3779B9) & _BITS) >= rules.drop_below
    return weights.where(keep, 0) * (LEVELS / (LEVELS - rules.drop_below))


def cap(scores: Tensor, softcap: float) -> Tensor:
    """Return softcap * tanh(scores / softcap), or the scores for a softcap of 0."""
    return softcap * (scores / softcap).tanh() if softcap else scores


def without_nan(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values with 0 for those that are not finite, and which these are, bool `[batch, heads, keys]`.

    A weight of 0 does not hide a NaN: 0 NaN = NaN. The results of queries that see such a key are set to NaN instead.
    """
    bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    return k.masked_fill(bad[..., None], 0), v.masked_fill(bad[..., None], 0), bad


def merge(y: Tensor, lse: Tensor, other_y: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp over all keys from those over two sets of keys that share none."""
    nothing = lse.isneginf() & other_lse.isneginf()
    # -inf has no second derivatives: e^-40 does not change the sum either.
    lse, other_lse = (each.masked_fill(nothing, 0) for each in (lse, other_lse))
    lse = torch.where(lse.isneginf(), other_lse.detach() - 40, lse)
    other_lse = torch.where(other_lse.isneginf(), lse.detach() - 40, other_lse)
    share = torch.sigmoid(other_lse - lse)[..., None].to(y.dtype)
    return y * (1 - share) + other_y * share, torch.logaddexp(lse, other_lse).masked_fill(nothing, -torch.inf)


def add_sinks(y: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp with one more score per head, `[heads]`, whose value is 0."""
    sink = sinks.to(lse.dtype)[:, None].expand_as(lse)
    nothing = lse.isneginf()
    lse = lse.masked_fill(nothing, 0)  # -inf has no second derivatives
    y = y * torch.sigmoid(lse - sink)[..., None].to(y.dtype)
    return y, torch.logaddexp(lse, sink).where(~nothing, sink)


_BITS = LEVELS - 1


def _mix(x: Tensor) -> Tensor:
    """Permute the 32 bits of int64 numbers (Wellons, Prospecting for hash functions, 2018: lowbias32)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _BITS
    return x ^ (x >> 16)
