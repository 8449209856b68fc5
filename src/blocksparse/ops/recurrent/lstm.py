"""The recurrence of the LSTM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...layout import BlockLayout
from .. import lstm_gates
from .product import Product, linear_of
from .steps import Returning, Steps, Trajectory


@dataclass(frozen=True)
class LSTM:
    """i, f, g, o = inputs + h W^T;  c = sig(f) c + sig(i) tanh(g);  h = sig(o) tanh(c), or its projection.

    Args:
        steps: of the sequences.
        layout: of the recurrent weight `[4 hidden, output]`; None if it is dense.
        projection: of the weight `[output, hidden]` that h is projected with; None if it is dense.

    The tensors: inputs `[rows, 4 hidden]` with their bias; h `[batch, output]`, c `[batch, hidden]`; the recurrent
    weight; the projection's, if there is one. The outputs: y `[rows, output]`; the final h and c.
    """

    steps: Steps
    layout: BlockLayout | None
    projection: BlockLayout | None = None

    def definition(self, inputs: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        def step(z: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            h, c = gates(z + linear_of(h, weights[0], self.layout), c)
            return (linear_of(h, weights[1], self.projection) if len(weights) == 2 else h), c

        return unrolled(self.steps, step, (inputs,), h, c)

    def forward(self, inputs: Tensor, h: Tensor, c: Tensor, *weights: Tensor, keep: bool):
        steps, hidden = self.steps, c.shape[1]
        recurrent, *projection = self._products(weights)
        hs, cs = Trajectory(steps, h), Trajectory(steps, c)
        gates = inputs.new_empty(inputs.shape) if keep else None
        raw = inputs.new_empty(steps.rows, hidden) if projection else hs.all_after
        add, left = steps.cut(inputs), steps.cut(raw)
        activated = steps.cut(gates) if keep else [None] * len(steps.sizes)
        run = lstm_gates.backend_for(inputs.device, inputs.dtype).forward
        for t in steps.order:
            z = recurrent.forward(hs.before[t])
            run(z, add[t], None, cs.before[t], h_out=left[t], c_out=cs.after[t], gates_out=activated[t])
            cs.advance(t)
            if projection:
                hs.after[t].copy_(projection[0].forward(left[t]))
            hs.advance(t)
        outputs = hs.all_after, hs.final.clone(), cs.final.clone()
        if not keep:
            return outputs, ()
        return outputs, (gates, hs.all_before, cs.all_before, cs.all_after, *([raw] if projection else ()))

    def backward(self, tensors, kept, grads):
        steps, weights = self.steps, tensors[3:]
        gates, h_before, c_before, c_after, *raw = kept
        grad_y, grad_h, grad_c = grads
        recurrent, *projection = self._products(weights)
        grad_inputs = torch.empty_like(gates)
        grad_projected = torch.empty_like(grad_y) if projection else None
        dh, dc = Returning(steps, grad_h), grad_c.clone()
        views = [steps.cut(each) for each in (gates, c_before, c_after, grad_y.contiguous(), grad_inputs)]
        run = lstm_gates.backend_for(gates.device, gates.dtype).backward
        for t in reversed(steps.order):
            activated, before, after, grad_output, grad_z = (view[t] for view in views)
            grad, size = dh.at(t), steps.sizes[t]
            if projection:
                into = steps.cut(grad_projected)[t]
                torch.add(grad, grad_output, out=into)
                grad, grad_output = projection[0].dgrad(into), None
            carried = dc[:size]
            run(activated, before, after, grad, grad_output, carried, grad_pre_out=grad_z, grad_c_out=carried)
            dh.set(t, recurrent.dgrad(grad_z))
        grad_weights = [recurrent.wgrad(grad_inputs, h_before)]
        if projection:
            grad_weights.append(projection[0].wgrad(grad_projected, raw[0]))
        return grad_inputs, dh.initial, dc, *grad_weights

    def _products(self, weights: tuple[Tensor, ...]) -> list[Product]:
        return [
            Product(weight, layout, self.steps.batch)
            for weight, layout in zip(weights, (self.layout, self.projection), strict=False)
        ]


def gates(pre: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The LSTM's last part, as a definition: h and c from the gates before their activation, and the c before."""
    i, f, g, o = pre.to(c.dtype).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return (torch.sigmoid(o) * torch.tanh(c)).to(pre.dtype), c


def unrolled(steps: Steps, step, inputs: tuple[Tensor, ...], h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of `step(*inputs of t, h, c) -> h, c`, called for one step after the other."""
    cut = [steps.cut(each) for each in inputs]
    ys: dict[int, Tensor] = {}
    for t in steps.order:
        size = steps.sizes[t]
        # Of sequences that are over, or yet to come, the state stays.
        new_h, new_c = step(*(each[t] for each in cut), h[:size], c[:size])
        h, c = torch.cat([new_h, h[size:]]), torch.cat([new_c, c[size:]])
        ys[t] = new_h
    return torch.cat([ys[t] for t in range(len(ys))]), h, c
