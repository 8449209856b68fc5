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

    That is a GRU. The plain kinds are h = tanh(a + h W^T + b), or relu of that.

    The layout is that of W, `[3 hidden, hidden]` or `[hidden, hidden]`; None if it is dense. The tensors are a, the
    products of the inputs `[rows, gates * hidden]`; h `[batch, hidden]`; W; b or None. The outputs are y
    `[rows, hidden]` and the final h.
    """

    kind: str
    states = (1,)

    def definition(self, pre: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        def step(of_input: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            return next_state(self.kind, of_input, linear_of(h, weight, self.layouts[0], bias), None, h), c

        return unrolled(self.steps, step, (pre,), h, h)[:2]

    def forward(
        self, pre: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, *, keep: bool
    ) -> tuple[tuple[Tensor, ...], Tensors]:
        """Run all steps, in one call of the compiled core if it can; keep the states, and products of a GRU's."""
        steps, states = self.steps, StateTrajectory(self.steps, h)
        product = WeightProduct(weight, self.layouts[0], steps.batch)
        products = empty(steps.rows, pre.shape[1], pre) if keep and self.kind == "gru" else None
        if (in_core := core_weights([product])) is not None:
            of_core = states.all_before, states.all_after, None if steps.aligned else states.final
            cpu.hidden_forward(in_core, steps, self.kind, pre, None, bias, of_core, products)
        else:
            inputs = pre.split(steps.sizes)
            for t in steps.order:
                into = None if products is None else products[steps.start[t] : steps.start[t + 1]]
                of_state = product.forward(states.before[t], out=into)
                states.after[t].copy_(next_state(self.kind, inputs[t], of_state, bias, states.before[t]))
                if not steps.aligned:
                    states.advance(t)
        # `.data`, because autograd would take y for a view, and refuse writes into it.
        y = empty(steps.rows, h.shape[1], h).copy_(states.all_after) if keep else states.all_after.data
        return (y, states.final.clone()), (products, states.all_before, states.all_after) if keep else ()

    def backward(self, tensors: Any, saved: Any, grads: tuple[Tensor, ...], needed: Sequence[bool]) -> Tensors:
        """Return the gradients: back in time to those of the products, then one product for the weight."""
        (pre, _, weight, bias), (_, before, _) = tensors, saved
        product = WeightProduct(weight, self.layouts[0], self.steps.batch)
        if (in_core := core_weights([product])) is not None:
            at_inputs, at_states, grad_h = cpu.hidden_backward(in_core, self.steps, self.kind, pre, bias, saved, *grads)
        else:
            at_inputs, at_states, grad_h = self._back_in_time(product, pre, bias, saved, grads)
        grad_weight = product.wgrad(at_states, before) if needed[2] else None
        return at_inputs, grad_h, grad_weight, at_states.sum(0) if needed[3] else None

    def _back_in_time(
        self, product: WeightProduct, pre: Tensor, bias: Tensor | None, saved: Any, grads: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients at the products of inputs and states, and at the initial h; see `cpu.hidden_backward`.

        The slopes of all steps are computed at once, so that little is left for each step.
        """
        steps, (products, before, after), (grad_y, grad_h) = self.steps, saved, grads
        slope_n: Tensor | None = None
        by_h: Tensor | None = None
        if self.kind == "gru":
            slopes, slope_n, by_h = gru_slopes(pre, products, bias, before)
        else:
            slopes = (after > 0).to(after.dtype) if self.kind == "relu" else 1 - after * after
        at_h, at_states, dh = torch.empty_like(grad_y), torch.empty_like(pre), StateGradient(steps, grad_h)
        parts = (-1, pre.shape[1] // before.shape[1], before.shape[1])
        for t in reversed(steps.order):
            rows = slice(*steps.start[t : t + 2])
            torch.add(dh.at(t), grad_y[rows], out=at_h[rows])
            torch.mul(slopes[rows].view(parts), at_h[rows, None], out=at_states[rows].view(parts))
            grad = product.dgrad(at_states[rows])
            dh.set(t, grad if by_h is None else grad.addcmul_(at_h[rows], by_h[rows]))
        if slope_n is None:
            return at_states, at_states, dh.initial
        # In n, r multiplies the product of the state, and not that of the input.
        at_inputs = torch.cat([at_states[:, : -at_h.shape[1]], at_h * slope_n], 1)
        return at_inputs, at_states, dh.initial


class GRU(Hidden):
    kind = "gru"


class TanhRNN(Hidden):
    kind = "tanh"


class ReluRNN(Hidden):
    kind = "relu"


HIDDEN: dict[str, type[Hidden]] = {each.kind: each for each in (GRU, TanhRNN, ReluRNN)}


def next_state(kind: str, of_input: Tensor, of_state: Tensor, bias: Tensor | None, h: Tensor) -> Tensor:
    """Return the next h from the products of input and state, gates side by side, and the bias of the latter."""
    of_state = of_state if bias is None else of_state + bias
    if kind != "gru":
        return (torch.tanh if kind == "tanh" else torch.relu)(of_input + of_state)
    (r, z, n), (hr, hz, hn) = of_input.chunk(3, 1), of_state.chunk(3, 1)
    n = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    return n + torch.sigmoid(z + hz) * (h - n)


def gru_slopes(of_input: Tensor, of_state: Tensor, bias: Tensor | None, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the derivatives of the next h of a GRU by `of_state`, by the last third of `of_input`, and by h."""
    of_state = of_state if bias is None else of_state + bias
    (r, z, n), (hr, hz, hn) = of_input.chunk(3, 1), of_state.chunk(3, 1)
    r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
    n = torch.tanh(n + r * hn)
    by_n = (1 - z) * (1 - n * n)
    return torch.cat([by_n * hn * r * (1 - r), (h - n) * z * (1 - z), by_n * r], 1), by_n, z


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
    states = None, y, final
    cpu.hidden_forward(in_core, steps, kind, pre, index, bias if bias is None else bias.contiguous(), states)
    return y, final
