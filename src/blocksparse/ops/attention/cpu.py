"""Block-sparse attention on the CPU: the forward and the backward pass are one call of the compiled core each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..checks import accumulator, check_tensors
from ..cpu_core import address
from ..cpu_plan import check_int32
from ..registry import can_bypass_dispatcher, needs_grad
from . import few_queries, gathered
from .few_queries import rows_of_blocks
from .gathered import Result
from .node import Passes
from .rules import Rules, spans_of

# The core needs a multiple of this number of features: whole vectors of any instruction set.
FEATURE_STEP = 16
# On CPUs with bfloat16 instructions, PyTorch's own kernels use them.
BFLOAT16_ISAS = ("avx512_bf16", "amx")
# Narrower blocks of keys would be mostly padding of vectors.
MIN_BLOCK_KEYS = 4


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the core cannot serve these tensors, or None if it can; it never serves traced graphs."""
    if torch.compiler.is_compiling():
        return "graphs contain PyTorch's own operations"
    return cpu_core.unsupported_reason(device, dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], rules: Rules, return_lse: bool = False
) -> Result:
    if not can_bypass_dispatcher(q, k, v):
        return gathered.attention(q, k, v, layouts, rules, return_lse)
    if few_queries.serves(q, k, v, rules):
        return gathered.by_layout(q, k, v, layouts, rules, return_lse, few_queries.attention)
    pytorch_is_faster = q.dtype == torch.bfloat16 and cpu_core.isa() in BFLOAT16_ISAS
    if pytorch_is_faster or min(layout.block_shape[1] for layout in layouts) < MIN_BLOCK_KEYS:
        return gathered.attention(q, k, v, layouts, rules, return_lse)
    return gathered.by_layout(q, k, v, layouts, rules, return_lse, _of_layout)


def _of_layout(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, rules: Rules, return_lse: bool) -> Result:
    """Return attention of heads that share this layout."""
    if (options := gathered.dense_options(q, k, layout, rules, return_lse)) is not None:
        return gathered.dense_attention(q, k, v, **options), None
    dtype, d_v = q.dtype, v.shape[-1]
    q, k, v, rules = _operands(q, k, v, rules)
    if needs_grad(q, k, v):
        of_call: dict[str, Any] = {"layout": layout, "rules": rules}
        y, lse = Passes(partial(forward, **of_call), partial(backward, **of_call), [layout], rules).recorded(q, k, v)
    else:
        y, lse = forward(q, k, v, layout, rules)
    return (y if y.shape[-1] == d_v else y[..., :d_v]).to(dtype), lse if return_lse else None


