"""Attention in which a layout says which queries see which keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout, check_layout

# Rows of blocks are batched by padding them to the longest one: at most a quarter is padding.
FILLED = 0.75

# At most this many blocks per batch, so that their gathered keys and values fit in the caches.
MAX_BATCHED_BLOCKS = 256

# FlexAttention's kernels work on tiles of this many queries and keys.
TILE = 128


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | Sequence[BlockLayout],
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Computes softmax(scale q k^T) v, where each query sees only the keys of the stored blocks in its row.

    Args:
        q: `[batch, heads, queries, d]`.
        k: `[batch, heads, keys, d]`.
        v: `[batch, heads, keys, d_v]`.
        layout: of shape (queries, keys); one for all heads, or a list of one for each.
        causal: a query sees, of those keys, only the ones that are not behind it: key j <= query i.
        scale: by default d^-0.5.

    Time and memory grow with the number of stored blocks. On a GPU this is PyTorch's FlexAttention with a `BlockMask`
    made of the layout; elsewhere, and in float64, each row's keys are gathered for `scaled_dot_product_attention`.

    Returns:
        `[batch, heads, queries, d_v]`; exactly 0 for queries that see no key.

    Raises:
        BlockSparseError: shapes that do not fit each other or the layout, mixed dtypes or devices, a list of layouts
            that is not as long as there are heads.

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.watts_strogatz(256, block_size=32, neighbors=2, rewire=0.2, seed=0)
        >>> q, k, v = (torch.randn(1, 4, 256, 16) for _ in range(3))
        >>> y = bs.nn.attention(q, k, v, layout, causal=True)
        >>> seen = bs.to_dense(torch.ones(layout.values_shape), layout).bool().tril()
        >>> dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        >>> torch.allclose(y, dense, atol=1e-5)
        True

    Source: Child et al., Generating long sequences with sparse transformers (2019); Dong et al., Flex attention (2024).
    """
    layouts = _check(q, k, v, layout)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if q.device.type == "cuda" and q.dtype != torch.float64:
        return _flex(q, k, v, layouts, causal, scale, _compiled())
    if len(layouts) == 1:
        return _gathered(q, k, v, layouts[0], causal, scale)
    per_head: list[Tensor] = [q] * len(layouts)
    for same in _alike(layouts):
        found = _gathered(q[:, same], k[:, same], v[:, same], layouts[same[0]], causal, scale)
        for head, y in zip(same, found.unbind(1), strict=True):
            per_head[head] = y
    return torch.stack(per_head, 1)


def _alike(layouts: Sequence[BlockLayout]) -> list[list[int]]:
    """The heads that have the same layout, together."""
    heads: dict[BlockLayout, list[int]] = {}
    for head, layout in enumerate(layouts):
        heads.setdefault(layout, []).append(head)
    return list(heads.values())


def _check(q: Any, k: Any, v: Any, layout: Any) -> list[BlockLayout]:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise BlockSparseError.expected(name, "a tensor [batch, heads, tokens, d]", got)
        if tensor.dtype != q.dtype or tensor.device != q.device or not tensor.is_floating_point():
            wanted = f"floating point, the dtype and the device of q, {q.dtype} and {q.device}"
            raise BlockSparseError.expected(name, wanted, f"{tensor.dtype} and {tensor.device}")
    batch, heads, queries, d = q.shape
    if list(k.shape[:2]) != [batch, heads] or k.shape[3] != d:
        raise BlockSparseError.expected("k", f"[{batch}, {heads}, keys, {d}], as of q", list(k.shape))
    if list(v.shape[:3]) != list(k.shape[:3]):
        raise BlockSparseError.expected("v", f"[{batch}, {heads}, {k.shape[2]}, d_v], as of k", list(v.shape))
    layouts = list(layout) if isinstance(layout, Sequence) else [layout]
    if isinstance(layout, Sequence) and len(layouts) != heads:
        raise BlockSparseError.expected("layout", f"one for each of {heads} heads", f"{len(layouts)} layouts")
    for each in layouts:
        check_layout(each)
        if each.shape != (queries, k.shape[2]):
            wanted = f"the shape (queries, keys) = ({queries}, {k.shape[2]})"
            raise BlockSparseError.expected("layout", wanted, repr(each))
    return layouts[:1] if len(set(layouts)) == 1 else layouts


# -- each row's keys gathered ------------------------------------------------------------------------------------------


class _Rows:
    """Rows of blocks that are computed together.

    Args:
        layout: whose rows.
        rows: int `[n]`, rows of blocks.
        causal: as for `attention`.

    rows: int64 `[n]`. cols: int64 `[n * most]`, the columns of their blocks, a row's last one repeated to fill it up.
    mask: bool `[n, block_q or 1, most * block_k]`, the keys that are seen; all where a query sees none, for softmax
        has to be of something. None where every row sees all of its keys.
    seen: bool `[n, block_q, 1]`, which queries see a key; None where all do.
    """

    def __init__(self, layout: BlockLayout, rows: np.ndarray, causal: bool):
        crow, col = layout.crow_indices().numpy(), layout.col_indices().numpy()
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

    def to(self, device: torch.device) -> _Rows:
        if self.rows.device != device:
            for name, tensor in vars(self).items():
                setattr(self, name, None if tensor is None else tensor.to(device))
        return self


