"""The recurrence of the multiplicative LSTM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...layout import BlockLayout
from .. import workspace
from ..lstm_gates import LSTM_GATES
from .lstm import gates, outputs, unrolled
from .op import (
    Product,
    Rows,
    StateGradient,
    Trajectory,
    empty,
    forward_step,
    gather_rows,
    linear_of,
    scatter_add_rows,
)
from .recurrence import Steps, Tensors


@dataclass(frozen=True)
class MultiplicativeLSTM:
    """m = x U^T * h M^T;  i, f, g, o = x V^T + b + m W^T;  c = sig(f) c + sig(i) tanh(g);  h = sig(o) tanh(c).

    Args:
        steps: of the sequences.
        input_layout: of V `[4 hidden, input]`; None if it is dense, and so the others.
        factor_layout: of U `[hidden, input]`.
        layout: of W `[4 hidden, hidden]`.
        state_layout: of M `[hidden, hidden]`.

    The tensors: x `[rows, input]`, index None, or a table x `[n, input]` and the index `[rows]` of each row in it; h
    and c `[batch, hidden]`; V; b `[4 hidden]` or None; U; W; M. The outputs: y `[rows, hidden]`; the final h and c.
    """

    steps: Steps
    input_layout: BlockLayout | None = None
    factor_layout: BlockLayout | None = None
    layout: BlockLayout | None = None
    state_layout: BlockLayout | None = None

    states = 2, 3

    @property
    def layouts(self) -> tuple[BlockLayout | None, ...]:
        return self.input_layout, self.factor_layout, self.layout, self.state_layout

    @classmethod
    def made(cls, steps: Any, layouts: Sequence[BlockLayout | None]) -> MultiplicativeLSTM:
        return cls(steps, *layouts)

    def definition(
        self, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, input_weight: Tensor, bias: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        factor_weight, weight, state_weight = weights

        def step(z: Tensor, factor: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            m = factor * linear_of(h, state_weight, self.state_layout)
            return gates(z + linear_of(m, weight, self.layout), c)

        inputs = linear_of(x, input_weight, self.input_layout, bias), linear_of(x, factor_weight, self.factor_layout)
        return unrolled(self.steps, step, [gather_rows(each, index) for each in inputs], h, c)

    def forward(
        self, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, input_weight: Tensor, bias: Tensor | None,
        factor_weight: Tensor, weight: Tensor, state_weight: Tensor, *, keep: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
        steps, hidden = self.steps, c.shape[1]
        product = Product(weight, self.layout, steps.batch)
        state_product = Product(state_weight, self.state_layout, steps.batch)
        hs, cs = Trajectory(steps, h), Trajectory(steps, c)
        pre, of_x = (empty(len(x), size, x) for size in (4 * hidden, hidden))
        Product(input_weight, self.input_layout, len(x)).forward(x, bias, out=pre)
        Product(factor_weight, self.factor_layout, len(x)).forward(x, out=of_x)
        inputs, factors = Rows(steps, pre, index), Rows(steps, of_x, index)
        # The activated gates take the place of the inputs' product where there is one of each row.
        gates = pre if index is None else empty(steps.rows, 4 * hidden, x)
        of_h, m = (empty(steps.rows, hidden, x) for _ in range(2))
        views = [each.split(steps.sizes) for each in (gates, of_h, m)]
        step = forward_step(product, inputs, c)
        for t in steps.order:
            activated, state, multiplied = (view[t] for view in views)
            state_product.forward(hs.before[t], out=state)
            torch.mul(factors[t], state, out=multiplied)
            into = activated if keep else None
            step(t, multiplied, cs.before[t], h_out=hs.after[t], c_out=cs.after[t], gates_out=into)
            if not steps.aligned:
                hs.advance(t)
                cs.advance(t)
        kept = gates, of_x, of_h, m, hs.all_before, cs.all_before, cs.all_after
        return outputs(hs, cs), kept if keep else ()

    def backward(
        self, tensors: Any, kept: tuple[Tensor, ...], grads: tuple[Tensor, ...], needed: Sequence[bool]
    ) -> Tensors:
        steps, (x, index, _, _, input_weight, _, factor_weight, weight, state_weight) = self.steps, tensors
        gates, of_x, of_h, m, h_before, c_before, c_after = kept
        grad_y, grad_h, grad_c = grads
        product = Product(weight, self.layout, steps.batch)
        state_product = Product(state_weight, self.state_layout, steps.batch)
        grad_pre = workspace.empty_like(gates)
        grad_of_x, grad_of_h = workspace.empty_like(of_h), workspace.empty_like(of_h)
        dh, dc = StateGradient(steps, grad_h), grad_c.clone()
        views = [each.split(steps.sizes) for each in (gates, c_before, c_after, grad_y.contiguous(), grad_pre)]
        factor_views = [each.split(steps.sizes) for each in (of_h, grad_of_x, grad_of_h)]
        factors = Rows(steps, of_x, index)
        run = LSTM_GATES.on(gates.device, gates.dtype).backward
        for t in reversed(steps.order):
            activated, before, after, from_y, grad_z = (view[t] for view in views)
            state, grad_factor, grad_of_state = (view[t] for view in factor_views)
            grad_state = dc[: steps.sizes[t]]
            run(activated, before, after, dh.at(t), from_y, grad_state, grad_pre_out=grad_z, grad_c_out=grad_state)
            grad_m = product.dgrad(grad_z)
            torch.mul(grad_m, state, out=grad_factor)
            torch.mul(grad_m, factors[t], out=grad_of_state)
            dh.set(t, state_product.dgrad(grad_of_state))
        grad_inputs, grad_factors = scatter_add_rows(grad_pre, x, index), scatter_add_rows(grad_of_x, x, index)
        of_inputs = Product(input_weight, self.input_layout, len(x)).backward(grad_inputs, x, needed[0], needed[5])
        of_factors = Product(factor_weight, self.factor_layout, len(x)).backward(grad_factors, x, needed[0], False)
        grad_x = None if of_inputs[0] is None or of_factors[0] is None else of_inputs[0] + of_factors[0]
        grad_weights = product.wgrad(grad_pre, m), state_product.wgrad(grad_of_h, h_before)
        return grad_x, None, dh.initial, dc, *of_inputs[1:], of_factors[1], *grad_weights
