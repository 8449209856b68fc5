"""Block-sparse attention on the CPU: the forward and the backward pass are one call of the compiled core each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import BlockSparseError
from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..checks import accumulator, check_tensors
from ..cpu_core import address
from ..cpu_plan import check_int32
from ..registry import can_bypass_dispatcher, needs_grad
from ..torch_op import call_per_batched_grad
from . import gathered

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


def attention(q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], causal: bool, scale: float) -> Tensor:
    pytorch_is_faster = q.dtype == torch.bfloat16 and cpu_core.isa() in BFLOAT16_ISAS
    if pytorch_is_faster or layouts[0].block_shape[1] < MIN_BLOCK_KEYS or not can_bypass_dispatcher(q, k, v):
        return gathered.attention(q, k, v, layouts, causal, scale)
    return gathered.by_layout(q, k, v, layouts, partial(_of_layout, causal, scale))


def _of_layout(causal: bool, scale: float, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> Tensor:
    """Return attention of heads that share this layout."""
    if gathered.is_dense(layout, scale):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    dtype, d_v = q.dtype, v.shape[-1]
    q, k, v = (_whole_vectors(tensor.to(accumulator(dtype))) for tensor in (q, k, v))
    q = q * scale
    if needs_grad(q, k, v):
        recorded: Callable[..., Tensor] = _Attention.apply
        y = recorded(layout, causal, q, k, v)
    else:
        y, _ = forward(q, k, v, layout, causal)
    return (y if y.shape[-1] == d_v else y[..., :d_v]).to(dtype)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, layout: BlockLayout, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v from that of y, without autograd."""
    q_, k_, v_, grad_ = (_whole_vectors(each.to(accumulator(q.dtype))) for each in (q, k, v, grad))
    q_ = q_ * scale
    y, log_sum = forward(q_, k_, v_, layout, causal)
    grads = [each for each in backward(q_, k_, v_, y, log_sum, grad_, layout, causal) if each is not None]
    grads[0] = grads[0] * scale
    return tuple(each[..., : like.shape[-1]].to(like.dtype) for each, like in zip(grads, (q, k, v), strict=True))


def _whole_vectors(tensor: Tensor) -> Tensor:
    """Pad the features with zeros to a multiple of `FEATURE_STEP`."""
    more = -tensor.shape[-1] % FEATURE_STEP
    return F.pad(tensor, (0, more)) if more else tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: BlockLayout, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, log_sum = forward(q, k, v, layout, causal)
        ctx.layout, ctx.causal = layout, causal
        ctx.save_for_backward(q, k, v, y, log_sum)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, y, log_sum = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]

        def gradients(grad: Tensor) -> Sequence[Tensor | None]:
            if torch.is_grad_enabled() or not can_bypass_dispatcher(grad):
                return _differentiable(q, k, v, ctx.layout, ctx.causal, grad)
            return backward(q, k, v, y, log_sum, grad, ctx.layout, ctx.causal, needed)

        return None, None, *call_per_batched_grad(gradients, grad)


def _differentiable(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, causal: bool, grad: Tensor
) -> Sequence[Tensor | None]:
    """Return the gradients, computed by operations that autograd can differentiate again."""
    create_graph = torch.is_grad_enabled()
    inputs = [tensor for tensor in (q, k, v) if tensor.requires_grad]
    # Only this kernel of PyTorch can be differentiated twice.
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        y = gathered.attention(q, k, v, [layout], causal, 1.0)
    grads = iter(torch.autograd.grad(y, inputs, grad, create_graph=create_graph, materialize_grads=True))
    return [next(grads) if tensor.requires_grad else None for tensor in (q, k, v)]


def forward(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, causal: bool) -> tuple[Tensor, Tensor]:
    """Return y, and for each query the logarithm of the sum of the exponentials of its scores.

    Args:
        q, k, v: `[batch, heads, queries or keys, features]` in float32 or float64; features are a multiple of
            `FEATURE_STEP`, and q is scaled.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    common, query_shape, y_shape = _common(q, k, v, layout, causal)
    y, log_sum = workspace.empty(y_shape, q.dtype, q.device), q.new_empty(query_shape)
    cpu_core.core().attention_forward(
        **common, y=address("y", y, y_shape, q.dtype), log_sum=address("log_sum", log_sum, query_shape, q.dtype)
    )
    return y, log_sum


def backward(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, log_sum: Tensor, grad: Tensor, layout: BlockLayout, causal: bool,
    needed: Sequence[bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of q, k and v from that of y; None for q if it is not needed, for k and v if neither is."""
    q, k, v, grad, log_sum = (tensor.contiguous() for tensor in (q, k, v, grad, log_sum))
    common, query_shape, y_shape = _common(q, k, v, layout, causal)
    check_tensors(q.dtype, q.device, y=(y, y_shape), grad=(grad, y_shape))
    delta = (grad * y).sum(-1)
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
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, causal: bool
) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """Return the arguments that both passes share, the shape of a number per query, and the shape of y."""
    check_int32(layout)
    if q.dtype not in (torch.float32, torch.float64):
        raise BlockSparseError.expected("q", "torch.float32 or torch.float64", q.dtype)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or tensor.shape[-1] % FEATURE_STEP:
            expected = f"[batch, heads, tokens, a multiple of {FEATURE_STEP}]"
            raise BlockSparseError.expected(name, expected, list(tensor.shape))
    (batch, heads, _, d), d_v, (queries, keys) = q.shape, v.shape[-1], layout.shape
    start, col = _rows(layout)
    common = {
        "isa": cpu_core.isa(),
        "dtype": cpu_core.DTYPES[q.dtype],
        "sizes": (batch * heads, queries, keys, d, d_v, *layout.block_shape),
        "causal": causal,
        "q": address("q", q, (batch, heads, queries, d), q.dtype),
        "k": address("k", k, (batch, heads, keys, d), q.dtype),
        "v": address("v", v, (batch, heads, keys, d_v), q.dtype),
        "start": start,
        "col": col,
    }
    return common, (batch, heads, queries), (batch, heads, queries, d_v)


def _rows(layout: BlockLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return the start of each row of blocks, int64, and the column of each block, int32."""
    return layout.derived(
        "attention rows", lambda: (layout.row_start.astype(np.int64), layout.col_of_block.astype(np.int32))
    )


def _columns(layout: BlockLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return the start of each column of blocks, int64, and the row of each block, int32."""
    return layout.derived("attention columns", lambda: _rows(layout.T))
