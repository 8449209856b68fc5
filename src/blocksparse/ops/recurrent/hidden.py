"""GRUs and plain recurrences. Without gradients, one call of the compiled core runs all steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...layout import BlockLayout
from ..registry import can_bypass_dispatcher, needs_grad
from . import cpu
from .lstm import unrolled
from .op import StateGradient, StateTrajectory, WeightProduct, core_weights, empty, linear_of
from .recurrence import Recurrence, Steps, Tensors, Times


class Hidden(Recurrence):
    """A recurrence without a state c: h = n + z (h - n), with r, z = sig(a + h W^T + b), n = tanh(a + r (h W^T + b)).

    The plain kinds are h = tanh(a + h W^T + b) or relu of that.

    Args:
        kind: "gru", "tanh" or "relu".
        layout: of W, `[3 hidden, hidden]` or `[hidden, hidden]`; None if it is dense.

    The tensors are a, the products of the inputs `[rows, gates * hidden]`; h `[batch, hidden]`; W; b or None. The
    outputs are y `[rows, hidden]` and the final h.
    """

    def __init__(self, steps: Steps | Times, kind: str, layout: BlockLayout | None) -> None:
        super().__init__(steps, layout)
        self.kind = kind

    def definition(self, pre: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        def step(of_input: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            return next_state(self.kind, of_input, linear_of(h, weight, self.layouts[0], bias), h)[0], c

        return unrolled(self.steps, step, (pre,), h, h)[:2]

    def forward(
        self, pre: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, *, keep: bool
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        steps, states = self.steps, StateTrajectory(self.steps, h)
        product, inputs = WeightProduct(weight, self.layouts[0], steps.batch), pre.split(steps.sizes)
        kept: dict[int, Tensor] = {}
        for t in steps.order:
            of_state = product.forward(states.before[t], bias)
            new, *activated = next_state(self.kind, inputs[t], of_state, states.before[t])
            states.after[t].copy_(new)
            if keep:
                kept[t] = torch.cat(activated, 1)
            if not steps.aligned:
                states.advance(t)
        y = states.all_after.clone()
        saved = (torch.cat([kept[t] for t in range(len(kept))]), states.all_before) if keep else ()
        return (y, states.final.clone()), saved

    def backward(
        self, tensors: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...], needed: Sequence[bool]
    ) -> Tensors:
        """Return the gradients: back in time to those of the products, then one product for the weight."""
        (pre, _, weight, _), (kept, before) = tensors, saved
        steps, product = self.steps, WeightProduct(weight, self.layouts[0], self.steps.batch)
        grad_y, grad_h = grads
        dh = StateGradient(steps, grad_h)
        grad_pre = torch.empty_like(pre)
        grad_state = torch.empty_like(pre) if self.kind == "gru" else grad_pre
        views = [each.split(steps.sizes) for each in (kept, before, grad_y, grad_pre, grad_state)]
        for t in reversed(steps.order):
            activated, h, from_y, into_pre, into_state = (view[t] for view in views)
            grad = dh.at(t) + from_y
            if self.kind == "gru":
                r, z, n, state_n = activated.chunk(4, 1)
                grad_r, grad_z, grad_n = into_pre.chunk(3, 1)
                torch.mul(grad * (1 - z), 1 - n * n, out=grad_n)
                torch.mul(grad * (h - n), z * (1 - z), out=grad_z)
                torch.mul(grad_n * state_n, r * (1 - r), out=grad_r)
                into_state.copy_(into_pre)
                into_state.chunk(3, 1)[2].mul_(r)
                dh.set(t, product.dgrad(into_state) + grad * z)
            else:
                slope = (activated > 0).to(grad.dtype) if self.kind == "relu" else 1 - activated * activated
                torch.mul(grad, slope, out=into_pre)
                dh.set(t, product.dgrad(into_pre))
        grad_weight = product.wgrad(grad_state, before) if needed[2] else None
        return grad_pre, dh.initial, grad_weight, grad_state.sum(0) if needed[3] else None


def next_state(kind: str, of_input: Tensor, of_state: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """Return the next h from the products of input and state, gates side by side, and what the backward pass needs."""
    if kind != "gru":
        new = (torch.tanh if kind == "tanh" else torch.relu)(of_input + of_state)
        return new, new
    (r, z, n), (hr, hz, hn) = of_input.chunk(3, 1), of_state.chunk(3, 1)
    r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
    n = torch.tanh(n + r * hn)
    return n + z * (h - n), r, z, n, hn


def hidden_states(
    steps: Steps | Times, kind: str, pre: Tensor, index: Tensor | None, h: Tensor, weight: Tensor,
    layout: BlockLayout | None, bias: Tensor | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Return y `[rows, hidden]` and the final h, or None if the core cannot run the call or autograd records it.

    Args:
        steps: the time steps.
        kind: "gru", "tanh" or "relu".
        pre: `[rows, gates * hidden]`, the products of the inputs, or with an index a table of such rows.
        index: `[rows]`, the row of `pre` for each row, or None.
        h: `[batch, hidden]`, the initial states.
        weight, layout, bias: of the product of the state; without a layout the weight is dense.
    """
    tensors = pre, index, h, weight, bias
    if isinstance(steps, Times) or needs_grad(*tensors) or not can_bypass_dispatcher(*tensors):
        return None
    in_core = core_weights([WeightProduct(weight, layout, steps.batch)])
    if in_core is None:
        return None
    y, final = empty(steps.rows, h.shape[1], h), h.clone(memory_format=torch.contiguous_format)
    cpu.hidden_forward(in_core, steps, kind, pre, index, bias if bias is None else bias.contiguous(), y, final)
    return y, final
