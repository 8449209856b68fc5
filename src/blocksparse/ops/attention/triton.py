"""Block-sparse attention on a GPU: PyTorch's FlexAttention with a `BlockMask` made of the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ...layout import BlockLayout
from ..gpu.runtime import keep_for_stream, stream_of
from ..registry import needs_grad

# Queries and keys of a tile of FlexAttention. Its backward pass, and its forward pass for fewer queries, need TILE;
# otherwise a tile may be as small as MIN_TILE.
TILE, MIN_TILE = 128, 32


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why FlexAttention cannot serve these tensors, or None if it can."""
    if device.type != "cuda":
        return f"it serves tensors on a GPU, not on {device}"
    return "FlexAttention does not serve torch.float64" if dtype == torch.float64 else None


def attention(q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], causal: bool, scale: float) -> Tensor:
    return flex(q, k, v, layouts, causal, scale, _compiled())


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], causal: bool, scale: float,
    kernel: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """Return `attention` by FlexAttention, which `kernel` is: compiled, or PyTorch's Python function."""
    tile = TILE if needs_grad(q, k, v) or q.shape[2] < TILE else tile_of(layouts)
    key = ("flex attention", tuple(layouts), causal, q.device, tile)
    mask, tensors = layouts[0].derived(key, partial(_block_mask, layouts, causal, q.device, tile))
    # `derived` calls it once per stream.
    layouts[0].derived((*key, stream_of(q)), partial(keep_for_stream, q.device, *tensors))
    # If the queries of a tile fit in the registers of one warp, one warp is twice as fast as four.
    warps = 1 if tile == MIN_TILE and q.shape[3] * q.dtype.itemsize <= 128 else 4
    options = {} if tile == TILE else {"BLOCK_M": tile, "BLOCK_N": tile, "num_warps": warps}
    return kernel(q, k, v, block_mask=mask, scale=scale, kernel_options=options)


def tile_of(layouts: Sequence[BlockLayout]) -> int:
    """Return the largest tile that no border of a block crosses: a partly visible tile costs several whole ones.

    >>> import blocksparse as bs
    >>> [tile_of([bs.patterns.dense((384, 384), block)]) for block in (16, 32, 64, 96, 128)]
    [32, 32, 64, 32, 128]
    """
    size = math.gcd(TILE, *(size for layout in layouts for size in layout.block_shape))
    return max(size, MIN_TILE)


def _block_mask(
    layouts: Sequence[BlockLayout], causal: bool, device: torch.device, tile: int
) -> tuple[Any, list[Tensor]]:
    """Return a BlockMask of tiles, and its tensors; in partly visible tiles, it looks up the blocks of the layouts."""
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys = layouts[0].shape
    shared = all(layout.block_shape == layouts[0].block_shape for layout in layouts)
    height, width = layouts[0].block_shape if shared else (1, 1)
    masks = [
        layout.mask() if shared else layout.mask().repeat_interleave(b[0], 0).repeat_interleave(b[1], 1)
        for layout in layouts
        for b in [layout.block_shape]
    ]
    some = torch.stack([_tiles(mask, (height, width), tile, any_=True) for mask in masks])
    whole = torch.stack([_tiles(mask, (height, width), tile, any_=False) for mask in masks])
    if causal:
        row, col = (torch.arange(n) * tile for n in some.shape[1:])
        some &= col <= row[:, None] + tile - 1
        whole &= col + tile - 1 <= row[:, None]
    table = torch.stack(masks).to(device)
    per_head = len(layouts) > 1

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = table[h if per_head else 0, i // height, j // width]
        return visible & (j <= i) if causal else visible

    counts: list[Tensor] = []
    for tiles in (some & ~whole, whole):
        counts += [tiles.sum(-1, dtype=torch.int32), tiles.int().argsort(dim=-1, descending=True, stable=True).int()]
    some_counts, some_cols, whole_counts, whole_cols = (tensor[None].to(device) for tensor in counts)
    mask = BlockMask.from_kv_blocks(
        some_counts, some_cols, whole_counts, whole_cols, BLOCK_SIZE=tile, mask_mod=seen, seq_lengths=(queries, keys)
    )
    return mask, [table, *(each for each in vars(mask).values() if isinstance(each, Tensor))]


def _tiles(mask: Tensor, block: tuple[int, int], tile: int, any_: bool) -> Tensor:
    """Return which tiles contain any, or only, stored blocks: bool `[tiles of queries, tiles of keys]`."""
    for axis, size in enumerate(block):
        starts = torch.arange(0, mask.shape[axis] * size, tile)
        first, last = starts // size, (starts + tile - 1).clamp(max=mask.shape[axis] * size - 1) // size
        parts = [mask.narrow(axis, int(a), int(b - a + 1)) for a, b in zip(first, last, strict=True)]
        mask = torch.stack([part.any(axis) if any_ else part.all(axis) for part in parts], axis)
    return mask
