"""Block-sparse attention on any device: the keys of each row of blocks are gathered for PyTorch's dense attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from ...layout import BlockLayout
from ..checks import accumulator, always_supported

# Rows of blocks are padded to the longest one of a batch; at least this fraction of a row must be blocks.
MIN_FILLED = 0.75

# At most this many blocks per batch, so that their gathered keys and values fit in the caches.
MAX_BATCHED_BLOCKS = 256


unsupported_reason = always_supported


def attention(q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], causal: bool, scale: float) -> Tensor:
    return by_layout(q, k, v, layouts, partial(_attention, causal, scale))


def by_layout(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout],
    run: Callable[[Tensor, Tensor, Tensor, BlockLayout], Tensor],
) -> Tensor:  # fmt: skip
    """Call `run` once per distinct layout, with all heads that share it."""
    if len(layouts) == 1:
        return run(q, k, v, layouts[0])
    per_head: list[Tensor] = [q] * len(layouts)
    heads: dict[BlockLayout, list[int]] = {}
    for head, layout in enumerate(layouts):
        heads.setdefault(layout, []).append(head)
    for layout, same in heads.items():
        for head, y in zip(same, run(q[:, same], k[:, same], v[:, same], layout).unbind(1), strict=True):
            per_head[head] = y
    return torch.stack(per_head, 1)


def is_dense(layout: BlockLayout, scale: float) -> bool:
    """Return whether dense attention is equal; PyTorch masks by -infinity before scaling, so scale must be positive."""
    return layout.nnz == math.prod(layout.grid) and scale > 0


class _RowGroup:
    """Rows of blocks that are computed in one batch.

    rows: int64 `[n]`.
    cols: int64 `[n * longest]`, the columns of the rows' blocks; a row's last one is repeated as padding.
    mask: bool `[n, block_q or 1, longest * block_k]`, the visible keys, or all for a query without any, because softmax
        needs one. None if every row sees all of its keys.
    seen: bool `[n, block_q, 1]`, the queries that see a key; None if all do.
    """

    def __init__(self, layout: BlockLayout, rows: np.ndarray, causal: bool):
        crow, col = layout.row_start, layout.col_of_block
        height, width = layout.block_shape
        counts = np.diff(crow)[rows]
        place = np.arange(counts.max())
        cols = col[crow[rows][:, None] + np.minimum(place, counts[:, None] - 1)].astype(np.int64)
        allowed = np.repeat(place < counts[:, None], width, axis=1)[:, None, :]
        if causal:
            keys = (cols[:, :, None] * width + np.arange(width)).reshape(len(rows), 1, -1)
            queries = rows[:, None, None] * height + np.arange(height)[:, None]
            allowed = allowed & (keys <= queries)
        seen = allowed.any(-1, keepdims=True)
        self.rows, self.cols = torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(cols.reshape(-1))
        self.mask = None if allowed.all() else torch.from_numpy(allowed | ~seen)
        self.seen = None if seen.all() else torch.from_numpy(seen)

    def to(self, device: torch.device) -> _RowGroup:
        for name, tensor in vars(self).items():
            setattr(self, name, None if tensor is None else tensor.to(device))
        return self


Plan = tuple[list[_RowGroup], Tensor]


def _plan_on(layout: BlockLayout, causal: bool, device: torch.device) -> Plan:
    """Return `_plan` with real tensors on the device, even while the call is traced."""

    def make() -> Plan:
        with _disable_current_modes():
            groups, place = _plan(layout, causal)
            return [rows.to(device) for rows in groups], place.to(device)

    return layout.derived(("attention", causal, device), make)


def _plan_while_tracing(layout: BlockLayout, causal: bool, device: torch.device) -> bool:
    """Make the plan when torch.compile traces, and keep it out of the graph."""
    _plan_on(layout, causal, device)
    return True


# Dynamo calls this function, because it cannot trace how a plan is made. See `ops/graph_layout.py`.
_plan_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _plan(layout: BlockLayout, causal: bool) -> Plan:
    """Return the rows of a layout in batches, the longest first, and the position of each row; empty rows are last."""
    if causal:
        height, width = layout.block_shape
        rows, cols = layout.row_of_block, layout.col_of_block
        some = cols.astype(np.int64) * width < (rows.astype(np.int64) + 1) * height
        layout = BlockLayout.from_indices(rows[some], cols[some], layout.grid, layout.block_shape)
    counts = np.diff(layout.row_start)
    order = np.argsort(-counts, kind="stable")
    filled = np.count_nonzero(counts)
    groups, begin = [], 0
    while begin < filled:
        least = MIN_FILLED * counts[order[begin]]
        end = begin + int(np.count_nonzero(counts[order[begin:filled]] >= least))
        end = min(end, begin + max(1, MAX_BATCHED_BLOCKS // int(counts[order[begin]])))
        groups.append(_RowGroup(layout, order[begin:end], causal))
        begin = end
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return groups, torch.from_numpy(place)


def _attention(causal: bool, scale: float, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> Tensor:
    """Return attention of heads that share this layout."""
    if is_dense(layout, scale):
        return _dense_attention(q, k, v, is_causal=causal, scale=scale)
    batch, heads, queries, _ = q.shape
    height, width = layout.block_shape
    if torch.compiler.is_dynamo_compiling():
        _plan_while_tracing(layout, causal, q.device)
    groups, place = _plan_on(layout, causal, q.device)
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    blocks = q.unflatten(1, (-1, height)), k.unflatten(1, (-1, width)), v.unflatten(1, (-1, width))
    outputs = [_attention_of_rows(rows, *blocks, scale) for rows in groups]
    empty = v.new_zeros(batch * heads, layout.grid[0] - sum(y.shape[1] for y in outputs), height, v.shape[-1])
    if not outputs:
        empty = empty + sum(tensor[:0].sum() for tensor in (q, k, v))  # zeros that have a gradient
    y = torch.cat([*outputs, empty], 1)
    return y.index_select(1, place).reshape(batch, heads, queries, v.shape[-1])


def gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, layout: BlockLayout, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v from that of y, without autograd."""
    groups, _ = _plan_on(layout, causal, q.device)
    height, width = layout.block_shape
    wide = accumulator(q.dtype)
    q_, k_, v_, grad_ = (
        each.to(wide).flatten(0, 1).unflatten(1, (-1, size))
        for each, size in ((q, height), (k, width), (v, width), (grad, height))
    )
    grads = [torch.zeros_like(each) for each in (q_, k_, v_)]
    for rows in groups:
        parts = _gradients_of_rows(rows, q_, k_, v_, grad_, scale)
        for whole, index, part in zip(grads, (rows.rows, rows.cols, rows.cols), parts, strict=True):
            whole.index_add_(1, index, part.reshape(len(whole), -1, *whole.shape[2:]))
    return tuple(each.reshape(like.shape).to(like.dtype) for each, like in zip(grads, (q, k, v), strict=True))


