"""Attention in which a layout defines which keys each query sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checked import shape_of
from ...errors import BlockSparseError
from ...layout import BlockLayout, check_layout
from ..checks import autocast, in_autocast, without_autocast
from ..graph_layout import is_exporting
from . import gathered
from .op import ATTENTION, in_graph

__all__ = ["attention"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | Sequence[BlockLayout],
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale q k^T) v, where each query sees only the keys of the stored blocks in its row.

    Args:
        q: `[batch, heads, queries, d]`.
        k: `[batch, heads, keys, d]`.
        v: `[batch, heads, keys, d_v]`.
        layout: of shape (queries, keys); one for all heads, or a list with one per head.
        causal: query i sees only keys j <= i of these keys. Leave it False if the queries are the end of a longer text,
            and choose the blocks instead.
        scale: the factor of the scores; d^-0.5 by default.

    Time and memory grow with the number of stored blocks. A GPU runs PyTorch's FlexAttention with a `BlockMask` made of
    the layout, a CPU runs a kernel of the compiled core. On other devices, on a GPU in float64, and in PyTorch's
    transforms, the keys of each row are gathered for `scaled_dot_product_attention`. A compiled graph contains
    FlexAttention or one op, whose backward pass computes the forward pass again; each layout is compiled separately. An
    exported graph contains PyTorch's own operations only, and grows with the rows of blocks.

    FlexAttention works in tiles. Without gradients and with 128 queries or more, a tile is as large as the blocks: 32,
    64 or 128. For random blocks of 32, density 0.1, 8192 tokens, d 64 and bfloat16, the forward pass on an H100 is 3.8
    times as fast as dense attention. With gradients every tile is 128; such blocks touch 81 % of these tiles, and the
    forward pass has 0.12 times the speed of dense attention. To train on a GPU, use blocks of 128.

    Under `torch.autocast`, q, k and v are cast, as for `scaled_dot_product_attention`.

    Returns:
        `[batch, heads, queries, d_v]`; exactly 0 for queries that see no key.

    Raises:
        BlockSparseError: shapes do not fit each other or the layout, dtypes or devices are mixed, or the number of
            layouts in a list is not the number of heads.

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
    if all(isinstance(tensor, Tensor) for tensor in (q, k, v)) and in_autocast(q):
        q, k, v = (autocast(tensor, tensor, None)[0] for tensor in (q, k, v))
        with without_autocast(q.device):
            return attention(q, k, v, layout, causal=causal, scale=scale)
    layouts = _check(q, k, v, layout)
    if not isinstance(causal, bool | np.bool_):
        raise BlockSparseError.expected("causal", "a bool", repr(causal))
    if scale is not None and not isinstance(scale, Real):
        raise BlockSparseError.expected("scale", "a number or None", repr(scale))
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
    backend = ATTENTION.on(q.device, q.dtype)
    # Exported graphs use PyTorch's own operations, so that other runtimes can run them.
    if backend is gathered and torch.compiler.is_compiling() and not is_exporting():
        return in_graph(q, k, v, layouts, bool(causal), scale)
    y: Tensor = backend.attention(q, k, v, layouts, bool(causal), scale)
    return y


def _check(q: Any, k: Any, v: Any, layout: Any) -> list[BlockLayout]:
    """Check the tensors and layouts; return one layout if all are equal, else one per head."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            raise BlockSparseError.expected(name, "a tensor [batch, heads, tokens, d]", shape_of(tensor))
        if tensor.dtype != q.dtype or tensor.device != q.device or not tensor.is_floating_point():
            expected = f"floating point, the dtype and the device of q, {q.dtype} and {q.device}"
            raise BlockSparseError.expected(name, expected, f"{tensor.dtype} and {tensor.device}")
    batch, heads, queries, d = q.shape
    if list(k.shape[:2]) != [batch, heads] or k.shape[3] != d:
        raise BlockSparseError.expected("k", f"[{batch}, {heads}, keys, {d}], as of q", list(k.shape))
    # Separate comparisons, because a graph with dynamic sizes has a node for each.
    if v.shape[0] != batch or v.shape[1] != heads or v.shape[2] != k.shape[2]:
        raise BlockSparseError.expected("v", f"[{batch}, {heads}, {k.shape[2]}, d_v], as of k", list(v.shape))
    layouts = list(layout) if isinstance(layout, Sequence) else [layout]
    if isinstance(layout, Sequence) and len(layouts) != heads:
        raise BlockSparseError.expected("layout", f"one for each of {heads} heads", f"{len(layouts)} layouts")
    for each in layouts:
        check_layout(each)
        if each.shape[0] != queries or each.shape[1] != k.shape[2]:
            raise _other_shape(each, queries, k.shape[2])
    return layouts[:1] if _all_equal(*layouts) else layouts


def _all_equal(*layouts: BlockLayout) -> bool:
    return len(set(layouts)) == 1


# Dynamo calls this function, because it cannot trace how layouts are compared.
_all_equal._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _other_shape(layout: BlockLayout, queries: int, keys: int) -> BlockSparseError:
    """Return the error for a layout of a wrong shape, with the best remedy."""
    expected = f"the shape (queries, keys) = ({queries}, {keys})"
    height, width = layout.block_shape
    if queries % height or keys % width:
        remedy = f"pad q, k and v to multiples of the block {layout.block_shape}, or use a block size that divides both"
    elif queries <= layout.shape[0] and keys <= layout.shape[1]:
        remedy = f"layout.crop({queries}, {keys}) has it"
    else:
        remedy = "make a layout for the longest inputs, and use layout.crop(queries, keys) for others"
    return BlockSparseError.expected("layout", f"{expected}: {remedy}", repr(layout))
