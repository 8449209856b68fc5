"""The recurrence of the LSTM, with a product for the inputs of all steps, or with one per step for input and state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...convert import block_coordinates
from ...layout import BlockLayout
from .. import workspace
from ..linear import LINEAR
from ..lstm_gates import LSTM_GATES
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
from .recurrence import Steps, Tensors, Times


@dataclass(frozen=True)
class LSTM:
    """i, f, g, o = x V^T + b + h W^T;  c = sig(f) c + sig(i) tanh(g);  h = sig(o) tanh(c), or its projection.

    Args:
        steps: of the sequences.
        input_layout: of V `[4 hidden, input]`; None if it is dense, and so the others.
        layout: of W `[4 hidden, output]`.
        projection: of the weight `[output, hidden]` that h is projected with.

    The tensors: x `[rows, input]`, index None, or a table x `[n, input]` and the index `[rows]` of each row in it, so
    that the inputs' product is that of the table only; h `[batch, output]`, c `[batch, hidden]`; V; b `[4 hidden]` or
    None; W; the projection's weight, if there is one. The outputs: y `[rows, output]`; the final h and c.
    """

    steps: Steps
    input_layout: BlockLayout | None = None
    layout: BlockLayout | None = None
    projection: BlockLayout | None = None

    states = 2, 3

    @property
    def layouts(self) -> tuple[BlockLayout | None, ...]:
        return self.input_layout, self.layout, self.projection

    @classmethod
    def made(cls, steps: Any, layouts: Sequence[BlockLayout | None]) -> LSTM:
        return cls(steps, *layouts)

    def definition(
        self, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, input_weight: Tensor, bias: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        def step(z: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            h, c = gates(z + linear_of(h, weights[0], self.layout), c)
            return (linear_of(h, weights[1], self.projection) if len(weights) == 2 else h), c

        inputs = linear_of(x, input_weight, self.input_layout, bias)
        return unrolled(self.steps, step, (gather_rows(inputs, index),), h, c)

    def forward(
        self, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, input_weight: Tensor, bias: Tensor | None,
        *weights: Tensor, keep: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
        steps = self.steps
        recurrent, *projection = self._products(weights)
        hs, cs = Trajectory(steps, h), Trajectory(steps, c)
        pre = empty(len(x), 4 * c.shape[1], x)
        Product(input_weight, self.input_layout, len(x)).forward(x, bias, out=pre)
        inputs = Rows(steps, pre, index)
        # The activated gates take the place of the inputs' product where there is one of each row.
        gates = pre if index is None else empty(steps.rows, pre.shape[1], x)
        raw = empty(steps.rows, c.shape[1], x) if projection else hs.all_after
        activated, left = gates.split(steps.sizes), raw.split(steps.sizes)
        step = forward_step(recurrent, inputs, c)
        for t in steps.order:
            into = activated[t] if keep else None
            step(t, hs.before[t], cs.before[t], h_out=left[t], c_out=cs.after[t], gates_out=into)
            if projection:
                projection[0].forward(left[t], out=hs.after[t])
            if not steps.aligned:
                hs.advance(t)
                cs.advance(t)
        kept = (gates, hs.all_before, cs.all_before, cs.all_after, *([raw] if projection else ()))
        return outputs(hs, cs), kept if keep else ()

    def backward(
        self, tensors: Any, kept: tuple[Tensor, ...], grads: tuple[Tensor, ...], needed: Sequence[bool]
    ) -> Tensors:
        steps, (x, index, _, _, input_weight, _, *weights) = self.steps, tensors
        gates, h_before, c_before, c_after, *raw = kept
        grad_y, grad_h, grad_c = grads
        recurrent, *projection = self._products(weights)
        grad_pre = workspace.empty_like(gates)
        dh, dc = StateGradient(steps, grad_h), grad_c.clone()
        views = [each.split(steps.sizes) for each in (gates, c_before, c_after, grad_y.contiguous(), grad_pre)]
        if projection:
            grad_projected = torch.empty_like(grad_y)
            projected = grad_projected.split(steps.sizes)
        run = LSTM_GATES.on(gates.device, gates.dtype).backward
        for t in reversed(steps.order):
            activated, before, after, from_y, grad_z = (view[t] for view in views)
            from_h, grad_state = dh.at(t), dc[: steps.sizes[t]]
            if projection:
                torch.add(from_h, from_y, out=projected[t])
                from_h = projection[0].dgrad(projected[t])
            run(
                activated,
                before,
                after,
                from_h,
                None if projection else from_y,
                grad_state,
                grad_pre_out=grad_z,
                grad_c_out=grad_state,
            )
            dh.set(t, recurrent.dgrad(grad_z))
        of_inputs = Product(input_weight, self.input_layout, len(x)).backward(
            scatter_add_rows(grad_pre, x, index), x, needed[0], needed[5]
        )
        grad_x, grad_input_weight, grad_bias = of_inputs
        grad_weights = [recurrent.wgrad(grad_pre, h_before)]
        if projection:
            grad_weights.append(projection[0].wgrad(grad_projected, raw[0]))
        return grad_x, None, dh.initial, dc, grad_input_weight, grad_bias, *grad_weights

    def _products(self, weights: Sequence[Tensor]) -> list[Product]:
        layouts = (self.layout, self.projection)[: len(weights)]
        return [Product(weight, layout, self.steps.batch) for weight, layout in zip(weights, layouts, strict=True)]


@dataclass(frozen=True)
class JoinedLSTM(LSTM):
    """An LSTM without projection whose weights are both block-sparse: i, f, g, o = [x, h] [V, W]^T + b.

    With few blocks in a row, products are bound by the gates that they write and read. So there is one for both
    weights, forward and backward, and the gates before their activation are never in memory. The tensors are those of
    `LSTM`, without an index.
    """

    def forward(
        self, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, input_weight: Tensor, bias: Tensor | None,
        *weights: Tensor, keep: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
        steps = self.steps
        layout, order = _join(self.input_layout, self.layout, x.device)
        values = torch.cat([input_weight, weights[0]])[order]
        hs, cs = Trajectory(steps, h, x), Trajectory(steps, c)
        gates = empty(steps.rows if keep else 0, layout.shape[0], x)
        activated = gates.split(steps.sizes) if keep else [None] * len(steps.sizes)
        rows = hs.rows_before.split(steps.sizes)
        pre = x.new_empty(steps.batch, layout.shape[0])
        linear, run = LINEAR.on(x.device, x.dtype).linear, LSTM_GATES.on(x.device, x.dtype).forward
        for t in steps.order:
            z = linear(rows[t], values, None, layout, False, None, pre[: steps.sizes[t]])
            run(z, bias, None, cs.before[t], h_out=hs.after[t], c_out=cs.after[t], gates_out=activated[t])
            if not steps.aligned:
                hs.advance(t)
                cs.advance(t)
        kept = gates, values, hs.rows_before, cs.all_before, cs.all_after
        return outputs(hs, cs), kept if keep else ()

    def backward(
        self, tensors: Any, kept: tuple[Tensor, ...], grads: tuple[Tensor, ...], needed: Sequence[bool]
    ) -> Tensors:
        steps, (x, _, _, _, input_weight, *_) = self.steps, tensors
        gates, values, rows, c_before, c_after = kept
        grad_y, grad_h, grad_c = grads
        layout, order = _join(self.input_layout, self.layout, values.device)
        joined, inputs = Product(values, layout, steps.batch), x.shape[1]
        grad_pre, grad_x = workspace.empty_like(gates), workspace.empty_like(x)
        grad_bias = c_after.new_zeros(gates.shape[1]) if needed[5] else None
        dh, dc = StateGradient(steps, grad_h), grad_c.clone()
        views = [each.split(steps.sizes) for each in (gates, c_before, c_after, grad_y.contiguous(), grad_pre, grad_x)]
        run = LSTM_GATES.on(gates.device, gates.dtype).backward
        for t in reversed(steps.order):
            activated, before, after, from_y, grad_z, into = (view[t] for view in views)
            grad_state = dc[: steps.sizes[t]]
            run(activated, before, after, dh.at(t), from_y, grad_state, grad_pre_out=grad_z, grad_c_out=grad_state)
            grad = joined.dgrad(grad_z)
            into.copy_(grad[:, :inputs])
            dh.set(t, grad[:, inputs:])
            if grad_bias is not None:  # while it is in the cache
                grad_bias += grad_z.sum(0)
        grad_values = torch.empty_like(values)
        grad_values[order] = joined.wgrad(grad_pre, rows)
        grad_weights = grad_values.split([len(input_weight), len(values) - len(input_weight)])
        grad_bias = None if grad_bias is None else grad_bias.to(x.dtype)
        return grad_x, None, dh.initial, dc, grad_weights[0], grad_bias, grad_weights[1]


# Of the last pairs of layouts: both, joined, and the order. By identity, as hashing layouts takes as long as a step.
_joined: dict[tuple[int, int, torch.device], tuple[BlockLayout, BlockLayout, BlockLayout, Tensor]] = {}


def _join(left: Any, right: Any, device: torch.device) -> tuple[BlockLayout, Tensor]:
    """The layout of [left, right], and the place of each of its blocks among those of left and then right."""
    key = id(left), id(right), device
    found = _joined.get(key)
    if found is None:
        cpu = torch.device("cpu")
        (left_rows, left_cols), (right_rows, right_cols) = (block_coordinates(layout, cpu) for layout in (left, right))
        rows = np.concatenate([left_rows, right_rows])
        cols = np.concatenate([left_cols, right_cols + left.grid[1]])
        grid = left.grid[0], left.grid[1] + right.grid[1]
        order = np.lexsort((cols, rows))
        layout = BlockLayout.from_indices(rows[order], cols[order], grid, left.block_shape)
        if len(_joined) >= 64:
            _joined.clear()
        found = _joined[key] = left, right, layout, torch.from_numpy(order).to(device)
    return found[2:]


def gates(pre: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The LSTM's last part, as a definition: h and c from the gates before their activation, and the c before."""
    i, f, g, o = pre.to(c.dtype).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return (torch.sigmoid(o) * torch.tanh(c)).to(pre.dtype), c


def outputs(hs: Trajectory, cs: Trajectory) -> tuple[Tensor, Tensor, Tensor]:
    """y and the final states, in memory of their own: users write into what they are given."""
    rows, features = hs.all_after.shape
    y = empty(rows, features, hs.all_after).copy_(hs.all_after)
    return y, hs.final.clone(), cs.final.clone()


def unrolled(
    steps: Steps | Times, step: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of `step(*inputs of t, h, c) -> h, c`, called for one step after the other."""
    steps = steps.spelled() if isinstance(steps, Times) else steps
    cut = [each.split(steps.sizes) for each in inputs]
    ys: dict[int, Tensor] = {}
    for t in steps.order:
        size = steps.sizes[t]
        # The states of sequences that are over, or have not begun, do not change.
        new_h, new_c = step(*(each[t] for each in cut), h[:size], c[:size])
        h, c = torch.cat([new_h, h[size:]]), torch.cat([new_c, c[size:]])
        ys[t] = new_h
    return torch.cat([ys[t] for t in range(len(ys))]), h, c