def _plan(layout: BlockLayout, causal: bool) -> tuple[list[_Rows], Tensor]:
    """The rows of a layout by how many blocks they have, and where each row is among them; empty ones at the end."""
    if causal:
        height, width = layout.block_shape
        rows, cols = layout.row_of_block, layout.col_of_block
        some = cols.astype(np.int64) * width < (rows.astype(np.int64) + 1) * height
        layout = BlockLayout.from_indices(rows[some], cols[some], layout.grid, layout.block_shape)
    counts = np.diff(layout.crow_indices().numpy())
    order = np.argsort(-counts, kind="stable")
    filled = np.count_nonzero(counts)
    groups, begin = [], 0
    while begin < filled:
        least = FILLED * counts[order[begin]]
        end = begin + int(np.count_nonzero(counts[order[begin:filled]] >= least))
        end = min(end, begin + max(1, MAX_BATCHED_BLOCKS // int(counts[order[begin]])))
        groups.append(_Rows(layout, order[begin:end], causal))
        begin = end
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return groups, torch.from_numpy(place)


def _gathered(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, causal: bool, scale: float) -> Tensor:
    if layout.nnz == math.prod(layout.grid):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    batch, heads, queries, _ = q.shape
    height, width = layout.block_shape
    groups, place = layout.derived(("attention", causal, q.device), lambda: _plan(layout, causal))
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    blocks = q.unflatten(1, (-1, height)), k.unflatten(1, (-1, width)), v.unflatten(1, (-1, width))
    found = [_of_rows(rows.to(q.device), *blocks, scale) for rows in groups]
    empty = v.new_zeros(batch * heads, layout.grid[0] - sum(y.shape[1] for y in found), height, v.shape[-1])
    if not found:
        empty = empty + sum(tensor[:0].sum() for tensor in (q, k, v))  # zeros that have a gradient
    y = torch.cat([*found, empty], 1)
    return y.index_select(1, place.to(q.device)).reshape(batch, heads, queries, v.shape[-1])


def _of_rows(rows: _Rows, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Computes attention of some rows of blocks `[n, rows, block, d]`, each of which is a head to the kernel."""
    n = rows.rows.numel()
    keys = rows.cols.numel() // n * k.shape[2]
    k, v = (tensor.index_select(1, rows.cols).reshape(len(k), n, keys, tensor.shape[-1]) for tensor in (k, v))
    y = F.scaled_dot_product_attention(q.index_select(1, rows.rows), k, v, attn_mask=rows.mask, scale=scale)
    return y if rows.seen is None else y.where(rows.seen, 0)


# -- FlexAttention -----------------------------------------------------------------------------------------------------


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layouts: Sequence[BlockLayout],
    causal: bool,
    scale: float,
    kernel: Callable[..., Any],
) -> Tensor:
    key = ("flex attention", tuple(layouts), causal, q.device)
    mask = layouts[0].derived(key, partial(_block_mask, layouts, causal, q.device))
    return kernel(q, k, v, block_mask=mask, scale=scale)


def _block_mask(layouts: Sequence[BlockLayout], causal: bool, device: torch.device) -> Any:
    """A BlockMask of tiles, in which a look into the layouts' own masks tells what a tile has of the smaller blocks."""
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys = layouts[0].shape
    shared = all(layout.block_shape == layouts[0].block_shape for layout in layouts)
    height, width = layouts[0].block_shape if shared else (1, 1)
    masks = [
        layout.mask() if shared else layout.mask().repeat_interleave(b[0], 0).repeat_interleave(b[1], 1)
        for layout in layouts
        for b in [layout.block_shape]
    ]
    some = torch.stack([_tiles(mask, (height, width), any_=True) for mask in masks])
    whole = torch.stack([_tiles(mask, (height, width), any_=False) for mask in masks])
    if causal:
        row, col = (torch.arange(n) * TILE for n in some.shape[1:])
        some &= col <= row[:, None] + TILE - 1
        whole &= col + TILE - 1 <= row[:, None]
    table = torch.stack(masks).to(device)
    per_head = len(layouts) > 1

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = table[h if per_head else 0, i // height, j // width]
        return found & (j <= i) if causal else found

    counts: list[Tensor] = []
    for tiles in (some & ~whole, whole):
        counts += [tiles.sum(-1, dtype=torch.int32), tiles.int().argsort(dim=-1, descending=True, stable=True).int()]
    some_counts, some_cols, whole_counts, whole_cols = (tensor[None].to(device) for tensor in counts)
    return BlockMask.from_kv_blocks(
        some_counts,
        some_cols,
        whole_counts,
        whole_cols,
        BLOCK_SIZE=TILE,
        mask_mod=seen,
        seq_lengths=(queries, keys),
    )


def _tiles(mask: Tensor, block: tuple[int, int], any_: bool) -> Tensor:
    """Which tiles have something, or all, of a mask of blocks: bool `[tiles of queries, tiles of keys]`."""
    for axis, size in enumerate(block):
        starts = torch.arange(0, mask.shape[axis] * size, TILE)
        first, last = starts // size, (starts + TILE - 1).clamp(max=mask.shape[axis] * size - 1) // size
        parts = [mask.narrow(axis, int(a), int(b - a + 1)) for a, b in zip(first, last, strict=True)]
        mask = torch.stack([part.any(axis) if any_ else part.all(axis) for part in parts], axis)
    return mask
