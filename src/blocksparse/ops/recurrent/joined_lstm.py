"""The recurrence of the LSTM with one product per step for input and state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...convert import block_coordinates
from ...layout import BlockLayout
from .. import lstm_gates, workspace
from .lstm import LSTM, outputs
from .product import Product
from .steps import StateGradient, Trajectory


@dataclass(frozen=True)
class JoinedLSTM(LSTM):
    """An LSTM without projection whose weights are both block-sparse: i, f, g, o = [x, h] [V, W]^T + b.

    With few blocks in a row, products are bound by the gates that they write and read. So there is one for both
    weights, forward and backward, and the gates before their activation are never in memory. The tensors are those of
    `LSTM`, without an index.
    """

    def forward(self, x, index, h, c, input_weight, bias, *weights, keep):
        steps = self.steps
        joined, values = self._joined(input_weight, weights[0])
        hs, cs = Trajectory(steps, h, x), Trajectory(steps, c)
        gates = workspace.empty((steps.rows if keep else 0, 4 * c.shape[1]), x.dtype, x.device)
        activated = steps.cut(gates) if keep else [None] * len(steps.sizes)
        rows = steps.cut(hs.rows_before)
        run = lstm_gates.backend_for(x.device, x.dtype).forward
        for t in steps.order:
            z = joined.forward(rows[t])
            run(z, bias, None, cs.before[t], h_out=hs.after[t], c_out=cs.after[t], gates_out=activated[t])
            hs.advance(t)
            cs.advance(t)
        kept = gates, values, hs.rows_before, cs.all_before, cs.all_after
        return outputs(hs, cs), kept if keep else ()

    def backward(self, tensors, kept, grads, needed):
        steps, (x, _, _, _, input_weight, *_) = self.steps, tensors
        gates, values, rows, c_before, c_after = kept
        grad_y, grad_h, grad_c = grads
        layout, order = _join(self.input_layout, self.layout)
        joined, inputs = Product(values, layout, steps.batch), x.shape[1]
        grad_pre, grad_x = workspace.empty_like(gates), workspace.empty_like(x)
        grad_bias = c_after.new_zeros(gates.shape[1]) if needed[5] else None
        dh, dc = StateGradient(steps, grad_h), grad_c.clone()
        views = [steps.cut(each) for each in (gates, c_before, c_after, grad_y.contiguous(), grad_pre, grad_x)]
        run = lstm_gates.backend_for(gates.device, gates.dtype).backward
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
        grad_values[order.to(values.device)] = joined.wgrad(grad_pre, rows)
        grad_weights = grad_values.split([len(input_weight), len(values) - len(input_weight)])
        grad_bias = None if grad_bias is None else grad_bias.to(x.dtype)
        return grad_x, None, dh.initial, dc, grad_weights[0], grad_bias, grad_weights[1]

    def _joined(self, input_weight: Tensor, weight: Tensor) -> tuple[Product, Tensor]:
        layout, order = _join(self.input_layout, self.layout)
        values = torch.cat([input_weight, weight])[order.to(weight.device)]
        return Product(values, layout, self.steps.batch), values


def can_join(input_layout: BlockLayout | None, layout: BlockLayout | None) -> bool:
    """Whether the weights can be those of a JoinedLSTM."""
    return input_layout is not None and layout is not None and input_layout.block_shape == layout.block_shape


@lru_cache(maxsize=64)
def _join(left: BlockLayout, right: BlockLayout) -> tuple[BlockLayout, Tensor]:
    """The layout of [left, right], and the place of each of its blocks among those of left and then right."""
    cpu = torch.device("cpu")
    (left_rows, left_cols), (right_rows, right_cols) = (block_coordinates(layout, cpu) for layout in (left, right))
    rows = np.concatenate([left_rows, right_rows])
    cols = np.concatenate([left_cols, right_cols + left.grid[1]])
    grid = left.grid[0], left.grid[1] + right.grid[1]
    order = np.lexsort((cols, rows))
    return BlockLayout.from_indices(rows[order], cols[order], grid, left.block_shape), torch.from_numpy(order)
