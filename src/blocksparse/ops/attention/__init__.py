"""Attention in which a layout defines which keys each query sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ...checked import integer, number
from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..checks import autocast, in_autocast, without_autocast
from . import few_queries
from .arguments import check_documents, check_lengths, check_operands, check_sinks, check_window, has_dynamic
from .op import ATTENTION, in_graph, runs_as_op
from .rules import Rules, add_sinks, data_spans, merge, window_spans
from .topk import topk_blocks

__all__ = ["attention", "topk_blocks"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | Sequence[BlockLayout],
    causal: bool = False,
    scale: float | None = None,
    *,
    window_size: tuple[int, int] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """Return softmax(scale q k^T) v, where each query sees only the keys of the stored blocks in its row.

    Args:
        q: `[batch, heads, queries, d]`.
        k: `[batch, key heads, keys, d]`. If it has fewer heads than q, neighbouring heads of q share one.
        v: `[batch, key heads, keys, d_v]`.
        layout: of shape (queries, keys), rounded up to whole blocks; one for all heads, or a list with one per head of
            q, or per sequence and head, as `topk_blocks` returns it. If there are fewer queries than keys, a layout of
            shape (keys, keys) serves its last rows; so does one of (queries, keys) that rounds up to the same shape.
        causal: query i sees only keys up to its own position. Queries end where the keys end, so this position is
            i + keys - queries.
        scale: the factor of the scores; d^-0.5 by default.
        window_size: (left, right), the keys that a query sees before and after its position, -1 for all. The limits
            hold for single keys, within blocks too.
        cu_seqlens: ints from 0 up to the number of keys, the starts of packed documents and the end of the last one.
            A query sees only keys of its own document.
        lengths: `[batch]`, the number of keys of each sequence; later keys are padding, which no query sees.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: `[heads]`, a learned score per head that counts in the sum of the softmax, and has no value.
        sink_tokens: the number of first keys that stay visible to the left of the window, where the layout stores their
            blocks (StreamingLLM). Not with `cu_seqlens`.
        dropout_p: the probability to drop a weight; the random numbers are drawn with PyTorch's generator.
        return_lse: whether to return also the logarithm of each softmax's sum.

    Time and memory grow with the number of visible blocks. A CPU runs a kernel of the compiled core. A GPU runs
    PyTorch's FlexAttention with a `BlockMask` made of the layout, or Triton kernels of this library. On other devices,
    on a GPU in float64, with dropout, `cu_seqlens`, `lengths`, `sinks` or `return_lse`, and in PyTorch's transforms,
    the keys of each row are gathered for dense products. A compiled graph contains FlexAttention or one op; each layout
    is compiled separately. An exported graph contains PyTorch's own operations only, and grows with the rows of blocks.

    FlexAttention works in tiles. Without gradients and with 128 queries or more, a tile is as large as the blocks: 32,
    64 or 128. For random blocks of 32, density 0.1, 8192 tokens, d 64 and bfloat16, the forward pass on an H100 is 3.8
    times as fast as dense attention. With gradients every tile is 128; such blocks touch 81 % of these tiles, and the
    forward pass has 0.12 times the speed of dense attention.

    The Triton kernels work in blocks of any size. They run within `bs.use_backend("triton")`, and have not been
    measured on a GPU yet.

    Under `torch.autocast`, q, k and v are cast, as for `scaled_dot_product_attention`.

    Returns:
        `[batch, heads, queries, d_v]`; exactly 0 for queries that see no key. With `return_lse`, a tuple with
        `[batch, heads, queries]` in the dtype of the sums; -inf for queries that see no key.

    Raises:
        BlockSparseError: shapes do not fit each other or the layout, dtypes or devices are mixed, the number of
            layouts in a list is not the number of heads, or an option is out of range. Values of `cu_seqlens` and
            `lengths` are checked on the CPU, outside of compiled graphs.

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.watts_strogatz(256, block_size=32, neighbors=2, rewire=0.2, seed=0)
        >>> q, k, v = (torch.randn(1, 4, 256, 16) for _ in range(3))
        >>> y = bs.nn.attention(q, k, v, layout, causal=True)
        >>> seen = bs.to_dense(torch.ones(layout.values_shape), layout).bool().tril()
        >>> dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        >>> torch.allclose(y, dense, atol=1e-5)
        True
        >>> last = bs.nn.attention(q[:, :, -1:], k, v, layout, causal=True)  # as in decoding with a cache
        >>> torch.allclose(last, y[:, :, -1:], atol=1e-5)
        True

    Source: Child et al., Generating long sequences with sparse transformers (2019); Dong et al., Flex attention (2024).
    """
    step = causal, scale, window_size, softcap
    alone = cu_seqlens is None and lengths is None and sinks is None and not (sink_tokens or dropout_p or return_lse)
    if alone and (y := few_queries.repeated(q, k, v, layout, *step)) is not None:
        return y
    options: dict[str, Any] = {
        "window_size": window_size, "cu_seqlens": cu_seqlens, "lengths": lengths, "softcap": softcap, "sinks": sinks,
        "sink_tokens": sink_tokens, "dropout_p": dropout_p, "return_lse": return_lse,
    }  # fmt: skip
    if all(isinstance(tensor, Tensor) for tensor in (q, k, v)) and in_autocast(q):
        q, k, v = (autocast(tensor, tensor, None)[0] for tensor in (q, k, v))
        with without_autocast(q.device):
            return attention(q, k, v, layout, causal, scale, **options)
    if isinstance(layout, Sequence) and _has_layout_per_sequence(q, k, v, layout):
        return _attention_per_sequence(q, k, v, layout, causal, scale, options)
    layouts, row = check_operands(q, k, v, layout)
    if not isinstance(causal, bool | np.bool_):
        raise BlockSparseError.expected("causal", "a bool", repr(causal))
    if scale is not None and not (isinstance(scale, Real) and abs(scale) < math.inf):
        raise BlockSparseError.expected("scale", "a finite number or None", repr(scale))
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
    queries, keys = q.shape[2], k.shape[2]
    left, right = check_window(window_size, bool(causal))
    cap = 0.0 if softcap is None else number("softcap", softcap, 1e-30)
    p = number("dropout_p", dropout_p, 0, below=1)
    check_sinks(sinks, q)
    spans = None
    if cu_seqlens is not None or lengths is not None:
        documents = check_documents(cu_seqlens, queries, keys, q.device)
        spans = data_spans(queries, keys, left, right, documents, check_lengths(lengths, q, keys))
    rules = Rules(row, left, right, spans, scale, cap, p, draw_seed(p, q.device))
    first = integer("sink_tokens", sink_tokens, 0)
    if first and cu_seqlens is not None:
        raise BlockSparseError.expected("sink_tokens", "0 for packed documents", sink_tokens)
    if first and left is not None:
        y, lse = _attention_with_sink_tokens(q, k, v, layouts, rules, sinks, first)
    else:
        y, lse = run_attention(q, k, v, layouts, rules, sinks, return_lse)
        if alone:
            few_queries.record(q, k, v, layout, rules, *step)
    return (y, lse) if return_lse else y


def _attention_with_sink_tokens(
    q: Tensor, k: Tensor, v: Tensor, layouts: list[BlockLayout], rules: Rules, sinks: Tensor | None, first: int
) -> tuple[Tensor, Tensor | None]:
    """Merge attention in the window with attention to the first keys before it."""
    inside = rules.spans
    if inside is None:
        inside = window_spans(q.shape[2], k.shape[2], rules.left, rules.right, q.device)[:, None]
    y, lse = run_attention(q, k, v, layouts, rules, None, return_lse=True)
    width = max(layout.block_shape[1] for layout in layouts)
    visible = -(-first // width) * width
    start, end = inside.unbind(0)
    before = torch.stack([torch.zeros_like(start), start.minimum(end).clamp(max=first)])
    keys, crops = k.shape[2], layouts
    if not has_dynamic(layouts):  # a layout that is an input of a graph cannot be cropped
        keys, crops = min(visible, keys), []
        for layout in layouts:
            columns = min(-(-visible // layout.block_shape[1]), layout.grid[1])
            # Dynamo cannot trace that layouts cache a part, but `layout[...]` does so while it traces.
            tracing = torch.compiler.is_dynamo_compiling()
            crops.append(layout[:, :columns] if tracing else _first_columns(layout, columns))
    rules = rules._replace(left=None, right=None, spans=before)
    other_y, other_lse = run_attention(q, k[:, :, :keys], v[:, :, :keys], crops, rules, None, return_lse=True)
    y, lse = merge(y, cast("Tensor", lse), other_y, cast("Tensor", other_lse))
    return (y, lse) if sinks is None else add_sinks(y, lse, sinks)


def _first_columns(layout: BlockLayout, columns: int) -> BlockLayout:
    return layout.derived(("first columns", columns), lambda: layout[:, :columns])


def _has_layout_per_sequence(q: Any, k: Any, v: Any, layout: Sequence[BlockLayout]) -> bool:
    """Return whether a list has a layout for each head of each of several sequences."""
    tensors = all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v))
    return tensors and len(q) == len(k) == len(v) > 1 and len(layout) == len(q) * q.shape[1]


def _attention_per_sequence(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], causal: bool, scale: float | None,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """Return attention with a layout for each head of each sequence: the heads of all sequences are those of one."""
    check_sinks(options["sinks"], q)
    shape = q.shape[:2]
    lengths = check_lengths(options["lengths"], q, k.shape[2])
    if lengths is not None:
        heads = shape[1]
        each = [
            attention(q[i, None], k[i, None], v[i, None], layouts[i * heads : (i + 1) * heads], causal, scale,
                      **options | {"lengths": lengths[i, None]})
            for i in range(shape[0])
        ]  # fmt: skip
        return tuple(map(torch.cat, zip(*each, strict=True))) if options["return_lse"] else torch.cat(each)
    if options["sinks"] is not None:
        options = options | {"sinks": options["sinks"].repeat(shape[0])}
    q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    found = attention(q, k, v, layouts, causal, scale, **options)
    if options["return_lse"]:
        return tuple(x.reshape(*shape, *x.shape[2:]) for x in found)
    return found.reshape(*shape, *found.shape[2:])


def run_attention(
    q: Tensor, k: Tensor, v: Tensor, layouts: list[BlockLayout], rules: Rules, sinks: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return attention of checked operands, and its log-sum-exp if it is asked for."""
    backend = ATTENTION.on(q.device, q.dtype)
    return_lse = return_lse or sinks is not None
    if torch.compiler.is_compiling() and (has_dynamic(layouts) or runs_as_op(backend, q, k, v, rules)):
        y, lse = in_graph(q, k, v, layouts, rules)
    else:
        y, lse = backend.attention(q, k, v, layouts, rules, return_lse)
    return (y, lse) if sinks is None else add_sinks(y, lse, sinks)


def draw_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """Draw the seed of dropout with PyTorch's generator; None without dropout."""
    return torch.randint(2**63 - 1, (), device=device) if dropout_p else None
