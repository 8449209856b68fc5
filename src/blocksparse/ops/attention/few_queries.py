"""Attention of a few queries on the CPU, as in decoding: one call of the core, which reads keys and values in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from .. import cpu_core
from ..checks import accumulator
from ..cpu_core import address, strided_address
from ..cpu_plan import check_int32
from ..registry import can_bypass_dispatcher, needs_grad
from .gathered import Result
from .rules import Rules

# With more queries, the products are large enough to be worth copying keys and values.
MAX_QUERIES = 8
# Types of the options that two calls can have in common.
_NUMBER = (float, int, type(None))


class Plan(NamedTuple):
    """The core's function with all arguments that are not addresses, and the shapes of the operands and of y."""

    run: Callable[..., None]
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    y: tuple[int, ...]


def serves(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> bool:
    """Return whether this module can compute attention of these tensors, which need no dispatcher."""
    small = q.shape[2] <= MAX_QUERIES and q.numel() > 0 and v.numel() > 0
    return small and not (rules.dropout or needs_grad(q, k, v))


def attention(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, rules: Rules, return_lse: bool = False) -> Result:
    """Return attention without gradients of heads that share this layout; `serves` says for which calls."""
    return _run(q, k, v, _plan(q, k, v, layout, rules), rules.spans, return_lse)


def repeated(q: Any, k: Any, v: Any, layout: Any, *options: Any) -> Tensor | None:
    """Return attention if the last call on this layout had the same shapes and options, else None.

    So do the layers of a model when they decode a token. The checks of such a call would take longer than reading a
    short window.
    """
    if type(layout) is not BlockLayout or type(options[0]) is not bool:  # 1 equals True
        return None
    if not can_bypass_dispatcher(q, k, v, plain_call=True) or needs_grad(q, k, v):
        return None
    last: dict[str, tuple[Any, Plan]] = layout.derived("few queries", dict)
    key, plan = last.get("call", (None, None))
    if plan is None or not q.is_cpu or key != _key(q, k, v, *options):
        return None
    return _run(q, k, v, plan, None, return_lse=False)[0]


def record(q: Tensor, k: Tensor, v: Tensor, layout: Any, rules: Rules, *options: Any) -> None:
    """Store the plan of a call for `repeated`, if this module served it."""
    causal, scale, window_size, softcap = options
    plain = type(causal) is bool and type(scale) in _NUMBER and type(softcap) in _NUMBER and rules.spans is None
    if (
        plain
        and (window_size is None or type(window_size) is tuple)
        and type(layout) is BlockLayout
        and can_bypass_dispatcher(q, k, v, plain_call=True)
        and cpu_core.unsupported_reason(q.device, q.dtype) is None
        and serves(q, k, v, rules)
    ):
        last: dict[str, tuple[Any, Plan]] = layout.derived("few queries", dict)
        # One assignment, so that a thread never sees the key of one call and the plan of another.
        last["call"] = _key(q, k, v, *options), _plan(q, k, v, layout, rules)


def _key(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Any, ...]:
    return q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, cpu_core.isa(), *options


def _plan(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, rules: Rules) -> Plan:
    check_int32(layout)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise BlockSparseError.expected(name, "[batch, heads, tokens, features]", list(tensor.shape))
    (batch, heads, queries, d), (_, kv_heads, keys, d_v) = q.shape, v.shape
    left, right = (-1 if each is None else each for each in (rules.left, rules.right))
    start, col = rows_of_blocks(layout)
    run = partial(
        cpu_core.core().attention_few_queries,
        isa=cpu_core.isa(),
        dtype=cpu_core.DTYPES[q.dtype],
        sizes=(batch, heads, kv_heads, queries, keys, d, d_v, *layout.block_shape, rules.row, left, right),
        scale=rules.scale,
        softcap=rules.softcap,
        start=start,
        col=col,
    )
    return Plan(run, tuple(q.shape), (batch, kv_heads, keys, d), tuple(v.shape), (batch, heads, queries, d_v))


def _run(q: Tensor, k: Tensor, v: Tensor, plan: Plan, spans: Tensor | None, return_lse: bool) -> Result:
    dtype, batches = q.dtype, 0 if spans is None else spans.shape[1]
    q, k, v = q.contiguous(), _with_contiguous_features(k), _with_contiguous_features(v)
    spans = None if spans is None else spans.contiguous()
    y = q.new_empty(plan.y)
    log_sum = q.new_empty(plan.y[:3], dtype=accumulator(dtype)) if return_lse else None
    plan.run(
        q=address("q", q, plan.q, dtype),
        k=strided_address("k", k, plan.k, dtype),
        v=strided_address("v", v, plan.v, dtype),
        spans=(address("spans", spans, (2, batches, plan.q[2]), torch.int32), batches),
        y=y.data_ptr(),
        log_sum=0 if log_sum is None else log_sum.data_ptr(),
    )
    return y, log_sum


def _with_contiguous_features(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def rows_of_blocks(layout: BlockLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return the start of each row of blocks, int64, and the column of each block, int32."""
    return layout.derived(
        "attention rows", lambda: (layout.row_start.astype(np.int64), layout.col_of_block.astype(np.int32))
    )
