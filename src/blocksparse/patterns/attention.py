"""Layouts of attention, (queries, keys): strided and fixed ones of sparse transformers, and small worlds.

They are among `bs.patterns`, and made for `bs.nn.attention`, in blocks of tokens. All numbers below are of blocks; with
blocks of 1 they are of tokens, as in the papers. A causal layout has no block behind the diagonal, and the queries of a
block on it see the keys that are not behind them by `bs.nn.attention(..., causal=True)`. No row is empty.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..checked import checked_grid, integer, number
from ..errors import BlockSparseError
from ..layout import BlockLayout

PARTS = ("all", "near", "far")


def strided_attention(
    tokens: int, block_size: int = 32, stride: int | None = None, part: str = "all", causal: bool = True
) -> BlockLayout:
    """Each query sees the keys right before it, and every stride-th one further back: for data with rows, like images.

    near: key j is seen by query i where i - j <= stride. far: where i - j is a multiple of the stride.

    Args:
        tokens: queries, and as many keys; a multiple of the block.
        block_size: tokens of a block.
        stride: in blocks; by default the root of their number, with which the layout has the fewest blocks.
        part: "near", "far", or "all", both of them; a list of the two is a layout for each of two heads.
        causal: no key behind the query; otherwise they are seen on either side.

    Raises:
        BlockSparseError: tokens that are no multiple of the block, a stride below 1, an unknown part.

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
    """Each query sees its own segment of the sequence, and the last keys of each segment, which summarise it: for text.

    near: key j is seen by query i in the same stretch of `stride`, where i // stride = j // stride. far: key j is seen
    by all where j % stride >= stride - summary; and each query sees its own block, as else the first would see none.

    Args:
        tokens, block_size: as for `strided_attention`.
        stride: of a stretch, in blocks; by default the root of their number.
        summary: at the end of each stretch, in blocks, 1 to stride.
        part, causal: as for `strided_attention`.

    Raises:
        BlockSparseError: tokens that are no multiple of the block, numbers out of range, an unknown part.

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
    """Each query sees its own block and the nearest ones, some of them rewired at random: a small world.

    A Watts-Strogatz graph whose ties have a direction: of the `neighbors` nearest blocks (all of them before it where
    causal), each is with probability `rewire` replaced by one drawn from all that may be seen and are not among them.
    So a few layers carry information over any distance, at the cost of a band.

    Args:
        tokens, block_size: as for `strided_attention`.
        neighbors: blocks besides its own, fewer than there are; the first rows of a causal layout have fewer.
        rewire: the probability; 0 for a band.
        seed: an int from 0 on.
        causal: no key behind the query.

    Raises:
        BlockSparseError: tokens that are no multiple of the block, numbers out of range, no int as the seed.

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
        seen = i + 1 if causal else n
        start = max(0, i - neighbors) if causal else min(max(0, i - neighbors // 2), n - neighbors - 1)
        near = np.arange(start, min(start + neighbors + 1, seen))
        moved = (rng.random(near.size) < rewire) & (near != i)
        drawn = rng.permutation(seen - near.size)[: np.count_nonzero(moved)]
        # Where there are fewer others than are to be rewired, the rest stays.
        moved &= np.cumsum(moved) <= drawn.size
        cols.append(np.concatenate([near[~moved], drawn + near.size * (drawn >= start)]))
    rows = np.repeat(np.arange(n), [row.size for row in cols])
    return BlockLayout.from_indices(rows, np.concatenate(cols), (n, n), block_size)


# -- pieces ------------------------------------------------------------------------------------------------------


def _blocks(tokens: Any, block_size: Any) -> int:
    block_size, tokens = integer("block_size", block_size, 1), integer("tokens", tokens, 1)
    if tokens % block_size:
        raise BlockSparseError.expected("tokens", f"a multiple of the block, {block_size}", tokens)
    return checked_grid((tokens // block_size,) * 2)[0]


def _sizes(tokens: Any, block_size: Any, stride: Any) -> tuple[int, int]:
    n = _blocks(tokens, block_size)
    return n, max(1, round(math.sqrt(n))) if stride is None else integer("stride", stride, 1)


def _layout(keys: dict[str, np.ndarray], part: str, causal: bool, block_size: int) -> BlockLayout:
    """Of the keys that each query sees, `[n, any]`, by part; what is not in the sequence, or behind, is left out."""
    if part not in PARTS:
        raise BlockSparseError.expected("part", f"one of {', '.join(PARTS)}", repr(part))
    cols = np.hstack([*keys.values()]) if part == "all" else keys[part]
    n = len(cols)
    rows = np.broadcast_to(np.arange(n)[:, None], cols.shape)
    kept = (cols >= 0) & (cols <= (rows if causal else n - 1))
    return BlockLayout.from_indices(*np.divmod(np.unique(rows[kept] * n + cols[kept]), n), (n, n), block_size)
