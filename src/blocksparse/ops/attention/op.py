"""The backends of attention, and PyTorch's op for attention in compiled graphs.

The graph holds the layouts as index tensors, as for `registry.LayoutOp`, and the backward pass computes the forward
pass again. Eager calls do not use PyTorch's op, so that their backward pass need not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...layout import BlockLayout
from ..graph_layout import pack_layouts, unpack_layouts
from ..registry import Op
from ..torch_op import LIBRARY, define_op
from . import cpu, gathered, reference, triton

# Gathered rows serve every device.
ATTENTION = Op("attention", triton, cpu, reference, fallback=gathered)


def in_graph(q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], causal: bool, scale: float) -> Tensor:
    """Return attention through PyTorch's op."""
    indices, sizes_of_layouts = pack_layouts(layouts, q.device)
    y: Tensor = torch.ops.blocksparse.attention(q, k, v, indices, sizes_of_layouts, causal, scale)
    return y


def _layouts(indices: Sequence[Tensor], sizes: Sequence[int]) -> list[BlockLayout]:
    return [layout for layout in unpack_layouts(indices, sizes) if layout is not None]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Sequence[Tensor], sizes: Sequence[int], causal: bool, scale: float
) -> Tensor:
    y: Tensor = ATTENTION.on(q.device, q.dtype).attention(q, k, v, _layouts(indices, sizes), causal, scale)
    return y.contiguous()


def _attention_meta(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, indices: Sequence[Tensor], sizes: Sequence[int], causal: bool,
    scale: float,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, computed per distinct layout."""
    run: Callable[..., Sequence[Tensor]] = cpu.gradients
    if cpu.unsupported_reason(q.device, q.dtype):
        run = gathered.gradients
    heads: dict[BlockLayout, list[int]] = {}
    for head, layout in enumerate(_layouts(indices, sizes)):
        heads.setdefault(layout, []).append(head)
    if len(heads) == 1:
        (layout,) = heads
        return [each.contiguous() for each in run(q, k, v, grad, layout, causal, scale)]
    grads = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v)]
    for layout, same in heads.items():
        own = run(q[:, same], k[:, same], v[:, same], grad[:, same], layout, causal, scale)
        for whole, part in zip(grads, own, strict=True):
            whole[:, same] = part
    return grads


def _attention_backward_meta(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in (q, k, v)]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    """Save the tensors for the backward pass of a graph."""
    q, k, v, indices, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *indices)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of the op's arguments; differentiable if gradients are enabled."""
    q, k, v, *indices = ctx.saved_tensors
    if torch.is_grad_enabled():
        grads = _differentiable(q, k, v, grad, _layouts(indices, ctx.rest[0]), *ctx.rest[1:])
    else:
        grads = torch.ops.blocksparse.attention_backward(q, k, v, grad, indices, *ctx.rest)
    return *grads, [None] * len(indices), None, None, None


def _differentiable(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, layouts: list[BlockLayout], causal: bool, scale: float
) -> list[Tensor | None]:
    """Return gradients that can be differentiated again."""
    inputs = [each for each in (q, k, v) if each.requires_grad]
    # Only this kernel of PyTorch can be differentiated twice.
    with sdpa_kernel(SDPBackend.MATH):
        y = gathered.attention(q, k, v, layouts, causal, scale)
    results = iter(torch.autograd.grad(y, inputs, grad, create_graph=True, materialize_grads=True))
    return [next(results) if each.requires_grad else None for each in (q, k, v)]


_QKV, _REST = "Tensor q, Tensor k, Tensor v", "Tensor[] indices, SymInt[] sizes_of_layouts, bool causal, float scale"
define_op(f"attention({_QKV}, {_REST}) -> Tensor", _attention, _attention_meta)
define_op(
    f"attention_backward({_QKV}, Tensor grad, {_REST}) -> Tensor[]", _attention_backward, _attention_backward_meta
)
torch.library.register_autograd("blocksparse::attention", _backward, setup_context=_keep, lib=LIBRARY)
