"""The backends of attention, and PyTorch's op for attention in compiled graphs.

The graph holds the layouts as index tensors, as for `registry.LayoutOp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...layout import BlockLayout
from ..checks import accumulator
from ..graph_layout import is_exporting, pack_layouts, unpack_layouts
from ..registry import Op
from ..torch_op import LIBRARY, define_op
from . import cpu, gathered, reference, triton
from .node import differentiable_gradients
from .rules import Rules

# Gathered rows serve every device.
ATTENTION = Op("attention", triton, cpu, reference, fallback=gathered)


def runs_as_op(backend: Any, q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> bool:
    """Return whether a compiled graph has PyTorch's op for a call, and not the operations of the backend.

    Exported graphs use PyTorch's own operations, so that other runtimes can run them.
    """
    if backend is triton:
        return triton.uses_kernels(q, k, v, rules)
    return backend is gathered and not is_exporting()


def in_graph(q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], rules: Rules) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp through PyTorch's op."""
    indices, sizes_of_layouts = pack_layouts(layouts, q.device)
    left, right = (-1 if each is None else each for each in (rules.left, rules.right))
    numbers = (rules.row, left, right, rules.scale, rules.softcap, rules.dropout)
    y, lse = torch.ops.blocksparse.attention(q, k, v, rules.spans, rules.seed, indices, sizes_of_layouts, *numbers)
    return y, lse


def _layouts(indices: Sequence[Tensor], sizes: Sequence[int]) -> list[BlockLayout]:
    return [layout for layout in unpack_layouts(indices, sizes) if layout is not None]


def _rules(
    spans: Tensor | None, seed: Tensor | None, row: int, left: int, right: int, scale: float, softcap: float,
    dropout: float,
) -> Rules:  # fmt: skip
    before, after = (None if each < 0 else each for each in (left, right))
    return Rules(row, before, after, spans, scale, softcap, dropout, seed)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None, seed: Tensor | None, indices: Sequence[Tensor],
    sizes: Sequence[int], *numbers: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rules = _rules(spans, seed, *numbers)
    y, lse = ATTENTION.on(q.device, q.dtype).attention(q, k, v, _layouts(indices, sizes), rules, return_lse=True)
    return y.contiguous(), lse.contiguous()


def _attention_meta(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=accumulator(q.dtype))


def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor, spans: Tensor | None,
    seed: Tensor | None, indices: Sequence[Tensor], sizes: Sequence[int], *numbers: Any,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, computed per distinct layout."""
    rules, layouts = _rules(spans, seed, *numbers), _layouts(indices, sizes)
    run: Callable[..., Sequence[Tensor]] = gathered.gradients
    if ATTENTION.on(q.device, q.dtype) is triton and triton.can_serve(q, v, rules):
        run = triton.gradients
    elif not cpu.unsupported_reason(q.device, q.dtype):
        run = cpu.gradients
    of_queries = y, lse, grad, grad_lse
    groups = gathered.heads_by_layout(layouts)
    if len(groups) == 1:
        return [each.contiguous() for each in run(q, k, v, *of_queries, layouts[0], rules)]
    grads = [torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (q, k, v)]
    for group, (layout, heads) in enumerate(groups.items()):
        own = [each[:, heads] for each in of_queries]
        parts = run(*gathered.select_heads(q, k, v, heads), *own, layout, gathered.rules_of_group(rules, group))
        for whole, part in zip(grads, parts, strict=True):
            of_whole = torch.tensor([head * whole.shape[1] // q.shape[1] for head in heads], device=q.device)
            whole.index_add_(1, of_whole, part)
    return grads


def _attention_backward_meta(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in (q, k, v)]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    """Save the tensors for the backward pass of a graph."""
    q, k, v, spans, seed, indices, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, spans, seed, *indices)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    """Return the gradients of the op's arguments; differentiable if gradients are enabled."""
    q, k, v, y, lse, spans, seed, *indices = ctx.saved_tensors
    if torch.is_grad_enabled():
        sizes, *numbers = ctx.rest
        rules = _rules(spans, seed, *numbers)
        grads = differentiable_gradients(q, k, v, _layouts(indices, sizes), rules, grad, grad_lse)
    else:
        grads = torch.ops.blocksparse.attention_backward(
            q, k, v, y, lse, grad, grad_lse, spans, seed, indices, *ctx.rest
        )
    return *grads, None, None, [None] * len(indices), *[None] * len(ctx.rest)


_QKV, _OPTIONAL = "Tensor q, Tensor k, Tensor v", "Tensor? spans, Tensor? seed"
_REST = (
    "Tensor[] indices, SymInt[] sizes_of_layouts, SymInt row, SymInt left, SymInt right, float scale, float softcap, "
    "float dropout"
)
_OF_QUERIES = "Tensor y, Tensor lse, Tensor grad, Tensor grad_lse"
define_op(f"attention({_QKV}, {_OPTIONAL}, {_REST}) -> (Tensor, Tensor)", _attention, _attention_meta)
define_op(
    f"attention_backward({_QKV}, {_OF_QUERIES}, {_OPTIONAL}, {_REST}) -> Tensor[]",
    _attention_backward,
    _attention_backward_meta,
)
torch.library.register_autograd("blocksparse::attention", _backward, setup_context=_keep, lib=LIBRARY)
