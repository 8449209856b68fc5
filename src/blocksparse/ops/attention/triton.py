"""Block-sparse attention on a GPU: PyTorch's FlexAttention, or Triton kernels within `use_backend("triton")`.

No GPU has run the kernels yet, so nobody gets them unasked. FlexAttention needs tiles of 128 for gradients, and a mask
that depends on data would be compiled once per call; such calls gather the keys of each row. The kernels work in blocks
of the layout, and read the keys that a query sees as two numbers per query.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...layout import BlockLayout
from ..checks import accumulator, contiguous_features
from ..gpu import runtime
from ..gpu.runtime import Launch, cdiv, check_fits, common, keep_for_stream, stream_of
from ..gpu.tiles import forced, forced_tile, gpu_of, power_of_two
from ..graph_layout import is_exporting
from ..registry import can_bypass_dispatcher, is_forced, needs_grad
from . import gathered
from .flex import compiled_flex, flex
from .gathered import Result
from .gpu_plan import heads_of_tile, rule, tables
from .node import Passes
from .rules import Rules, spans_of

# Features of a head that fit in the registers of a program.
MAX_FEATURES = 256
# A layout caches its launches, up to this number; decoding makes one per token.
MAX_LAUNCHES = 64
LOG2_E = 1.4426950408889634


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why neither FlexAttention nor the kernels can serve these tensors, or None if one of them can."""
    if dtype == torch.float64:
        return "attention on a GPU does not serve torch.float64"
    return None if device.type == "cuda" else _no_kernels_reason(device, dtype)


def _no_kernels_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot serve tensors of this device and dtype, or None if they can."""
    return runtime.unsupported_reason(device, dtype)


# Dynamo cannot trace questions to the driver.
_no_kernels_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attention(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], rules: Rules, return_lse: bool = False
) -> Result:
    if uses_kernels(q, k, v, rules):
        if len({layout.block_shape for layout in layouts}) == 1:
            return _by_kernels(q, k, v, layouts, rules, return_lse)
        return gathered.by_layout(q, k, v, layouts, rules, return_lse, _of_layout)
    # FlexAttention drops no weights.
    if return_lse or rules.dropout or rules.spans is not None or q.device.type != "cuda":
        return gathered.attention(q, k, v, layouts, rules, return_lse)
    return flex(q, k, v, layouts, rules, compiled_flex()), None


def uses_kernels(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> bool:
    """Return whether a call runs the kernels: within `use_backend`, if they can serve it."""
    if not is_forced() or not can_serve(q, v, rules):
        return False
    return not is_exporting() if torch.compiler.is_compiling() else can_bypass_dispatcher(q, k, v)


def can_serve(q: Tensor, v: Tensor, rules: Rules) -> bool:
    """Return whether the kernels can compute attention of these tensors."""
    fits = max(q.shape[-1], v.shape[-1]) <= MAX_FEATURES and q.dtype != torch.float64
    return fits and not rules.dropout and _no_kernels_reason(q.device, q.dtype) is None


def _of_layout(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, rules: Rules, return_lse: bool) -> Result:
    return _by_kernels(q, k, v, [layout], rules, return_lse)


def _by_kernels(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], rules: Rules, return_lse: bool
) -> Result:
    """Return attention on one layout for all heads, or one per head with the same blocks."""
    if needs_grad(q, k, v):
        of_call: dict[str, Any] = {"layouts": layouts, "rules": rules}
        y, lse = Passes(partial(forward, **of_call), partial(backward, **of_call), layouts, rules).recorded(q, k, v)
    else:
        y, lse = forward(q, k, v, layouts, rules)
    return y, lse if return_lse else None


# -- passes --------------------------------------------------------------------------------------------------------


def forward(q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], rules: Rules) -> tuple[Tensor, Tensor]:
    """Return y, and for each query the logarithm of the sum of the exponentials of its scores, -inf without keys."""
    y = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=accumulator(q.dtype), device=q.device)
    _run("forward", (q, k, v), (), (y, lse), layouts, rules)
    return y, lse


def gradients(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None,
    layout: BlockLayout, rules: Rules,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of q, k and v from those of y and of its log-sum-exp, without autograd."""
    return [each for each in backward(q, k, v, y, lse, grad, grad_lse, [layout], rules) if each is not None]


