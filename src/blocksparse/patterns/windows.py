"""Layouts (queries, keys) for `bs.nn.attention` that consist of few spans per row: sliding windows and documents."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from ..checked import checked_grid, checked_ints, integer, is_int
from ..errors import BlockSparseError
from ..layout import BlockLayout


def sliding_window(
    tokens: int,
    window: int | tuple[int, int],
    block_size: int = 64,
    global_blocks: int = 0,
    sinks: int = 0,
) -> BlockLayout:
    """Return the blocks of sliding-window attention: all blocks with a key in the window of one of their queries.

    Args:
        tokens: the number of queries and of keys. The layout is rounded up to whole blocks.
        window: the number of keys that a query sees, itself and earlier ones, as `sliding_window` of transformers'
            configs. A pair (left, right) gives the keys on each side instead, as `window_size` of `bs.nn.attention`,
            with -1 for all.
        block_size: tokens per block.
        global_blocks: first blocks of the sequence, whose queries attend to all keys (an int `window`: to all earlier
            keys) and whose keys all queries see.
        sinks: first tokens that all queries see, rounded up to whole blocks.

    Blocks are whole: for the exact window, pass `window_size` to `bs.nn.attention` too. It hides global keys outside of
    the window, and sinks unless `sink_tokens` keeps them.

    Raises:
        BlockSparseError: an argument is out of range.

    >>> import blocksparse as bs
    >>> bs.patterns.sliding_window(96_000, 512)
    BlockLayout(shape=(96000, 96000), block_size=(64, 64), nnz=13464, density=0.005984)
    >>> bs.patterns.sliding_window(6, 2, block_size=1, sinks=1).mask().int()
    tensor([[1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [1, 0, 1, 1, 0, 0],
            [1, 0, 0, 1, 1, 0],
            [1, 0, 0, 0, 1, 1]], dtype=torch.int32)

    Source: Beltagy et al., Longformer: the long-document transformer (2020); Xiao et al., Efficient streaming language
    models with attention sinks (2023).
    """
    n, block = _whole_blocks(integer("tokens", tokens, 1), block_size)
    left, right = checked_window("window", window, tokens)
    first = min(integer("global_blocks", global_blocks, 0), n)
    lead = min(max(first, -(-integer("sinks", sinks, 0) // block)), n)
    rows = np.arange(n)
    last = n if right >= tokens else np.minimum(((rows + 1) * block - 1 + right) // block + 1, n)
    start = np.maximum((rows * block - left) // block, lead)
    start[:first] = lead
    end = np.broadcast_to(last, n).copy()
    end[:first] = rows[:first] + 1 if is_int(window) else n
    lead_end = np.minimum(lead, np.maximum(rows + 1, end) if is_int(window) else n)
    return BlockLayout.from_indices(*blocks_of_spans((0, lead_end), (start, end)), (n, n), block)


def documents(lengths: Any, block_size: int = 64, causal: bool = False) -> BlockLayout:
    """Return the blocks of attention within documents that are packed one behind another.

    Args:
        lengths: the number of tokens of each document, a vector of ints, 0 or more.
        block_size: tokens per block. The layout is rounded up to whole blocks.
        causal: if True, leave out the blocks of later keys.

    A block that contains the end of a document is whole: for exact borders, pass `cu_seqlens`, the starts of the
    documents and their end, to `bs.nn.attention` too.

    Raises:
        BlockSparseError: a length is negative, or there is no token.

    >>> import blocksparse as bs
    >>> bs.patterns.documents([3, 0, 2, 4], block_size=2).mask().int()
    tensor([[1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [0, 1, 1, 1, 1],
            [0, 0, 1, 1, 1],
            [0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    lengths = checked_ints("lengths", lengths).astype(np.int64)
    if (lengths < 0).any() or not lengths.any():
        raise BlockSparseError.expected("lengths", "0 or more tokens per document, and a token in one", lengths)
    lengths = lengths[lengths > 0]
    n, block = _whole_blocks(int(lengths.sum()), block_size)
    ends = np.cumsum(lengths)
    rows = np.arange(n)
    of_first = np.searchsorted(ends, rows * block, side="right")
    of_last = np.searchsorted(ends, np.minimum((rows + 1) * block, ends[-1]) - 1, side="right")
    start, end = (ends - lengths)[of_first] // block, -(-ends[of_last] // block)
    return BlockLayout.from_indices(
        *blocks_of_spans((start, np.minimum(end, rows + 1) if causal else end)), (n, n), block
    )


def checked_window(name: str, window: Any, most: int) -> tuple[int, int]:
    """Return (left, right), at most `most`, of a window: the number of keys of a query, or a pair with -1 for all.

    >>> checked_window("window", 4, 100), checked_window("window", (-1, 0), 100)
    ((3, 0), (100, 0))
    """
    pair = (integer(name, window, 1) - 1, 0) if is_int(window) else window
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(is_int(n) and n >= -1 for n in pair):
        expected = "a pair (left, right) of the keys on each side, ints from -1 on, where -1 stands for all"
        raise BlockSparseError.expected(name, expected, repr(window))
    left, right = (most if n < 0 else min(int(n), most) for n in pair)
    return left, right


def blocks_of_spans(*spans: tuple[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of blocks: in each row those from start to below end, for disjoint spans (start, end).

    >>> blocks_of_spans((0, np.array([1, 0])), (np.array([2, 1]), 3))
    (array([0, 0, 1, 1]), array([0, 2, 1, 2]))
    """
    bounds = np.stack(np.broadcast_arrays(*chain(*spans)), -1).reshape(-1, len(spans), 2)
    starts, ends = bounds[..., 0], bounds[..., 1]
    counts = np.maximum(ends - starts, 0).ravel()
    rows = np.repeat(np.repeat(np.arange(len(bounds)), len(spans)), counts)
    cols = np.arange(rows.size) + np.repeat(starts.ravel() - np.cumsum(counts) + counts, counts)
    return rows, cols


def _whole_blocks(tokens: int, block_size: Any) -> tuple[int, int]:
    """Return the number of blocks that these tokens need, and the block."""
    block = integer("block_size", block_size, 1)
    return checked_grid((-(-tokens // block),) * 2)[0], block
