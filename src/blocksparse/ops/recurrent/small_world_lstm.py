"""The recurrence of the deep-transition LSTM of 2017, made for small-world layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import workspace
from ..lstm_gates import LSTM_GATES
from .lstm import back_in_time, gates, outputs, products, unrolled
from .op import Rows, Trajectory, empty, gather_rows, linear_of, scatter_add_rows
from .recurrence import Recurrence, Tensors

EPSILON = 1e-5


class SmallWorldLSTM(Recurrence):
    """A few steps through the graph within each time step, then the gates; a layer norm after each product.

        s = factors * norm(h W1^T)
        s = relu(terms + norm(s W2^T))
        s = relu(norm(s Wk^T))                  for k = 3 to depth
        i, f, g, o = norm of each (s W^T);  c = sig(f) c + sig(i) tanh(g);  h = sig(o) tanh(c)

    Args:
        layouts: of the weights W1 to Wdepth `[hidden, hidden]`, then of W `[4 hidden, hidden]`.

    The tensors: factors and terms `[rows, hidden]`, those of the inputs, index None, or tables of them `[n, hidden]`
    and the index `[rows]` of each row in them; h and c `[batch, hidden]`; the weights as the layouts; the norms' gains
    and biases, `[hidden]` of each weight but `[4 hidden]` of W, gains first. With a depth of 1 there are no terms: what
    is given is not read. The outputs: y `[rows, hidden]`; the final h and c.

    Source: Gray, Radford, Kingma, GPU Kernels for Block-Sparse Weights (2017).
    """

    states = 3, 4

    @property
    def depth(self) -> int:
        return len(self.layouts) - 1

    def definition(
        self, factors: Tensor, terms: Tensor, index: Tensor | None, h: Tensor, c: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        weights, gains, biases = self._split(parameters)

        def product(k: int, x: Tensor) -> Tensor:
            return linear_of(x, weights[k], self.layouts[k])

        def norm(k: int, y: Tensor) -> Tensor:
            wide = F.layer_norm(y.to(c.dtype), y.shape[-1:], gains[k].to(c.dtype), biases[k].to(c.dtype), EPSILON)
            return wide.to(y.dtype)

        def step(factor: Tensor, term: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            s = factor * norm(0, product(0, h))
            for k in range(1, self.depth):
                y = norm(k, product(k, s))
                s = torch.relu(y + term if k == 1 else y)
            z = product(self.depth, s).unflatten(-1, (4, -1))
            z = F.layer_norm(z.to(c.dtype), z.shape[-1:], eps=EPSILON).to(z.dtype).flatten(-2)
            return gates(z * gains[-1] + biases[-1], c)

        return unrolled(self.steps, step, (gather_rows(factors, index), gather_rows(terms, index)), h, c)

    def forward(
        self, factors: Tensor, terms: Tensor, index: Tensor | None, h: Tensor, c: Tensor, *parameters: Tensor,
        keep: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
        steps, depth, hidden = self.steps, self.depth, c.shape[1]
        weights, gains, biases = self._split(parameters)
        of_steps = products(weights, self.layouts, steps)
        hs, cs = Trajectory(steps, h), Trajectory(steps, c)
        # Of each norm but the last: what it takes, and mean and 1 / deviation; what the following product takes.
        rows_kept = steps.rows if keep else 0
        taken, given = ([empty(rows_kept, hidden, factors) for _ in range(depth)] for _ in range(2))
        moments = [c.new_empty(2, rows_kept, 1) for _ in range(depth)]
        z_normed, activated = (empty(rows_kept, 4 * hidden, factors) for _ in range(2))
        z_scale = c.new_empty(rows_kept, 4)
        factor, term = Rows(steps, factors, index), Rows(steps, terms, index)
        # Norms of 16-bit numbers are computed in those of the state.
        wide = c.dtype
        wide_norms = [(gains[k].to(wide), biases[k].to(wide)) for k in range(depth)]
        run = LSTM_GATES.on(factors.device, factors.dtype).forward
        for t in steps.order:
            rows = slice(steps.start[t], steps.start[t + 1])
            s = hs.before[t]
            for k in range(depth):
                y = of_steps[k].forward(s)
                s, mean, scale = torch.native_layer_norm(y.to(wide), (hidden,), *wide_norms[k], EPSILON)
                if keep:
                    taken[k][rows] = y
                    moments[k][0, rows], moments[k][1, rows] = mean, scale
                s = s.mul_(factor[t]) if k == 0 else (s.add_(term[t]) if k == 1 else s).relu_()
                s = s.to(y.dtype)
                if keep:
                    given[k][rows] = s
            z = of_steps[depth].forward(s)
            normed, _, scale = torch.native_layer_norm(z.view(-1, 4, hidden).to(wide), (hidden,), None, None, EPSILON)
            normed = normed.view(-1, 4 * hidden).to(z.dtype)
            if keep:
                z_normed[rows], z_scale[rows] = normed, scale.view(-1, 4)
            run(
                normed,
                biases[-1],
                gains[-1],
                cs.before[t],
                h_out=hs.after[t],
                c_out=cs.after[t],
                gates_out=activated[rows] if keep else None,
            )
            if not steps.aligned:
                hs.advance(t)
                cs.advance(t)
        kept = (activated, cs.all_before, cs.all_after, hs.all_before, z_normed, z_scale, *taken, *given, *moments)
        return outputs(hs, cs), kept if keep else ()

    def backward(
        self, tensors: Any, kept: tuple[Tensor, ...], grads: tuple[Tensor, ...], needed: Sequence[bool]
    ) -> Tensors:
        steps, depth = self.steps, self.depth
        factors, terms, index, _, c, *parameters = tensors
        hidden = c.shape[1]
        weights, gains, biases = self._split(tuple(parameters))
        *states, h_before, z_normed, z_scale = kept[:6]
        rest = kept[6:]
        taken, given, moments = rest[:depth], rest[depth : 2 * depth], rest[2 * depth :]
        of_steps = products(weights, self.layouts, steps)
        grad_z = workspace.empty_like(z_normed)
        grad_taken = [workspace.empty_like(each) for each in given]
        grad_factors, grad_terms = (workspace.empty_like(given[0]) for _ in range(2))
        grad_normed = factors.new_empty(steps.batch, hidden)
        grad_gains, grad_biases = ([torch.zeros_like(each, dtype=c.dtype) for each in of] for of in (gains, biases))
        factor = Rows(steps, factors, index)
        wide = c.dtype
        wide_norms = [(gains[k].to(wide), biases[k].to(wide)) for k in range(depth)]

        def at_state(t: int, grad_pre: Tensor) -> Tensor:
            rows = slice(steps.start[t], steps.start[t + 1])
            # Summed while the terms are in the cache.
            grad_gains[-1] += (grad_pre * z_normed[rows]).sum(0)
            grad_biases[-1] += grad_pre.sum(0)
            scaled = grad_pre * gains[-1]
            grad_z[rows] = _norm_backward(scaled, z_normed[rows], z_scale[rows], hidden)
            grad = of_steps[depth].dgrad(grad_z[rows])
            for k in reversed(range(depth)):
                y, mean, scale = taken[k][rows], moments[k][0, rows], moments[k][1, rows]
                normed = (y - mean) * scale
                into = grad_normed[: len(y)]
                if k == 0:
                    grad_factors[rows] = grad * torch.addcmul(wide_norms[0][1], normed, wide_norms[0][0])
                    torch.mul(grad, factor[t], out=into)
                else:
                    into.copy_(torch.ops.aten.threshold_backward(grad, given[k][rows], 0))
                if k == 1:
                    grad_terms[rows] = into
                grad_gains[k] += (into * normed).sum(0)
                grad_biases[k] += into.sum(0)
                grad_taken[k][rows] = torch.ops.aten.native_layer_norm_backward(
                    into.to(wide), y.to(wide), (hidden,), mean, scale, *wide_norms[k], (True, False, False)
                )[0]
                grad = of_steps[k].dgrad(grad_taken[k][rows])
            return grad

        _, grad_h, grad_c = back_in_time(steps, states, grads, at_state)
        inputs = [h_before, *given]
        grad_outputs = [*grad_taken, grad_z]
        grad_weights = [p.wgrad(grad, x) for p, grad, x in zip(of_steps, grad_outputs, inputs, strict=True)]
        return (
            scatter_add_rows(grad_factors, factors, index),
            scatter_add_rows(grad_terms, terms, index) if depth > 1 else None,
            None,
            grad_h,
            grad_c,
            *grad_weights,
            *(grad.to(factors.dtype) for grad in (*grad_gains, *grad_biases)),
        )

    def _split(self, parameters: tuple[Tensor, ...]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        count = len(self.layouts)
        return parameters[:count], parameters[count : 2 * count], parameters[2 * count :]


def _norm_backward(grad: Tensor, normed: Tensor, scale: Tensor, hidden: int) -> Tensor:
    """The gradient at what each of the four norms without gain takes."""
    shape = (len(grad), 4, hidden)
    zeros, ones = scale.new_zeros(len(grad), 4, 1), scale.new_ones(len(grad), 4, 1)
    # Normalised values already have mean 0 and deviation 1.
    wide: Tensor = torch.ops.aten.native_layer_norm_backward(
        grad.view(shape).to(scale.dtype), normed.view(shape).to(scale.dtype), (hidden,), zeros, ones, None, None,
        (True, False, False),
    )[0]  # fmt: skip
    return wide.mul_(scale.unsqueeze(-1)).flatten(1).to(normed.dtype)
