"""The choice of blocks from the data: each block of queries sees the blocks of keys with the largest pooled scores."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...checked import checked_block, integer, shape_of
from ...errors import BlockSparseError
from ...layout import BlockLayout, check_layout
from ...patterns import dense
from ..checks import accumulator
from ..graph_layout import DynamicLayout
from .arguments import check_lengths, check_operands, check_tensors


def topk_blocks(
    q: Tensor,
    k: Tensor,
    layout: BlockLayout | None,
    blocks: int,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    block_size: int | tuple[int, int] | None = None,
) -> list[BlockLayout]:
    """Choose for each block of queries the blocks of keys with the largest scores, for `bs.nn.attention`.

    The score of two blocks is the product of their mean query and mean key. With as many queries as keys and square
    blocks, each row's own block, on the diagonal, is always chosen if it is a candidate. In decoding, add the query's
    own block to the choice by `layout | own`. The choice has no gradient.

    A score of NaN counts as the largest one, as in `torch.topk`, so that a NaN in a key shows in the result. The number
    of chosen blocks does not depend on the data.

    Args:
        q: `[batch, heads, queries, d]`.
        k: `[batch, key heads, keys, d]`.
        layout: the blocks to choose from, None for all; if attention is causal, a causal pattern. Its shape is
            (queries, keys), rounded up to whole blocks.
        blocks: how many to choose per row; rows with fewer blocks keep all.
        lengths: `[batch]`, the number of keys of each sequence, as for `bs.nn.attention`. Later keys do not count in
            means, and blocks of these alone are chosen last. With as many queries as keys, later queries do not count
            either.
        block_size: the block of a layout of None, an int or (queries, keys); 64 by default.

    Returns:
        A layout per sequence and head, `batch * heads` of them. In a compiled graph these are inputs of the graph,
        which serves any choice.

    Raises:
        BlockSparseError: shapes do not fit, there is no sequence, head or token, `blocks` is below 1, a length is
            beyond the keys, or the data cannot be read: on the meta device, and in transforms of `torch.func`.

    >>> import torch, blocksparse as bs
    >>> q, k, v = (torch.randn(1, 2, 256, 16) for _ in range(3))
    >>> candidates = bs.patterns.sliding_window(256, 256, block_size=32)  # all blocks up to the query's own
    >>> layouts = bs.nn.topk_blocks(q, k, candidates, blocks=3)
    >>> layouts[0]
    BlockLayout(shape=(256, 256), block_size=(32, 32), nnz=21, density=0.3281)
    >>> bs.nn.attention(q, k, v, layouts, causal=True).shape
    torch.Size([1, 2, 256, 16])

    Source: Lu et al., MoBA: mixture of block attention for long-context LLMs (2025).
    """
    check_tensors(q, k, k)
    for name, tensor in (("q", q), ("k", k)):
        if not tensor.shape[2]:
            raise BlockSparseError.expected(name, "1 or more tokens", list(tensor.shape))
    # A graph with dynamic lengths becomes one for these lengths, because the layout depends on them.
    queries, keys = operator.index(q.shape[2]), operator.index(k.shape[2])
    of_all_blocks = layout is None
    if layout is None:
        layout = _ALL_BLOCKS[_key_of_all_blocks(queries, keys, 64 if block_size is None else block_size)]
    elif block_size is not None:
        raise BlockSparseError.expected("block_size", "None if a layout is given", block_size)
    check_layout(layout)
    _, row = check_operands(q, k, k, layout)
    if not q.shape[0] or not q.shape[1]:
        raise BlockSparseError.expected("q", "1 or more sequences and heads", list(q.shape))
    blocks = integer("blocks", blocks, 1)
    if row and layout.grid[0] > 1:  # a single row of blocks is that of all queries in any case
        remedy = "pass layout[first:], or a layout of smaller blocks"
        if of_all_blocks:
            remedy = f"pass block_size=(1, {layout.block_shape[1]})"
        expected = f"as many queries as the layout has rows ({remedy})"
        raise BlockSparseError.expected("q", expected, f"{q.shape[2]} queries and {k.shape[2]} keys")
    lengths = check_lengths(lengths, q, k.shape[2])
    if torch.compiler.is_dynamo_compiling():
        _candidates_while_tracing(layout, blocks, q.device)
    candidates = _candidates_on(layout, blocks, q.device)
    with torch.no_grad():
        cols = _chosen_columns(q, k, layout, candidates, lengths)
    if torch.compiler.is_compiling():
        return [DynamicLayout(candidates.crow, col, layout.grid, layout.block_shape) for col in cols.unbind(0)]
    if cols.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(cols):
        expected = "tensors whose numbers can be read (choose before the transform of torch.func, and not on meta)"
        raise BlockSparseError.expected("q and k", expected, f"{shape_of(q)} on {q.device}")
    rows = np.repeat(np.arange(layout.grid[0]), np.diff(candidates.crow.cpu().numpy()))
    return [BlockLayout.from_indices(rows, col, layout.grid, layout.block_shape) for col in cols.cpu().numpy()]


MOST_SCORES = 2**28  # of a block of a layout of None; attention on a CPU allocates the scores of a block

# Layouts that store all blocks, by (rows, columns, block height, block width).
_ALL_BLOCKS: dict[tuple[int, int, int, int], BlockLayout] = {}


def _key_of_all_blocks(queries: int, keys: int, block_size: int | tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the key in `_ALL_BLOCKS` of the layout of these lengths, rounded up to whole blocks, and put it there."""
    height, width = checked_block(block_size)
    if height * width > MOST_SCORES:
        raise BlockSparseError.expected("block_size", f"blocks of at most {MOST_SCORES:,} scores", block_size)
    key = -(-queries // height) * height, -(-keys // width) * width, height, width
    if key not in _ALL_BLOCKS:
        if len(_ALL_BLOCKS) >= 64:
            _ALL_BLOCKS.pop(next(iter(_ALL_BLOCKS)))
        _ALL_BLOCKS[key] = dense(key[:2], key[2:])
    return key


# Dynamo calls this function, because it cannot trace how layouts are made. It looks them up in the dict itself.
_key_of_all_blocks._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Candidates(NamedTuple):
    """The blocks to choose from.

    mask: bool `[rows, columns]`.
    crow: int32 `[rows + 1]`, the row starts of the choice.
    positions: int64 `[nnz]`, where the choice is in the largest blocks of each row, `[rows, most]`.
    most: how many blocks are chosen in a row that has enough.
    """

    mask: Tensor
    crow: Tensor
    positions: Tensor
    most: int


def _candidates_on(layout: BlockLayout, blocks: int, device: torch.device) -> _Candidates:
    """Return the candidates of a layout as real tensors on the device, even while the call is traced."""

    def make() -> _Candidates:
        most = min(blocks, layout.grid[1])
        counts = np.minimum(np.diff(layout.row_start), most)
        crow = np.append(0, np.cumsum(counts)).astype(np.int32)
        positions = np.flatnonzero(np.arange(most) < counts[:, None])
        with _disable_current_modes():
            tensors = [layout.mask(), torch.from_numpy(crow), torch.from_numpy(positions)]
            mask, crow_, positions_ = (tensor.to(device) for tensor in tensors)
        return _Candidates(mask, crow_, positions_, most)

    return layout.derived(("candidates", blocks, device), make)


def _candidates_while_tracing(layout: BlockLayout, blocks: int, device: torch.device) -> bool:
    """Make the candidates when torch.compile traces, and keep the steps out of the graph."""
    _candidates_on(layout, blocks, device)
    return True


# Dynamo calls this function, because it cannot trace how candidates are made. See `ops/graph_layout.py`.
_candidates_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _chosen_columns(
    q: Tensor, k: Tensor, layout: BlockLayout, candidates: _Candidates, lengths: Tensor | None
) -> Tensor:
    """Return the columns of the chosen blocks, ascending in each row, int32 `[batch * heads, nnz]`."""
    height, width = layout.block_shape
    of_queries = lengths if q.shape[2] == k.shape[2] else None
    means = _pooled(k, width, lengths).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = _pooled(q, height, of_queries) @ means.mT
    if lengths is not None:
        first = torch.arange(layout.grid[1], device=q.device) * width
        scores = scores.masked_fill(first >= lengths[:, None, None, None], -torch.inf)
    scores = scores.flatten(0, 1)
    # Finite, because -inf marks blocks that are no candidates, and inf the query's own.
    limits = torch.finfo(scores.dtype)
    scores = scores.nan_to_num(nan=limits.max, posinf=limits.max, neginf=limits.min)
    if q.shape[2] == k.shape[2] and height == width:
        own = torch.eye(layout.grid[0], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(own, torch.inf)
    values, cols = scores.masked_fill(~candidates.mask, -torch.inf).topk(candidates.most, -1)
    cols = cols.masked_fill(values.isneginf(), layout.grid[1]).sort(-1).values
    return cols.flatten(1).index_select(1, candidates.positions).to(torch.int32)


def _pooled(x: Tensor, block: int, lengths: Tensor | None) -> Tensor:
    """Return the mean over each block of tokens, `[batch, heads, blocks, d]` in float32 or float64."""
    wide, tokens = x.to(accumulator(x.dtype)), x.shape[2]
    block = min(block, tokens)  # a large block needs no padding, because there is only one
    missing = -tokens % block
    if lengths is not None:
        position = torch.arange(tokens + missing, device=x.device)
        counts = (position < lengths[:, None]).unflatten(1, (-1, block)).sum(2)[:, None, :, None]
        wide = wide.masked_fill((position[:tokens] >= lengths[:, None])[:, None, :, None], 0)
    blocks = F.pad(wide, (0, 0, 0, missing)).unflatten(2, (-1, block))
    means: Tensor = blocks.mean(3) if lengths is None else blocks.sum(3) / counts.clamp(min=1)
    if lengths is not None or not missing:
        return means
    return torch.cat([means[:, :, :-1], means[:, :, -1:] * (block / (block - missing))], 2)
