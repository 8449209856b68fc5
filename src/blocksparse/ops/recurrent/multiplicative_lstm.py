"""The recurrence of the multiplicative LSTM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...layout import BlockLayout
from .. import lstm_gates
from .lstm import gates, unrolled
from .product import Product, linear_of
from .steps import Returning, Steps, Trajectory


@dataclass(frozen=True)
class MultiplicativeLSTM:
    """m = factors * (h Wm^T);  i, f, g, o = inputs + m W^T;  c = sig(f) c + sig(i) tanh(g);  h = sig(o) tanh(c).

    Args:
        steps: of the sequences.
        layout: of W `[4 hidden, hidden]`; None if it is dense.
        factor_layout: of Wm `[hidden, hidden]`; None if it is dense.

    The tensors: inputs `[rows, 4 hidden]` with their bias; factors `[rows, hidden]`, those of the inputs; h and c
    `[batch, hidden]`; W; Wm. The outputs: y `[rows, hidden]`; the final h and c.
    """

    steps: Steps
    layout: BlockLayout | None
    factor_layout: BlockLayout | None

    def definition(self, inputs: Tensor, factors: Tensor, h: Tensor, c: Tensor, weight: Tensor, factor_weight: Tensor):
        def step(z: Tensor, factor: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            m = factor * linear_of(h, factor_weight, self.factor_layout)
            return gates(z + linear_of(m, weight, self.layout), c)

        return unrolled(self.steps, step, (inputs, factors), h, c)

    def forward(self, inputs, factors, h, c, weight, factor_weight, *, keep):
        steps = self.steps
        product, factor_product = (
            Product(weight, self.layout, steps.batch),
            Product(factor_weight, self.factor_layout, steps.batch),
        )
        hs, cs = Trajectory(steps, h), Trajectory(steps, c)
        # Of the state, times the inputs' factors.
        of_state, multiplied = torch.empty_like(factors), torch.empty_like(factors)
        activated = torch.empty_like(inputs) if keep else None
        views = [steps.cut(each) for each in (inputs, factors, of_state, multiplied)]
        activated_views = steps.cut(activated) if keep else [None] * len(steps.sizes)
        run = lstm_gates.backend_for(inputs.device, inputs.dtype).forward
        for t in steps.order:
            add, factor, s, m = (view[t] for view in views)
            s.copy_(factor_product.forward(hs.before[t]))
            torch.mul(factor, s, out=m)
            z = product.forward(m)
            run(z, add, None, cs.before[t], h_out=hs.after[t], c_out=cs.after[t], gates_out=activated_views[t])
            hs.advance(t)
            cs.advance(t)
        outputs = hs.all_after, hs.final.clone(), cs.final.clone()
        if not keep:
            return outputs, ()
        return outputs, (activated, of_state, multiplied, hs.all_before, cs.all_before, cs.all_after)

    def backward(self, tensors, kept, grads):
        steps = self.steps
        _, factors, _, _, weight, factor_weight = tensors
        activated, of_state, multiplied, h_before, c_before, c_after = kept
        grad_y, grad_h, grad_c = grads
        product, factor_product = (
            Product(weight, self.layout, steps.batch),
            Product(factor_weight, self.factor_layout, steps.batch),
        )
        grad_inputs = torch.empty_like(activated)
        grad_factors, grad_of_state = torch.empty_like(factors), torch.empty_like(factors)
        dh, dc = Returning(steps, grad_h), grad_c.clone()
        everything = activated, c_before, c_after, grad_y.contiguous(), grad_inputs
        views = [steps.cut(each) for each in everything]
        factor_views = [steps.cut(each) for each in (factors, of_state, grad_factors, grad_of_state)]
        run = lstm_gates.backend_for(activated.device, activated.dtype).backward
        for t in reversed(steps.order):
            active, before, after, grad_output, grad_z = (view[t] for view in views)
            factor, s, grad_factor, grad_s = (view[t] for view in factor_views)
            carried = dc[: steps.sizes[t]]
            run(active, before, after, dh.at(t), grad_output, carried, grad_pre_out=grad_z, grad_c_out=carried)
            grad_m = product.dgrad(grad_z)
            torch.mul(grad_m, s, out=grad_factor)
            torch.mul(grad_m, factor, out=grad_s)
            dh.set(t, factor_product.dgrad(grad_s))
        grad_weight = product.wgrad(grad_inputs, multiplied)
        grad_factor_weight = factor_product.wgrad(grad_of_state, h_before)
        return grad_inputs, grad_factors, dh.initial, dc, grad_weight, grad_factor_weight
