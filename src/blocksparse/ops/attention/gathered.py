"""Block-sparse attention on any device: the keys of each row of blocks are gathered for PyTorch's dense attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from ...layout import BlockLayout
from ..checks import accumulator, always_supported
from ..registry import can_bypass_dispatcher, needs_grad
from ..torch_op import call_per_batched_grad
from .rules import Rules, cap, drop, without_nan

# Rows of blocks are padded to the longest one of a batch; at least this fraction of a row must be blocks.
MIN_FILLED = 0.75

# At most this many blocks per batch, so that their gathered keys and values fit in the caches.
MAX_BATCHED_BLOCKS = 256

# Plans kept per layout; decoding makes one per token.
MAX_PLANS = 8

unsupported_reason = always_supported

Result = tuple[Tensor, Tensor | None]


def attention(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], rules: Rules, return_lse: bool = False
) -> Result:
    return by_layout(q, k, v, layouts, rules, return_lse, _attention)


def heads_by_layout(layouts: Sequence[BlockLayout]) -> dict[BlockLayout, list[int]]:
    """Return the heads that share each distinct layout."""
    heads: dict[BlockLayout, list[int]] = {}
    for head, layout in enumerate(layouts):
        heads.setdefault(layout, []).append(head)
    return heads


def select_heads(q: Tensor, k: Tensor, v: Tensor, heads: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries of some heads with their own keys and values."""
    of_keys = [head * k.shape[1] // q.shape[1] for head in heads]
    return q[:, heads], k[:, of_keys], v[:, of_keys]


def rules_of_group(rules: Rules, group: int) -> Rules:
    """Return the rules with a seed of their own, so that groups of heads drop different weights."""
    return rules if rules.seed is None else rules._replace(seed=rules.seed + group)


def by_layout(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], rules: Rules, return_lse: bool,
    run: Callable[[Tensor, Tensor, Tensor, BlockLayout, Rules, bool], Result],
) -> Result:  # fmt: skip
    """Call `run` once per distinct layout, with all heads that share it."""
    if len(layouts) == 1:
        return run(q, k, v, layouts[0], rules, return_lse)
    outputs: list[Any] = [None] * len(layouts)
    for group, (layout, heads) in enumerate(heads_by_layout(layouts).items()):
        y, lse = run(*select_heads(q, k, v, heads), layout, rules_of_group(rules, group), return_lse)
        for i, head in enumerate(heads):
            outputs[head] = y[:, i], None if lse is None else lse[:, i]
    ys, lses = zip(*outputs, strict=True)
    return torch.stack(ys, 1), torch.stack(lses, 1) if return_lse else None


def dense_options(q: Tensor, k: Tensor, layout: BlockLayout, rules: Rules, return_lse: bool) -> dict[str, Any] | None:
    """Return the options of PyTorch's dense attention if it is equal; it masks before scaling, so scale must be > 0."""
    stores_all = layout.nnz == math.prod(layout.grid) and rules.scale > 0
    if not stores_all or return_lse or rules.changes_weights or rules.spans is not None or rules.left is not None:
        return None
    if rules.right is not None and (rules.right != 0 or q.shape[2] != k.shape[2]):
        return None
    return {"is_causal": rules.right == 0, "scale": rules.scale, "enable_gqa": q.shape[1] != k.shape[1]}


# -- plans -------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where the queries of a call are in a layout, and their window."""

    row: int
    queries: int
    keys: int
    left: int | None
    right: int | None


class _RowGroup:
    """Rows of blocks that are computed in one batch.

    rows: int64 `[n]`, counted from the row of the first query.
    cols: int64 `[n * longest]`, the columns of the rows' blocks; a row's last one is repeated as padding.
    keys: int64 `[n, 1, longest * block_k]`, the numbers of the keys.
    queries: int64 `[n, block_q, 1]`, the numbers of the queries, negative before the first one.
    allowed: bool `[n, block_q or 1, longest * block_k]`, the visible keys. None if every row sees all of its keys.
    has_hidden: whether a query does not see all keys of its row's blocks.
    """

    def __init__(self, layout: BlockLayout, place: Place, first_row: int, rows: np.ndarray):
        crow, col = layout.row_start, layout.col_of_block
        height, width = layout.block_shape
        counts = np.diff(crow)[rows]
        index = np.arange(counts.max())
        cols = col[crow[rows][:, None] + np.minimum(index, counts[:, None] - 1)].astype(np.int64)
        keys = (cols[:, :, None] * width + np.arange(width)).reshape(len(rows), 1, -1)
        queries = (rows + first_row)[:, None, None] * height + np.arange(height)[:, None] - place.row
        position = queries + place.keys - place.queries
        stored = np.repeat(index < counts[:, None], width, axis=1)[:, None, :]
        allowed = stored & (keys < place.keys)
        if place.left is not None:
            allowed = allowed & (keys >= position - place.left)
        if place.right is not None:
            allowed = allowed & (keys <= position + place.right)
        real = (queries >= 0) & (queries < place.queries)
        allowed = allowed if real.all() else allowed & real
        self.has_hidden = bool((allowed != stored).any())
        self.rows, self.cols = torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(cols.reshape(-1))
        self.keys, self.queries = torch.from_numpy(keys), torch.from_numpy(queries)
        self.allowed = None if allowed.all() else torch.from_numpy(allowed)

    def to(self, device: torch.device) -> _RowGroup:
        for name, value in vars(self).items():
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)
        return self


