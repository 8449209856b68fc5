"""PyTorch's FlexAttention with a `BlockMask` made of the layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...layout import BlockLayout
from ..gpu.runtime import keep_for_stream, stream_of
from ..registry import needs_grad
from .gathered import MAX_PLANS, Place
from .rules import Rules

# Queries and keys of a tile of FlexAttention. Its backward pass, and its forward pass for fewer queries, need TILE;
# otherwise a tile may be as small as MIN_TILE.
TILE, MIN_TILE = 128, 32


@cache
def compiled_flex() -> Callable[..., Any]:
    """Return FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], rules: Rules, kernel: Callable[..., Tensor]
) -> Tensor:
    """Return `attention` by FlexAttention, which `kernel` is: compiled, or PyTorch's Python function."""
    queries, keys = int(q.shape[2]), int(k.shape[2])
    tile = TILE if needs_grad(q, k, v) or queries < TILE else tile_of(layouts)
    place = Place(rules.row, queries, keys, rules.left, rules.right)
    masks: dict[Any, Any] = layouts[0].derived(("flex attention", q.device), dict)
    key = (tuple(layouts), place, tile)
    if key not in masks:
        if len(masks) >= 2 * MAX_PLANS:  # decoding makes one per token
            masks.clear()
        masks[key] = (*block_mask(layouts, place, q.device, tile), set())
    mask, tensors, streams = masks[key]
    stream = stream_of(q)
    if stream not in streams:
        streams.add(stream)
        keep_for_stream(q.device, *tensors)
    # If the queries of a tile fit in the registers of one warp, one warp is twice as fast as four.
    warps = 1 if tile == MIN_TILE and q.shape[3] * q.dtype.itemsize <= 128 else 4
    options = {} if tile == TILE else {"BLOCK_M": tile, "BLOCK_N": tile, "num_warps": warps}
    return kernel(
        q, k, v, score_mod=_capped(rules.softcap) if rules.softcap else None, block_mask=mask, scale=rules.scale,
        enable_gqa=q.shape[1] != k.shape[1], kernel_options=options,
    )  # fmt: skip


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def tile_of(layouts: Sequence[BlockLayout]) -> int:
    """Return the largest tile that no border of a block crosses: a partly visible tile costs several whole ones.

    >>> import blocksparse as bs
    >>> [tile_of([bs.patterns.dense((384, 384), block)]) for block in (16, 32, 64, 96, 128)]
    [32, 32, 64, 32, 128]
    """
    size = math.gcd(TILE, *(size for layout in layouts for size in layout.block_shape))
    return max(size, MIN_TILE)


def block_mask(
    layouts: Sequence[BlockLayout], place: Place, device: torch.device, tile: int
) -> tuple[Any, list[Tensor]]:
    """Return a BlockMask of tiles, and its tensors; in partly visible tiles, it looks up the blocks of the layouts."""
    from torch.nn.attention.flex_attention import BlockMask

    row, queries, keys, left, right = place
    shared = all(layout.block_shape == layouts[0].block_shape for layout in layouts)
    height, width = layouts[0].block_shape if shared else (1, 1)
    masks = [
        layout.mask() if shared else layout.mask().repeat_interleave(b[0], 0).repeat_interleave(b[1], 1)
        for layout in layouts
        for b in [layout.block_shape]
    ]
    if not shared:  # layouts end after different numbers of tokens
        masks = [mask[: row + queries, :keys] for mask in masks]
    sizes = (row, queries, height), (0, keys, width)
    some = torch.stack([_tiles(mask, sizes, tile, any_=True) for mask in masks])
    whole = torch.stack([_tiles(mask, sizes, tile, any_=False) for mask in masks])
    query, col = (torch.arange(n, device="cpu") * tile for n in some.shape[1:])
    first, last = (query + keys - queries)[:, None], (query + tile - 1 + keys - queries)[:, None]
    if right is not None:
        some &= col <= last + right
        whole &= col + tile - 1 <= first + right
    if left is not None:
        some &= col + tile - 1 >= first - left
        whole &= col >= last - left
    table = torch.stack(masks).to(device)
    per_head = len(layouts) > 1
    offset = keys - queries

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = table[h if per_head else 0, (i + row) // height, j // width]
        if right is not None:
            visible = visible & (j <= i + (offset + right))
        return visible if left is None else visible & (j >= i + (offset - left))

    counts: list[Tensor] = []
    for tiles in (some & ~whole, whole):
        counts += [tiles.sum(-1, dtype=torch.int32), tiles.int().argsort(dim=-1, descending=True, stable=True).int()]
    some_counts, some_cols, whole_counts, whole_cols = (tensor[None].to(device) for tensor in counts)
    mask = BlockMask.from_kv_blocks(
        some_counts, some_cols, whole_counts, whole_cols, BLOCK_SIZE=tile, mask_mod=seen, seq_lengths=(queries, keys)
    )
    return mask, [table, *(each for each in vars(mask).values() if isinstance(each, Tensor))]


def _tiles(mask: Tensor, sizes: tuple[tuple[int, int, int], ...], tile: int, any_: bool) -> Tensor:
    """Return which tiles contain any, or only, stored blocks: bool `[tiles of queries, tiles of keys]`.

    The sizes of each axis are its tokens before the first one of the call, the tokens of the call, and the block.
    """
    for axis, (before, tokens, size) in enumerate(sizes):
        starts = torch.arange(0, tokens, tile, device="cpu")
        first, last = (starts + before) // size, ((starts + tile).clamp(max=tokens) - 1 + before) // size
        parts = [mask.narrow(axis, int(a), int(b - a + 1)) for a, b in zip(first, last, strict=True)]
        mask = torch.stack([part.any(axis) if any_ else part.all(axis) for part in parts], axis)
    return mask