def _operands(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> tuple[Tensor, Tensor, Tensor, Rules]:
    """Return the operands in the core's dtypes and sizes, with q scaled, and the rules for them."""
    q, k, v = (_whole_vectors(tensor.to(accumulator(tensor.dtype))) for tensor in (q, k, v))
    return q * rules.scale, k, v, rules._replace(scale=1.0)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None,
    layout: BlockLayout, rules: Rules,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of q, k and v from those of y and of its log-sum-exp, without autograd."""
    q_, k_, v_, unscaled = _operands(q, k, v, rules)
    y_, grad_ = (_whole_vectors(each.to(q_.dtype)) for each in (y, grad))
    grads = [each for each in backward(q_, k_, v_, y_, lse, grad_, grad_lse, layout, unscaled) if each is not None]
    grads[0] = grads[0] * rules.scale
    return [each[..., : like.shape[-1]].to(like.dtype) for each, like in zip(grads, (q, k, v), strict=True)]


def _whole_vectors(tensor: Tensor) -> Tensor:
    """Pad the features with zeros to a multiple of `FEATURE_STEP`."""
    more = -tensor.shape[-1] % FEATURE_STEP
    return F.pad(tensor, (0, more)) if more else tensor


def forward(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, rules: Rules) -> tuple[Tensor, Tensor]:
    """Return y, and for each query the logarithm of the sum of the exponentials of its scores, -inf without keys.

    Args:
        q: `[batch, heads, queries, features]` in float32 or float64; features are a multiple of `FEATURE_STEP`, and q
            is scaled.
        k, v: `[batch, key heads, keys, features]`, as q.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    common, query_shape, y_shape, _, _ = _common(q, k, v, layout, rules)
    y, log_sum = workspace.empty(y_shape, q.dtype, q.device), q.new_empty(query_shape)
    cpu_core.core().attention_forward(
        **common, y=address("y", y, y_shape, q.dtype), log_sum=address("log_sum", log_sum, query_shape, q.dtype)
    )
    return y, log_sum


def rows_of_call(layout: BlockLayout, rules: Rules, queries: int) -> tuple[BlockLayout, Rules]:
    """Return the rows of a layout that the queries of a call need, and the rules for these."""
    if rules.row == 0:
        return layout, rules
    height = layout.block_shape[0]
    first = rules.row // height
    return layout[first : -(-(rules.row + queries) // height)], rules._replace(row=rules.row - first * height)


def backward(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor, grad: Tensor, grad_lse: Tensor | None,
    layout: BlockLayout, rules: Rules, needed: Sequence[bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of q, k and v from that of y; None for q if it is not needed, for k and v if neither is."""
    q, k, v, grad, log_sum = (tensor.contiguous() for tensor in (q, k, v, grad, log_sum))
    common, query_shape, y_shape, layout, _ = _common(q, k, v, layout, rules)
    check_tensors(q.dtype, q.device, y=(y, y_shape), grad=(grad, y_shape))
    delta = (grad * y).sum(-1)
    if grad_lse is not None:
        check_tensors(q.dtype, q.device, grad_lse=(grad_lse, query_shape))
        delta = delta - grad_lse
    # The core computes the gradients of keys and values together; address 0 means that it skips one.
    keys = needed[1] or needed[2]
    grad_q, grad_k, grad_v = (
        workspace.empty_like(tensor) if need else None for tensor, need in ((q, needed[0]), (k, keys), (v, keys))
    )
    start, row = _columns(layout)
    cpu_core.core().attention_backward(
        **common, grad=address("grad", grad, y_shape, q.dtype),
        log_sum=address("log_sum", log_sum, query_shape, q.dtype),
        delta=address("delta", delta, query_shape, q.dtype), column_start=start, row=row,
        grad_q=address("grad_q", grad_q, tuple(q.shape), q.dtype),
        grad_k=address("grad_k", grad_k, tuple(k.shape), q.dtype),
        grad_v=address("grad_v", grad_v, tuple(v.shape), q.dtype),
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _common(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, rules: Rules
) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...], BlockLayout, Tensor | None]:
    """Return the arguments that both passes share, the shape of a number per query, and the shape of y.

    Also return the rows of the layout, and the spans, which must live until the core has read them.
    """
    check_int32(layout)
    if q.dtype not in (torch.float32, torch.float64):
        raise BlockSparseError.expected("q", "torch.float32 or torch.float64", q.dtype)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or tensor.shape[-1] % FEATURE_STEP:
            expected = f"[batch, heads, tokens, a multiple of {FEATURE_STEP}]"
            raise BlockSparseError.expected(name, expected, list(tensor.shape))
    (batch, heads, queries, d), (_, kv_heads, keys, d_v) = q.shape, v.shape
    layout, rules = rows_of_call(layout, rules, queries)
    spans = spans_of(rules, queries, keys, q.device)
    batches = 0 if spans is None else spans.shape[1]
    start, col = rows_of_blocks(layout)
    common = {
        "isa": cpu_core.isa(),
        "dtype": cpu_core.DTYPES[q.dtype],
        "sizes": (batch, heads, kv_heads, queries, keys, d, d_v, *layout.block_shape, rules.row),
        "qkv": (
            address("q", q, (batch, heads, queries, d), q.dtype),
            address("k", k, (batch, kv_heads, keys, d), q.dtype),
            address("v", v, (batch, kv_heads, keys, d_v), q.dtype),
        ),
        "spans": (address("spans", spans, (2, batches, queries), torch.int32), batches),
        "softcap": rules.softcap,
        "seed": 0 if rules.seed is None else int(rules.seed),
        "drop_below": rules.drop_below,
        "start": start,
        "col": col,
    }
    return common, (batch, heads, queries), (batch, heads, queries, d_v), layout, spans


def _columns(layout: BlockLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return the start of each column of blocks, int64, and the row of each block, int32."""
    return layout.derived("attention columns", lambda: rows_of_blocks(layout.T))
