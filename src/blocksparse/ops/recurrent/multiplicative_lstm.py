"""The recurrence of the multiplicative LSTM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import workspace
from . import cpu
from .lstm import back_in_time, gates, outputs, products, unrolled
from .op import (
    StateTrajectory,
    StepInputs,
    WeightProduct,
    core_weights,
    empty,
    forward_step,
    gather_rows,
    linear_of,
    scatter_add_rows,
)
from .recurrence import Recurrence, Tensors


class MultiplicativeLSTM(Recurrence):
    """m = x U^T * h M^T;  i, f, g, o = x V^T + b + m W^T;  c = sig(f) c + sig(i) tanh(g);  h = sig(o) tanh(c).

    Args:
        layouts: of V `[4 hidden, input]`, U `[hidden, input]`, W `[4 hidden, hidden]` and M `[hidden, hidden]`.

    The tensors are x `[rows, input]` and None, or a table x `[n, input]` and the index `[rows]` of each row in it; h
    and c `[batch, hidden]`; V; b `[4 hidden]` or None; U; W; M. The outputs are y `[rows, hidden]`, the final h and c.
    """

    def definition(
        self, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, input_weight: Tensor, bias: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        factor_weight, weight, state_weight = weights
        input_layout, factor_layout, layout, state_layout = self.layouts

        def step(z: Tensor, factor: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            m = factor * linear_of(h, state_weight, state_layout)
            return gates(z + linear_of(m, weight, layout), c)

        inputs = linear_of(x, input_weight, input_layout, bias), linear_of(x, factor_weight, factor_layout)
        return unrolled(self.steps, step, [gather_rows(each, index) for each in inputs], h, c)

    def forward(
        self, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, input_weight: Tensor, bias: Tensor | None,
        factor_weight: Tensor, weight: Tensor, state_weight: Tensor, *, keep: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
        """Run all steps: the inputs' products once, then per step h M^T, m, m W^T and the gates.

        If the compiled core can, it runs all steps in one call.
        """
        steps, hidden = self.steps, c.shape[1]
        product, state_product = products((weight, state_weight), self.layouts[2:], steps)
        hs, cs = StateTrajectory(steps, h), StateTrajectory(steps, c)
        pre, of_x = (empty(len(x), size, x) for size in (4 * hidden, hidden))
        WeightProduct(input_weight, self.layouts[0], len(x)).forward(x, bias, out=pre)
        WeightProduct(factor_weight, self.layouts[1], len(x)).forward(x, out=of_x)
        # Without an index, the activated gates overwrite the product of the inputs.
        gates = pre if index is None else empty(steps.rows, 4 * hidden, x)
        of_h, m = (empty(steps.rows, hidden, x) for _ in range(2))
        saved = (gates, cs.all_before, cs.all_after, of_x, of_h, m, hs.all_before) if keep else ()
        in_core = core_weights([product, state_product])
        if in_core is not None:
            terms = cpu.MultiplicativeTerms(of_x, of_h, m)
            cpu.forward(in_core, steps, pre, index, hs, cs, gates if keep else None, terms)
            return outputs(hs, cs, keep), saved
        views, factors = [each.split(steps.sizes) for each in (gates, of_h, m)], StepInputs(steps, of_x, index)
        step = forward_step(product, StepInputs(steps, pre, index), c)
        for t in steps.order:
            activated, state, m_t = (view[t] for view in views)
            state_product.forward(hs.before[t], out=state)
            torch.mul(factors[t], state, out=m_t)
            into = activated if keep else None
            step(t, m_t, cs.before[t], h_out=hs.after[t], c_out=cs.after[t], gates_out=into)
            if not steps.aligned:
                hs.advance(t)
                cs.advance(t)
        return outputs(hs, cs, keep), saved

    def backward(
        self, tensors: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...], needed: Sequence[bool]
    ) -> Tensors:
        """Return the gradients: back in time to those of the gates' inputs and of m, then one product per weight."""
        steps, (x, index, _, _, input_weight, _, factor_weight, *weights) = self.steps, tensors
        *states, of_x, of_h, m, h_before = saved
        product, state_product = products(weights, self.layouts[2:], steps)
        grad_of_x, grad_of_h = workspace.empty_like(of_h), workspace.empty_like(of_h)
        views = [each.split(steps.sizes) for each in (of_h, grad_of_x, grad_of_h)]
        factors = StepInputs(steps, of_x, index)

        def at_state(t: int, grad_z: Tensor) -> Tensor:
            state, grad_factor, grad_of_state = (view[t] for view in views)
            grad_m = product.dgrad(grad_z)
            torch.mul(grad_m, state, out=grad_factor)
            torch.mul(grad_m, factors[t], out=grad_of_state)
            return state_product.dgrad(grad_of_state)

        in_core = core_weights([product, state_product])
        if in_core is None:
            grad_pre, grad_h, grad_c = back_in_time(steps, states, grads, at_state)
        else:
            terms = cpu.MultiplicativeTerms(of_x, of_h, m)
            grad_pre, grad_h, grad_c = cpu.backward(in_core, steps, states, grads, index, terms, (grad_of_x, grad_of_h))
        grad_inputs, grad_factors = scatter_add_rows(grad_pre, x, index), scatter_add_rows(grad_of_x, x, index)
        of_inputs = WeightProduct(input_weight, self.layouts[0], len(x)).backward(grad_inputs, x, needed[0], needed[5])
        of_factors = WeightProduct(factor_weight, self.layouts[1], len(x)).backward(grad_factors, x, needed[0], False)
        grad_x = None if of_inputs[0] is None or of_factors[0] is None else of_inputs[0] + of_factors[0]
        grad_weights = product.wgrad(grad_pre, m), state_product.wgrad(grad_of_h, h_before)
        return grad_x, None, grad_h, grad_c, *of_inputs[1:], of_factors[1], *grad_weights