Plan = tuple[list[_RowGroup], Tensor]


def _plan_on(layout: BlockLayout, place: Place, device: torch.device) -> Plan:
    """Return `_plan` with real tensors on the device, even while the call is traced."""
    plans: dict[Place, Plan] = layout.derived(("attention", device), dict)
    if place not in plans:
        if len(plans) == MAX_PLANS:
            plans.clear()
        with _disable_current_modes():
            groups, order = _plan(layout, place)
            plans[place] = [rows.to(device) for rows in groups], order.to(device)
    return plans[place]


def _plan_while_tracing(layout: BlockLayout, device: torch.device, *place: Any) -> bool:
    """Make the plan when torch.compile traces, and keep it out of the graph."""
    _plan_on(layout, Place(*place), device)
    return True


# Dynamo calls this function, because it cannot trace how a plan is made. See `ops/graph_layout.py`.
_plan_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _block_rows(layout: BlockLayout, place: Place) -> tuple[int, int]:
    """Return the first block row of the queries, and the end of these rows."""
    height = layout.block_shape[0]
    return place.row // height, -(-(place.row + place.queries) // height)


def _plan(layout: BlockLayout, place: Place) -> Plan:
    """Return the rows of the queries in batches, the longest first, and the position of each; empty rows are last."""
    first, end = _block_rows(layout, place)
    layout = _visible_blocks(layout[first:end], place._replace(row=place.row - first * layout.block_shape[0]))
    counts = np.diff(layout.row_start)
    order = np.argsort(-counts, kind="stable")
    filled = np.count_nonzero(counts)
    groups, begin = [], 0
    while begin < filled:
        least = MIN_FILLED * counts[order[begin]]
        stop = begin + int(np.count_nonzero(counts[order[begin:filled]] >= least))
        stop = min(stop, begin + max(1, MAX_BATCHED_BLOCKS // int(counts[order[begin]])))
        groups.append(_RowGroup(layout, place, first, order[begin:stop]))
        begin = stop
    at = np.empty_like(order)
    at[order] = np.arange(len(order))
    return groups, torch.from_numpy(at)


def _visible_blocks(layout: BlockLayout, place: Place) -> BlockLayout:
    """Return the layout without the blocks whose keys are outside of the windows of all their queries."""
    height, width = layout.block_shape
    rows, cols = layout.row_of_block, layout.col_of_block.astype(np.int64)
    first = np.maximum(rows * height - place.row, 0) + place.keys - place.queries
    last = np.minimum((rows + 1) * height - place.row, place.queries) - 1 + place.keys - place.queries
    some = cols * width < place.keys
    if place.left is not None:
        some &= (cols + 1) * width > first - place.left
    if place.right is not None:
        some &= cols * width <= last + place.right
    return layout.select(some)


# -- forward -----------------------------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """The plan of a call, and its operands by blocks of rows: `[batch * heads, blocks, block, features]`."""

    groups: list[_RowGroup]
    order: Tensor
    front: int
    operands: list[Tensor]
    spans: Tensor | None  # [2, batch * heads or 1, block rows, block_q, 1]
    bad: Tensor | None  # bool [batch * heads, blocks, block, 1], keys that are not finite; None if nothing is hidden


def _blocks_of(layout: BlockLayout, rules: Rules, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> _Blocks:
    """Split tensors of queries, and keys and values, `[batch, heads, tokens, any]`, into the blocks of a layout."""
    q, (k, v) = of_queries[0], of_keys
    heads, (height, width) = q.shape[1], layout.block_shape
    place = Place(rules.row, int(q.shape[2]), int(k.shape[2]), rules.left, rules.right)
    if torch.compiler.is_dynamo_compiling():
        _plan_while_tracing(layout, q.device, *place)
    groups, order = _plan_on(layout, place, q.device)
    first, end = _block_rows(layout, place)
    front = place.row - first * height
    back = (end - first) * height - front - place.queries
    operands = [_split(each, front, back, height) for each in of_queries]
    bad = None
    if rules.spans is not None or any(rows.has_hidden for rows in groups):
        k, v, bad = without_nan(k, v)
    of_keys = [k, v] if bad is None else [k, v, bad[..., None]]
    k, v, *rest = (
        _split(each.repeat_interleave(heads // each.shape[1], 1), 0, layout.shape[1] - place.keys, width)
        for each in of_keys
    )
    operands += [k, v]
    spans = rules.spans
    if spans is not None:
        spans = F.pad(spans, (front, back)).unflatten(2, (-1, height)).unsqueeze(-1)
        spans = spans.repeat_interleave(heads, 1) if spans.shape[1] > 1 else spans
    return _Blocks(groups, order, front, operands, spans, rest[0] if rest else None)


def _split(tensor: Tensor, front: int, back: int, block: int) -> Tensor:
    padded = F.pad(tensor, (0, 0, front, back)) if front or back else tensor
    blocks: Tensor = padded.flatten(0, 1).unflatten(1, (-1, block))
    return blocks


def _attention(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, rules: Rules, return_lse: bool = False) -> Result:
    """Return attention of heads that share this layout."""
    if (options := dense_options(q, k, layout, rules, return_lse)) is not None:
        return dense_attention(q, k, v, **options), None
    batch, heads, queries, _ = q.shape
    blocks = _blocks_of(layout, rules, [q], [k, v])
    outputs = [_attention_of_rows(rows, blocks, rules, return_lse) for rows in blocks.groups]
    empty = len(blocks.order) - sum(y.shape[1] for y, _ in outputs)
    zeros = v.new_zeros(batch * heads, empty, layout.block_shape[0], v.shape[-1])
    if not outputs:
        zeros = zeros + sum(tensor[:0].sum() for tensor in (q, k, v))  # zeros that have a gradient
    parts = [[y for y, _ in outputs] + [zeros]]
    if return_lse:
        nothing = zeros.sum(-1, dtype=accumulator(q.dtype)) - torch.inf
        parts.append([lse for _, lse in outputs if lse is not None] + [nothing])
    y, *lse = (
        torch.cat(each, 1).index_select(1, blocks.order).flatten(1, 2).narrow(1, blocks.front, queries)
        for each in parts
    )
    return y.unflatten(0, (batch, heads)), lse[0].unflatten(0, (batch, heads)) if lse else None


def _visible(rows: _RowGroup, spans: Tensor | None) -> Tensor | None:
    """Return the visible keys of some rows, bool `[batch * heads or 1, n, block_q or 1, keys]`; None for all."""
    if spans is None:
        return rows.allowed
    start, end = spans.index_select(2, rows.rows)
    seen: Tensor = (rows.keys >= start) & (rows.keys < end)
    return seen if rows.allowed is None else seen & rows.allowed


def _attention_of_rows(rows: _RowGroup, blocks: _Blocks, rules: Rules, return_lse: bool) -> Result:
    """Return attention of some rows of blocks, `[n, rows, block, d]`; each row is a head for PyTorch's kernel."""
    q, k, v = blocks.operands
    seen = _visible(rows, blocks.spans)
    q = q.index_select(1, rows.rows)
    k, v = (_gather(each, rows) for each in (k, v))
    some = None if seen is None else seen.any(-1, keepdim=True)
    # Softmax needs a key, so a query without visible keys sees all, and its result is set to 0.
    mask = seen if seen is None or some is None else seen | ~some
    lse = None
    if rules.changes_weights or return_lse:
        scores = _scores(q, k, mask, rules)
        lse = scores.logsumexp(-1)
        y = (_dropped((scores - lse[..., None]).exp(), rows, rules) @ v.to(scores.dtype)).to(q.dtype)
        lse = lse if some is None else lse.where(some.squeeze(-1), -torch.inf)
    else:
        y = dense_attention(q, k, v, attn_mask=mask, scale=rules.scale)
    y = y if some is None else y.where(some, 0)
    if blocks.bad is not None:
        bad = _gather(blocks.bad, rows).mT
        is_nan = (bad if seen is None else bad & seen).any(-1, keepdim=True)
        y = y.masked_fill(is_nan, torch.nan)
        lse = lse if lse is None else lse.masked_fill(is_nan.squeeze(-1), torch.nan)
    return y, lse


def _gather(tensor: Tensor, rows: _RowGroup) -> Tensor:
    """Return the keys or values of some rows, `[batch * heads, n, keys, d]`."""
    count, _, keys = rows.keys.shape
    return tensor.index_select(1, rows.cols).reshape(len(tensor), count, keys, tensor.shape[-1])


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, rules: Rules) -> Tensor:
    wide = accumulator(q.dtype)
    scores = cap(rules.scale * (q.to(wide) @ k.to(wide).mT), rules.softcap)
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _dropped(weights: Tensor, rows: _RowGroup, rules: Rules) -> Tensor:
    heads = torch.arange(len(weights), device=weights.device).view(-1, 1, 1, 1)
    return drop(weights, rules, heads, rows.queries, rows.keys)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return PyTorch's dense attention, differentiable any number of times."""
    if needs_grad(q, k, v) and can_bypass_dispatcher(q, k, v):
        y: Tensor = _Dense.apply(options, q, k, v)  # type: ignore[no-untyped-call]
        return y
    # PyTorch's fused kernels do not support forward-mode differentiation.
    return _by_pytorch(forward_ad._current_level < 0, options, q, k, v)


def _by_pytorch(fused: bool, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with nullcontext() if fused else torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)


class _Dense(torch.autograd.Function):
    """PyTorch's fused kernel for outputs and gradients; its other one if these are differentiated again."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(q, k, v)
        with torch.enable_grad():
            ctx.leaves = [x.detach().requires_grad_(x.requires_grad) for x in (q, k, v)]
            ctx.y = _by_pytorch(True, options, *ctx.leaves)
        y: Tensor = ctx.y.detach()
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        def gradients(grad: Tensor) -> Sequence[Tensor | None]:
            create_graph = torch.is_grad_enabled()
            if create_graph or not can_bypass_dispatcher(grad):
                with torch.enable_grad():
                    operands = ctx.saved_tensors
                    y = _by_pytorch(False, ctx.options, *operands)
            else:
                operands, y = ctx.leaves, ctx.y
            inputs = [x for x in operands if x.requires_grad]
            grads = iter(torch.autograd.grad(y, inputs, grad, retain_graph=True, create_graph=create_graph))
            return [next(grads) if x.requires_grad else None for x in operands]

        return None, *call_per_batched_grad(gradients, grad)


# -- backward ----------------------------------------------------------------------------------------------------


def gradients(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None,
    layout: BlockLayout, rules: Rules,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of q, k and v from those of y and of its log-sum-exp, without autograd."""
    wide, (batch, heads) = accumulator(q.dtype), q.shape[:2]
    delta = (grad.to(wide) * y.to(wide)).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    numbers = torch.stack([lse.to(wide), delta], -1)
    blocks = _blocks_of(layout, rules, [q.to(wide), grad.to(wide), numbers], [k.to(wide), v.to(wide)])
    wholes = [torch.zeros_like(blocks.operands[i]) for i in (0, 3, 4)]
    for rows in blocks.groups:
        parts = _gradients_of_rows(rows, blocks, rules)
        for whole, index, part in zip(wholes, (rows.rows, rows.cols, rows.cols), parts, strict=True):
            whole.index_add_(1, index, part.reshape(len(whole), len(index), *whole.shape[2:]))
    grads = []
    for whole, like, front in zip(wholes, (q, k, v), (blocks.front, 0, 0), strict=True):
        tokens = whole.flatten(1, 2).narrow(1, front, like.shape[2])
        shared = tokens.reshape(batch, like.shape[1], heads // like.shape[1], *tokens.shape[1:])
        grads.append(shared.sum(2).to(like.dtype))
    return grads


def _gradients_of_rows(rows: _RowGroup, blocks: _Blocks, rules: Rules) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the gathered queries, keys and values `[n, rows, queries or keys, d]`."""
    q, grad, numbers = (each.index_select(1, rows.rows) for each in blocks.operands[:3])
    seen = _visible(rows, blocks.spans)
    k, v = (_gather(each, rows) for each in blocks.operands[3:])
    lse, delta = numbers[..., :1], numbers[..., 1:]
    capped = cap(rules.scale * (q @ k.mT), rules.softcap)
    weights = (capped - lse).exp()
    of_weights = grad @ v.mT
    if rules.dropout:
        of_weights = _dropped(of_weights, rows, rules)
    of_scores = rules.scale * weights * (of_weights - delta)
    if rules.softcap:
        of_scores = of_scores * (1 - (capped / rules.softcap) ** 2)
    if seen is not None:
        weights, of_scores = weights.where(seen, 0), of_scores.where(seen, 0)
    kept = _dropped(weights, rows, rules) if rules.dropout else weights
    return of_scores @ k, of_scores.mT @ q, kept.mT @ grad
