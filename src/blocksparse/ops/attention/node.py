"""The autograd node of attention kernels; gradients of its gradients come from gathered rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...layout import BlockLayout
from ..registry import can_bypass_dispatcher
from ..torch_op import call_per_batched_grad
from . import gathered
from .rules import Rules


class Passes(NamedTuple):
    """The kernels of a call of attention.

    forward: returns y and its log-sum-exp from q, k and v.
    backward: returns the gradients of q, k and v from q, k, v, y, its log-sum-exp, the gradients of both (that of the
        log-sum-exp may be None), and which of the three are needed; others may be None.
    layouts, rules: those of the call, as in `gathered.attention`.
    """

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    backward: Callable[..., Sequence[Tensor | None]]
    layouts: Sequence[BlockLayout]
    rules: Rules

    def recorded(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and its log-sum-exp, recorded by autograd."""
        y, lse = _Node.apply(self, q, k, v)  # type: ignore[no-untyped-call]
        return y, lse


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: Passes, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y, lse = passes.forward(q, k, v)
        ctx.set_materialize_grads(False)
        ctx.passes = passes
        ctx.save_for_backward(q, k, v, y, lse)
        return y, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> Any:
        q, k, v, y, lse = ctx.saved_tensors
        passes: Passes = ctx.passes
        needed = ctx.needs_input_grad[1:]
        if grad is None:
            grad = torch.zeros_like(y)

        def gradients(grad: Tensor, *more: Tensor) -> Sequence[Tensor | None]:
            if torch.is_grad_enabled() or not can_bypass_dispatcher(grad, *more):
                return differentiable_gradients(q, k, v, passes.layouts, passes.rules, grad, *more)
            return passes.backward(q, k, v, y, lse, grad, more[0] if more else None, needed=needed)

        more = () if grad_lse is None else (grad_lse,)
        return None, *call_per_batched_grad(gradients, grad, *more)


def differentiable_gradients(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], rules: Rules, *grads: Tensor
) -> list[Tensor | None]:
    """Return the gradients of q, k and v by operations that autograd can differentiate again.

    `grads` are those of y and, if it is used, of its log-sum-exp.
    """
    create_graph = torch.is_grad_enabled()
    inputs = [tensor for tensor in (q, k, v) if tensor.requires_grad]
    # Only this kernel of PyTorch can be differentiated twice.
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        outputs = gathered.attention(q, k, v, layouts, rules, return_lse=len(grads) > 1)
    given = [output for output in outputs if output is not None]
    results = iter(torch.autograd.grad(given, inputs, grads, create_graph=create_graph, materialize_grads=True))
    return [next(results) if tensor.requires_grad else None for tensor in (q, k, v)]
