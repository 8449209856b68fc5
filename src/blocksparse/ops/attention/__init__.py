"""Attention in which a layout says which queries see which keys."""

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
    """Computes softmax(scale q k^T) v, where each query sees only the keys of the stored blocks in its row.

    Args:
        q: `[batch, heads, queries, d]`.
        k: `[batch, heads, keys, d]`.
        v: `[batch, heads, keys, d_v]`.
        layout: of shape (queries, keys); one for all heads, or a list of one for each.
        causal: a query sees, of those keys, only the ones that are not behind it: key j <= query i, also where the
            queries are the last ones of a longer text (leave it out there, and choose the blocks).
        scale: by default d^-0.5.

    Time and memory grow with the number of stored blocks. On a GPU this is PyTorch's FlexAttention with a `BlockMask`
    made of the layout, on a CPU a kernel of the compiled core. Elsewhere, on a GPU in float64, and in PyTorch's
    transforms, each row's keys are gathered for `scaled_dot_product_attention`. A compiled graph has FlexAttention or
    one operation, whose backward pass computes the forward pass again; another layout is compiled again. An exported
    graph grows with the rows of blocks, as it has PyTorch's own operations only.
    FlexAttention works in tiles. Without gradients, and from 128 queries on, these are of 32, 64 or 128, as fit the
    blocks: of random blocks of 32, density 0.1, 8192 tokens, d 64, bfloat16, on an H100 the forward pass is 3.8 times
    as fast as dense attention. With gradients there are only tiles of 128, of which such blocks touch 81 %, and it is
    0.12 times as fast: blocks to train with on a GPU are of 128.

    Under `torch.autocast` q, k and v are cast, as those of `scaled_dot_product_attention` are.

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
    # Exported graphs consist of PyTorch's own operations, so that other runtimes can have them.
    if backend is gathered and torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return in_graph(q, k, v, layouts, bool(causal), scale)
    y: Tensor = backend.attention(q, k, v, layouts, bool(causal), scale)
    return y


def _check(q: Any, k: Any, v: Any, layout: Any) -> list[BlockLayout]:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            raise BlockSparseError.expected(name, "a tensor [batch, heads, tokens, d]", shape_of(tensor))
        if tensor.dtype != q.dtype or tensor.device != q.device or not tensor.is_floating_point():
            wanted = f"floating point, the dtype and the device of q, {q.dtype} and {q.device}"
            raise BlockSparseError.expected(name, wanted, f"{tensor.dtype} and {tensor.device}")
    batch, heads, queries, d = q.shape
    if list(k.shape[:2]) != [batch, heads] or k.shape[3] != d:
        raise BlockSparseError.expected("k", f"[{batch}, {heads}, keys, {d}], as of q", list(k.shape))
    # Number by number: a graph in which sizes are left open has a node for each comparison.
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


# Dynamo runs it as it is, as it cannot trace how layouts are compared.
_all_equal._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _other_shape(layout: BlockLayout, queries: int, keys: int) -> BlockSparseError:
    wanted = f"the shape (queries, keys) = ({queries}, {keys})"
    height, width = layout.block_shape
    if queries % height or keys % width:
        remedy = f"pad q, k and v to multiples of the block {layout.block_shape}, or use a block size that divides both"
    elif queries <= layout.shape[0] and keys <= layout.shape[1]:
        remedy = f"layout.crop({queries}, {keys}) is its first part"
    else:
        remedy = "make one for inputs of this length, or of the longest, and layout.crop(queries, keys) for others"
    return BlockSparseError.expected("layout", f"{wanted}: {remedy}", repr(layout))
