"""Layouts (queries, keys) for `bs.nn.attention`: strided, fixed, dilated, small-world and BigBird attention.

Distances and widths are in blocks; with block size 1 they are in tokens, as in the papers. A causal layout has no block
after the diagonal. Inside the blocks on the diagonal, `bs.nn.attention(..., causal=True)` masks later keys. No row is
empty.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..checked import checked_grid, integer, number
from ..errors import BlockSparseError
from ..layout import BlockLayout
from .windows import blocks_of_spans

PARTS = ("all", "near", "far")


def strided_attention(
    tokens: int, block_size: int = 32, stride: int | None = None, part: str = "all", causal: bool = True
) -> BlockLayout:
    """Return the layout of strided attention: the keys just before a query and every stride-th one before those.

    It suits data with rows, such as images. Query i attends to key j in the part "near" if i - j <= stride, in the part
    "far" if i - j is a multiple of the stride.

    Args:
        tokens: the number of queries and of keys, a multiple of the block.
        block_size: tokens per block.
        stride: in blocks. Default: the square root of their number, for which the layout has the fewest blocks.
        part: "near", "far", or "all" for both. Two heads can have one part each: pass `attention` a list of layouts.
        causal: if True, queries attend to earlier keys only; else to keys on both sides.

    Raises:
        BlockSparseError: `tokens` is not a multiple of the block, the stride is below 1, or the part is unknown.

    >>> import blocksparse as bs
    >>> bs.patterns.strided_attention(8, block_size=1, stride=3).mask().int()
    tensor([[1, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0, 0],
            [1, 1, 1, 1, 0, 0, 0, 0],
            [0, 1, 1, 1, 1, 0, 0, 0],
            [0, 0, 1, 1, 1, 1, 0, 0],
            [1, 0, 0, 1, 1, 1, 1, 0],
            [0, 1, 0, 0, 1, 1, 1, 1]], dtype=torch.int32)

    Source: Child et al., Generating long sequences with sparse transformers (2019).
    """
    n, stride = _sizes(tokens, block_size, stride)
    back = {"near": np.arange(min(stride + 1, n)), "far": np.arange(0, n, stride)}
    both = back if causal else {name: np.concatenate([-steps, steps]) for name, steps in back.items()}
    queries = np.arange(n)[:, None]
    return _layout({name: queries - steps for name, steps in both.items()}, part, causal, block_size)


def fixed_attention(
    tokens: int,
    block_size: int = 32,
    stride: int | None = None,
    summary: int = 1,
    part: str = "all",
    causal: bool = True,
) -> BlockLayout:
    """Return the layout of fixed attention: the query's own segment, and the last keys of each segment as its summary.

    It suits text. Query i attends to key j in the part "near" if both are in one segment, i // stride = j // stride, in
    the part "far" if j % stride >= stride - summary. The part "far" also has the diagonal, so that no row is empty.

    Args:
        tokens, block_size: as for `strided_attention`.
        stride: the length of a segment, in blocks. Default: the square root of their number.
        summary: the length of the summary at the end of each segment, in blocks, 1 to `stride`.
        part, causal: as for `strided_attention`.

    Raises:
        BlockSparseError: `tokens` is not a multiple of the block, or an argument is out of range.

    >>> import blocksparse as bs
    >>> bs.patterns.fixed_attention(8, block_size=1, stride=3).mask().int()
    tensor([[1, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0, 0],
            [0, 0, 1, 1, 0, 0, 0, 0],
            [0, 0, 1, 1, 1, 0, 0, 0],
            [0, 0, 1, 1, 1, 1, 0, 0],
            [0, 0, 1, 0, 0, 1, 1, 0],
            [0, 0, 1, 0, 0, 1, 1, 1]], dtype=torch.int32)

    Source: Child et al., Generating long sequences with sparse transformers (2019).
    """
    n, stride = _sizes(tokens, block_size, stride)
    summary = integer("summary", summary, 1, below=stride + 1)
    keys, queries = np.arange(n), np.arange(n)[:, None]
    summed = np.tile(keys[keys % stride >= stride - summary], (n, 1))
    near = queries // stride * stride + np.arange(min(stride, n))
    return _layout({"near": near, "far": np.hstack([summed, queries])}, part, causal, block_size)


def small_world_attention(
    tokens: int, block_size: int = 32, neighbors: int = 4, rewire: float = 0.2, seed: int = 0, causal: bool = True
) -> BlockLayout:
    """Draw the layout of a directed small world: each query's own block and the nearest ones, some rewired at random.

    Each of the `neighbors` nearest blocks (earlier ones only, if causal) is replaced with probability `rewire` by a
    block drawn from the others that the query may attend to. So a few layers carry information over any distance, at
    the cost of a band.

    Args:
        tokens, block_size: as for `strided_attention`.
        neighbors: blocks besides the query's own, below the number of blocks. The first rows of a causal layout have
            fewer.
        rewire: the probability to replace a block; 0 gives a band.
        seed: an int, 0 or more.
        causal: as for `strided_attention`.

    Raises:
        BlockSparseError: `tokens` is not a multiple of the block, or an argument is out of range.

    >>> import blocksparse as bs
    >>> bs.patterns.small_world_attention(8, block_size=1, neighbors=2, rewire=0.3, seed=1).mask().sum(1)
    tensor([1, 2, 3, 3, 3, 3, 3, 3])

    Source: Watts, Strogatz, Collective dynamics of small-world networks (1998); Zaheer et al., Big Bird: transformers
    for longer sequences (2020), who add random keys to a band.
    """
    n = _blocks(tokens, block_size)
    neighbors = integer("neighbors", neighbors, 0, below=n, of="the number of blocks")
    rewire = number("rewire", rewire, 0, 1)
    rng = np.random.default_rng(integer("seed", seed, 0))
    cols = []
    for i in range(n):
        visible = i + 1 if causal else n
        start = max(0, i - neighbors) if causal else min(max(0, i - neighbors // 2), n - neighbors - 1)
        near = np.arange(start, min(start + neighbors + 1, visible))
        moved = (rng.random(near.size) < rewire) & (near != i)
        drawn = rng.permutation(visible - near.size)[: np.count_nonzero(moved)]
        # If there are too few other blocks, the last ones are not rewired.
        moved &= np.cumsum(moved) <= drawn.size
        cols.append(np.concatenate([near[~moved], drawn + near.size * (drawn >= start)]))
    rows = np.repeat(np.arange(n), [row.size for row in cols])
    return BlockLayout.from_indices(rows, np.concatenate(cols), (n, n), block_size)


def dilated(
    tokens: int, block_size: int = 64, neighbors: int = 4, dilation: int = 2, causal: bool = True
) -> BlockLayout:
    """Return the layout of a dilated window: the query's own block and every `dilation`-th one before it, or around it.

    Args:
        tokens, block_size: as for `strided_attention`.
        neighbors: blocks besides the query's own, on each side.
        dilation: the distance between these blocks, in blocks; 1 gives a window without gaps.
        causal: as for `strided_attention`.

    Raises:
        BlockSparseError: `tokens` is not a multiple of the block, or an argument is out of range.

    >>> import blocksparse as bs
    >>> bs.patterns.dilated(6, block_size=1, neighbors=1, dilation=2).mask().int()
    tensor([[1, 0, 0, 0, 0, 0],
            [0, 1, 0, 0, 0, 0],
            [1, 0, 1, 0, 0, 0],
            [0, 1, 0, 1, 0, 0],
            [0, 0, 1, 0, 1, 0],
            [0, 0, 0, 1, 0, 1]], dtype=torch.int32)

    Source: Beltagy et al., Longformer: the long-document transformer (2020).
    """
    n, dilation = _blocks(tokens, block_size), integer("dilation", dilation, 1)
    steps = dilation * np.arange(min(integer("neighbors", neighbors, 0), (n - 1) // dilation) + 1)
    steps = steps if causal else np.concatenate([-steps, steps])
    return _layout({"all": np.arange(n)[:, None] - steps}, "all", causal, block_size)


def bigbird(
    tokens: int,
    block_size: int = 64,
    neighbors: int = 1,
    global_blocks: int = 1,
    random_blocks: int = 3,
    seed: int = 0,
    causal: bool = False,
) -> BlockLayout:
    """Draw the layout of BigBird: a window, global blocks and some random blocks per row.

    Args:
        tokens, block_size: as for `strided_attention`.
        neighbors: blocks of the window on each side of the query's own.
        global_blocks: first blocks of the sequence, whose queries attend to all keys and whose keys all queries see.
        random_blocks: blocks drawn per row from those that are left.
        seed: an int, 0 or more.
        causal: as for `strided_attention`.

    Raises:
        BlockSparseError: `tokens` is not a multiple of the block, or an argument is out of range.

    >>> import blocksparse as bs
    >>> bs.patterns.bigbird(10, block_size=1).mask().sum(1)
    tensor([10,  6,  7,  7,  7,  7,  7,  7,  7,  6])

    Source: Zaheer et al., Big Bird: transformers for longer sequences (2020).
    """
    n, random_blocks = _blocks(tokens, block_size), integer("random_blocks", random_blocks, 0)
    neighbors, first = integer("neighbors", neighbors, 0), min(integer("global_blocks", global_blocks, 0), n)
    rng = np.random.default_rng(integer("seed", seed, 0))
    rows = np.arange(n)
    start, end = np.maximum(rows - neighbors, first), np.minimum(rows + (0 if causal else neighbors) + 1, n)
    drawn = []
    for row in range(first, n):
        width = end[row] - start[row]
        others = (row + 1 if causal else n) - first - width  # neither in the window nor global
        cols = rng.choice(others, min(random_blocks, others), replace=False, shuffle=False) + first
        drawn.append(cols + width * (cols >= start[row]))
    start[:first], end[:first] = first, rows[:first] + 1 if causal else n
    lead = np.minimum(first, rows + 1) if causal else first
    window = blocks_of_spans((0, np.broadcast_to(lead, n)), (start, end))
    at_random = np.repeat(rows[first:], [each.size for each in drawn])
    all_rows, cols = np.append(window[0], at_random), np.concatenate([window[1], *drawn])
    return BlockLayout.from_indices(all_rows, cols, (n, n), block_size)


def _blocks(tokens: Any, block_size: Any) -> int:
    """Return the number of blocks of the tokens, which must be a multiple of the block."""
    block_size, tokens = integer("block_size", block_size, 1), integer("tokens", tokens, 1)
    if tokens % block_size:
        raise BlockSparseError.expected("tokens", f"a multiple of the block, {block_size}", tokens)
    return checked_grid((tokens // block_size,) * 2)[0]


def _sizes(tokens: Any, block_size: Any, stride: Any) -> tuple[int, int]:
    """Return the number of blocks and the stride in blocks."""
    n = _blocks(tokens, block_size)
    return n, max(1, round(math.sqrt(n))) if stride is None else integer("stride", stride, 1)


def _layout(keys: dict[str, np.ndarray], part: str, causal: bool, block_size: int) -> BlockLayout:
    """Make the layout of one part, or of "all", from the keys `[n, any]` of each query.

    Keys outside of the sequence are left out, as are later ones if the layout is causal.
    """
    if part not in PARTS:
        raise BlockSparseError.expected("part", f"one of {', '.join(PARTS)}", repr(part))
    cols = np.hstack([*keys.values()]) if part == "all" else keys[part]
    n = len(cols)
    rows = np.broadcast_to(np.arange(n)[:, None], cols.shape)
    valid = (cols >= 0) & (cols <= (rows if causal else n - 1))
    return BlockLayout.from_indices(*np.divmod(np.unique(rows[valid] * n + cols[valid]), n), (n, n), block_size)