def _gradients_of_rows(
    rows: _RowGroup, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the gathered queries, keys and values `[n, rows, queries or keys, d]`."""
    n = rows.rows.numel()
    q, grad = (each.index_select(1, rows.rows) for each in (q, grad))
    k, v = (each.index_select(1, rows.cols).reshape(len(each), n, -1, each.shape[-1]) for each in (k, v))
    scores = scale * (q @ k.mT)
    weights = (scores if rows.mask is None else scores.masked_fill(~rows.mask, -torch.inf)).softmax(-1)
    grad = grad if rows.seen is None else grad.where(rows.seen, 0)
    of_weights = grad @ v.mT
    of_scores = scale * weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    return of_scores @ k, of_scores.mT @ q, weights.mT @ grad


def _attention_of_rows(rows: _RowGroup, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return attention of some rows of blocks, `[n, rows, block, d]`; each row is a head for PyTorch's kernel."""
    n = rows.rows.numel()
    keys = rows.cols.numel() // n * k.shape[2]
    k, v = (tensor.index_select(1, rows.cols).reshape(len(k), n, keys, tensor.shape[-1]) for tensor in (k, v))
    y = _dense_attention(q.index_select(1, rows.rows), k, v, attn_mask=rows.mask, scale=scale)
    return y if rows.seen is None else y.where(rows.seen, 0)


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    # PyTorch's fused kernels do not support forward-mode differentiation.
    fused = forward_ad._current_level < 0
    with nullcontext() if fused else torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)
