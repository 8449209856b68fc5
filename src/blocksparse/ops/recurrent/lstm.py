"""The recurrence of the LSTM; one product serves the inputs of all steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...layout import BlockLayout
from .. import workspace
from ..lstm_gates import LSTM_GATES
from . import cpu
from .op import (
    StateGradient,
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
from .recurrence import Recurrence, Steps, Tensors, Times


class LSTM(Recurrence):
    """i, f, g, o = x V^T + b + h W^T;  c = sig(f) c + sig(i) tanh(g);  h = sig(o) tanh(c), or its projection.

    Args:
        layouts: of V `[4 hidden, input]`, of W `[4 hidden, output]`, and if h is projected, of the projection's weight
            `[output, hidden]`.

    The tensors are x `[rows, input]` and None, or a table x `[n, input]` and the index `[rows]` of each row in it (the
    inputs' product is then that of the table only); h `[batch, output]`, c `[batch, hidden]`; V; b `[4 hidden]` or
    None; W; the projection's weight, if any. The outputs are y `[rows, output]` and the final h and c.
    """

    def definition(
        self, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, input_weight: Tensor, bias: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        input_layout, *layouts = self.layouts

        def step(z: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            h, c = gates(z + linear_of(h, weights[0], layouts[0]), c)
            return (linear_of(h, weights[1], layouts[1]) if len(weights) == 2 else h), c

        inputs = linear_of(x, input_weight, input_layout, bias)
        return unrolled(self.steps, step, (gather_rows(inputs, index),), h, c)

    def forward(
        self, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, input_weight: Tensor, bias: Tensor | None,
        *weights: Tensor, keep: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
        """Run all steps: the inputs' product once, then per step the product of h, the gates and the projection.

        If the compiled core can, it runs all steps in one call.
        """
        steps = self.steps
        recurrent, *projection = products(weights, self.layouts[1:], steps)
        hs, cs = StateTrajectory(steps, h), StateTrajectory(steps, c)
        pre = empty(len(x), 4 * c.shape[1], x)
        WeightProduct(input_weight, self.layouts[0], len(x)).forward(x, bias, out=pre)
        # Without an index, the activated gates overwrite the product of the inputs.
        gates = None
        if keep:
            gates = pre if index is None else empty(steps.rows, pre.shape[1], x)
        raw = empty(steps.rows, c.shape[1], x) if projection else hs.all_after
        in_core = None if projection else core_weights([recurrent])
        if in_core is not None:
            cpu.forward(in_core, steps, pre, index, hs, cs, gates)
            return outputs(hs, cs, keep), () if gates is None else (gates, cs.all_before, cs.all_after, hs.all_before)
        activated, left = None if gates is None else gates.split(steps.sizes), raw.split(steps.sizes)
        step = forward_step(recurrent, StepInputs(steps, pre, index), c)
        for t in steps.order:
            into = None if activated is None else activated[t]
            step(t, hs.before[t], cs.before[t], h_out=left[t], c_out=cs.after[t], gates_out=into)
            if projection:
                projection[0].forward(left[t], out=hs.after[t])
            if not steps.aligned:
                hs.advance(t)
                cs.advance(t)
        saved = () if gates is None else (gates, cs.all_before, cs.all_after, hs.all_before)
        return outputs(hs, cs, keep), (*saved, raw) if projection else saved

    def backward(
        self, tensors: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...], needed: Sequence[bool]
    ) -> Tensors:
        """Return the gradients: back in time to those of the gates' inputs, then one product per weight."""
        steps, (x, index, _, _, input_weight, _, *weights) = self.steps, tensors
        *states, h_before = saved[:4]
        recurrent, *projection = products(weights, self.layouts[1:], steps)
        projected = [torch.empty_like(grads[0]) for _ in projection]

        def at_gates(t: int, grad_h: Tensor, grad_y: Tensor) -> Tensor:
            into = projected[0][steps.start[t] : steps.start[t + 1]]
            return projection[0].dgrad(torch.add(grad_h, grad_y, out=into))

        in_core = None if projection else core_weights([recurrent])
        if in_core is not None:
            grad_pre, grad_h, grad_c = cpu.backward(in_core, steps, states, grads)
        else:
            grad_pre, grad_h, grad_c = back_in_time(
                steps, states, grads, lambda t, grad: recurrent.dgrad(grad), at_gates if projection else None
            )
        grad_x, grad_input_weight, grad_bias = WeightProduct(input_weight, self.layouts[0], len(x)).backward(
            scatter_add_rows(grad_pre, x, index), x, needed[0], needed[5]
        )
        grad_weights = [recurrent.wgrad(grad_pre, h_before)]
        grad_weights += [product.wgrad(grad, saved[4]) for product, grad in zip(projection, projected, strict=True)]
        return grad_x, None, grad_h, grad_c, grad_input_weight, grad_bias, *grad_weights


def products(weights: Sequence[Tensor], layouts: Sequence[BlockLayout | None], steps: Steps) -> list[WeightProduct]:
    """Return the products of a step with these weights."""
    return [WeightProduct(weight, layout, steps.batch) for weight, layout in zip(weights, layouts, strict=True)]


def back_in_time(
    steps: Steps,
    saved: Sequence[Tensor],
    grads: Sequence[Tensor],
    at_state: Callable[[int, Tensor], Tensor],
    at_gates: Callable[[int, Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients at the gates' inputs of all steps, and at the initial h and c.

    Args:
        steps: the time steps.
        saved: the activated gates, and c before and after each step.
        grads: the gradients at y and at the final h and c.
        at_state: maps t and the gradient at the gates' inputs of step t to the gradient at the h before step t.
        at_gates: maps t and the gradients at the state and at y to the gradient at the h of the gates; by default their
            sum.
    """
    grad_y, grad_h, grad_c = grads
    grad_pre = workspace.empty_like(saved[0])
    dh, dc = StateGradient(steps, grad_h), grad_c.clone()
    views = [each.split(steps.sizes) for each in (*saved, grad_y.contiguous(), grad_pre)]
    run = LSTM_GATES.on(saved[0].device, saved[0].dtype).backward
    for t in reversed(steps.order):
        activated, before, after, from_y, into = (view[t] for view in views)
        from_h, grad_state = dh.at(t), dc[: steps.sizes[t]]
        pair = (from_h, from_y) if at_gates is None else (at_gates(t, from_h, from_y), None)
        run(activated, before, after, *pair, grad_state, grad_pre_out=into, grad_c_out=grad_state)
        dh.set(t, at_state(t, into))
    return grad_pre, dh.initial, dc


def gates(pre: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return h and c from the gates' inputs and the c before, by the definition of the LSTM."""
    i, f, g, o = pre.to(c.dtype).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return (torch.sigmoid(o) * torch.tanh(c)).to(pre.dtype), c


def outputs(hs: StateTrajectory, cs: StateTrajectory, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return y and the final states. Users write into results, so they share no memory with what backward needs.

    Args:
        hs, cs: h and c before and after each step.
        keep: whether backward needs `hs` and `cs`; if so, y is a copy.
    """
    if not keep:  # `.data`, because autograd would take y for a view, and refuse writes into it
        c = cs.final if cs.final is cs.all_after else cs.final.clone()
        return hs.all_after.data, hs.final.clone(), c
    rows, features = hs.all_after.shape
    y = empty(rows, features, hs.all_after).copy_(hs.all_after)
    return y, hs.final.clone(), cs.final.clone()


def unrolled(
    steps: Steps | Times, step: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Call `step(*inputs of t, h, c) -> h, c` for one step after the other, and return y and the final states."""
    steps = steps.to_steps() if isinstance(steps, Times) else steps
    cut = [each.split(steps.sizes) for each in inputs]
    ys: dict[int, Tensor] = {}
    for t in steps.order:
        size = steps.sizes[t]
        # States of sequences that have ended, or not begun, do not change.
        new_h, new_c = step(*(each[t] for each in cut), h[:size], c[:size])
        h, c = torch.cat([new_h, h[size:]]), torch.cat([new_c, c[size:]])
        ys[t] = new_h
    return torch.cat([ys[t] for t in range(len(ys))]), h, c