def backward(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None,
    layouts: Sequence[BlockLayout], rules: Rules, needed: Sequence[bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of q, k and v; None for q if it is not needed, for k and v if neither is."""
    delta = (grad.to(lse.dtype) * y.to(lse.dtype)).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    sums = contiguous_features(grad), lse.contiguous(), delta.contiguous()
    keys = needed[1] or needed[2]
    grad_q, grad_k, grad_v = (
        torch.empty(each.shape, dtype=each.dtype, device=each.device) if need else None
        for each, need in ((q, needed[0]), (k, keys), (v, keys))
    )
    if grad_q is not None:
        _run("dq", (q, k, v), sums, (grad_q,), layouts, rules)
    if grad_k is not None and grad_v is not None:
        _run("dkv", (q, k, v), sums, (grad_k, grad_v), layouts, rules)
    return grad_q, grad_k, grad_v


def _run(
    pass_: str, qkv: tuple[Tensor, Tensor, Tensor], sums: tuple[Tensor, ...], outputs: tuple[Tensor, ...],
    layouts: Sequence[BlockLayout], rules: Rules,
) -> None:  # fmt: skip
    """Run a pass through its launch, which the first layout caches.

    Triton compiles for strides, and for addresses that are multiples of 16 bytes or not.
    """
    if not any(output.numel() for output in outputs):
        return
    qkv = tuple(map(contiguous_features, qkv))  # type: ignore[assignment]
    q, k, _ = qkv
    spans = spans_of(rules, q.shape[2], k.shape[2], q.device)
    spans = None if spans is None else spans.contiguous()
    tensors = *qkv, spans, *sums, *outputs
    kinds = [None if each is None else (each.shape, each.stride(), each.data_ptr() % 16 == 0) for each in tensors]
    key = (
        pass_, *layouts[1:], rules.row, rules.scale, rules.softcap, q.dtype, q.device, stream_of(q), *kinds,
        forced(q.dtype),
    )  # fmt: skip
    launches: dict[Any, Launch] = layouts[0].derived("attention launches", dict)
    launch = launches.get(key)
    if launch is None:
        if len(launches) >= MAX_LAUNCHES:
            launches.clear()
        launch = launches[key] = _plan_launch(pass_, qkv, spans, sums, len(tensors), layouts, rules)
        keep_for_stream(q.device, *launch.arguments)
    launch(*tensors)


# -- launches ------------------------------------------------------------------------------------------------------


def _plan_launch(
    pass_: str, qkv: tuple[Tensor, Tensor, Tensor], spans: Tensor | None, sums: tuple[Tensor, ...], tensors: int,
    layouts: Sequence[BlockLayout], rules: Rules,
) -> Launch:  # fmt: skip
    """Plan the launch of a pass with this number of tensors."""
    from . import kernels

    q, k, v = qkv
    (batch, heads, queries, d), (kv_heads, keys, d_v) = q.shape, v.shape[1:]
    check_fits("q", "queries", queries)
    check_fits("k", "keys", keys)
    height, width = layouts[0].block_shape
    by_keys, per_head, group = pass_ == "dkv", len(layouts) > 1, heads // kv_heads
    side, features = (width if by_keys else height), tuple(max(power_of_two(size), 16) for size in (d, d_v))
    sharing = 1 if per_head else group
    tile = forced_tile(f"attention {pass_}") or rule(pass_, q.dtype, side, sharing, max(features), gpu_of(q.device))
    start, order, col = _tables_on(layouts, by_keys, q.device)
    first, end = rules.row // height, cdiv(rules.row + queries, height)
    in_tile = 1 if by_keys else heads_of_tile(tile, height, sharing)
    if by_keys:
        programs = batch * kv_heads * layouts[0].grid[1] * cdiv(width, tile.block_m)
    else:
        programs = batch * (heads // in_tile) * (end - first) * cdiv(height, tile.block_m // in_tile)
    softcap, scale = rules.softcap, rules.scale
    arguments = {
        "order_ptr": order if by_keys or end - first == layouts[0].grid[0] else None, "start_ptr": start,
        "col_ptr": col, "row_ptr": col, "heads": heads, "queries": queries, "keys": keys, "rows": end - first,
        "first_row": first, "block_rows": layouts[0].grid[0], "columns": layouts[0].grid[1], "skipped": rules.row,
        "span_batch": spans.stride(1) if spans is not None and spans.shape[1] > 1 else 0,
        "span_end": 0 if spans is None else spans.stride(0),
        **_strides("q", q), **_strides("k", k), **_strides("v", v), **(_strides("grad", sums[0]) if sums else {}),
        "inner": scale / softcap if softcap else scale * LOG2_E, "outer": softcap * LOG2_E, "scale": scale,
        "height": height, "width": width, "d": d, "d_v": d_v, "D": features[0], "D_V": features[1], "GROUP": group,
        "HEADS": in_tile, "PER_HEAD": per_head, "SOFTCAP": softcap != 0, **common(q.dtype, tile),
    }  # fmt: skip
    return Launch(getattr(kernels, f"attention_{pass_}_kernel"), (programs, 1, 1), tensors, arguments, tile)


def _strides(name: str, tensor: Tensor) -> dict[str, int]:
    """Return the strides of a tensor `[batch, heads, tokens, features]` as arguments of a kernel."""
    return dict(zip((f"{name}_batch", f"{name}_head", f"{name}_token"), tensor.stride(), strict=False))


def _tables_on(layouts: Sequence[BlockLayout], transpose: bool, device: torch.device) -> list[Tensor]:
    """Return the tables of `gpu_plan.tables` on a device, cached in the first layout."""

    def build() -> list[Tensor]:
        with torch.inference_mode(False):
            return [torch.from_numpy(array).to(device) for array in tables(layouts, transpose)]

    key = ("attention tables", transpose, device, *layouts[1:])
    found: list[Tensor] = layouts[0].derived(key, build)
    return found
