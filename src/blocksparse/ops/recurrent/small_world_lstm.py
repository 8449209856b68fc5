"""The recurrence of the deep-transition LSTM of 2017, designed for small-world layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import workspace
from ..checks import contiguous_features
from ..lstm_gates import LSTM_GATES
from . import cpu
from .lstm import back_in_time, gates, outputs, products, unrolled
from .op import StateTrajectory, StepInputs, core_weights, empty, gather_rows, linear_of, scatter_add_rows
from .recurrence import Recurrence, Tensors

EPSILON = 1e-5


class SmallWorldLSTM(Recurrence):
    """Each time step multiplies the state `depth` times, then computes the gates; each product has a layer norm.

        s = factors * norm(h W1^T)
        s = relu(terms + norm(s W2^T))
        s = relu(norm(s Wk^T))                  for k = 3 to depth
        i, f, g, o = norm of each (s W^T);  c = sig(f) c + sig(i) tanh(g);  h = sig(o) tanh(c)

    Args:
        layouts: of the weights W1 to Wdepth `[hidden, hidden]`, then of W `[4 hidden, hidden]`.

    The tensors are the inputs' factors and terms `[rows, hidden]` and None, or tables of them `[n, hidden]` and the
    index `[rows]` of each row in them; h and c `[batch, hidden]`; the weights in the order of the layouts; all gains,
    then all biases of the norms, `[hidden]` for each weight but `[4 hidden]` for W. With depth 1, terms are not read.
    The outputs are y `[rows, hidden]` and the final h and c.

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
        """Run all steps: per step `depth` normalized products from h to h, then the gates.

        If the compiled core can, it runs all steps in one call.
        """
        steps, depth = self.steps, self.depth
        weights, gains, biases = self._split(parameters)
        of_steps = products(weights, self.layouts, steps)
        hs, cs = StateTrajectory(steps, h), StateTrajectory(steps, c)
        norms = cpu.Norms.empty(steps.rows if keep else steps.batch, depth, h, c)
        activated = empty(steps.rows, 4 * c.shape[1], h) if keep else None
        saved = () if activated is None else (activated, cs.all_before, cs.all_after, hs.all_before, *norms)
        in_core = core_weights(of_steps)
        if in_core is not None:
            inputs = contiguous_features(factors), contiguous_features(terms) if depth > 1 else None
            cpu.small_world_forward(in_core, steps, inputs, index, gains, biases, EPSILON, hs, cs, activated, norms)
            return outputs(hs, cs, keep), saved
        factor, term = StepInputs(steps, factors, index), StepInputs(steps, terms, index)
        wide = [(gain.to(c.dtype), bias.to(c.dtype)) for gain, bias in zip(gains, biases, strict=True)]
        run = LSTM_GATES.on(factors.device, factors.dtype).forward
        for t in steps.order:
            rows = slice(steps.start[t], steps.start[t + 1])
            s = hs.before[t]
            for k in range(depth):
                normed, scale = _norm(of_steps[k].forward(s), 1, c.dtype)
                y = torch.addcmul(wide[k][1], normed, wide[k][0])
                s = (y.mul_(factor[t]) if k == 0 else (y.add_(term[t]) if k == 1 else y).relu_()).to(s.dtype)
                if keep:
                    norms.normed[k, rows], norms.scale[k, rows], norms.inputs[k, rows] = normed, scale, s
            normed, scale = _norm(of_steps[depth].forward(s), 4, c.dtype)
            z = normed.to(s.dtype)
            if keep:
                norms.z[rows], norms.z_scale[rows] = z, scale
            run(
                z,
                biases[-1],
                gains[-1],
                cs.before[t],
                h_out=hs.after[t],
                c_out=cs.after[t],
                gates_out=None if activated is None else activated[rows],
            )
            if not steps.aligned:
                hs.advance(t)
                cs.advance(t)
        return outputs(hs, cs, keep), saved

    def backward(
        self, tensors: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...], needed: Sequence[bool]
    ) -> Tensors:
        """Return the gradients, back in time through the gates and each of the `depth` products."""
        steps, depth = self.steps, self.depth
        factors, terms, index, _, c, *parameters = tensors
        weights, gains, biases = self._split(tuple(parameters))
        (*states, h_before), norms = saved[:4], cpu.Norms(*saved[4:])
        of_steps = products(weights, self.layouts, steps)
        affine = c.new_zeros(2, (depth + 4) * c.shape[1])
        grad_factors, grad_terms = (workspace.empty_like(h_before) for _ in range(2))
        into = cpu.SmallWorldGradients(
            grad_factors, grad_terms, workspace.empty_like(norms.z), workspace.empty_like(norms.normed), *affine
        )
        grad_gains, grad_biases = (each.split([len(gain) for gain in gains]) for each in affine)
        factor = StepInputs(steps, factors, index)
        wide = [(gain.to(c.dtype), bias.to(c.dtype)) for gain, bias in zip(gains, biases, strict=True)]

        def norm_backward(k: int, grad: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
            # Summed here, while the terms are in the cache.
            grad_gains[k].add_((grad * normed).sum(0))
            grad_biases[k].add_(grad.sum(0))
            return _norm_backward(grad * wide[k][0], normed, scale)

        def at_state(t: int, grad_pre: Tensor) -> Tensor:
            rows = slice(steps.start[t], steps.start[t + 1])
            into.z[rows] = norm_backward(depth, grad_pre, norms.z[rows], norms.z_scale[rows])
            grad = of_steps[depth].dgrad(into.z[rows])
            for k in reversed(range(depth)):
                normed = norms.normed[k, rows]
                if k == 0:
                    grad_factors[rows] = grad * torch.addcmul(wide[0][1], normed, wide[0][0])
                    grad = grad * factor[t]
                else:
                    grad = torch.ops.aten.threshold_backward(grad, norms.inputs[k, rows], 0)
                if k == 1:
                    grad_terms[rows] = grad
                into.products[k, rows] = norm_backward(k, grad, normed, norms.scale[k, rows])
                grad = of_steps[k].dgrad(into.products[k, rows])
            return grad

        in_core = core_weights(of_steps)
        if in_core is not None:
            _, grad_h, grad_c = cpu.small_world_backward(
                in_core, steps, contiguous_features(factors), index, gains, biases, states, norms, grads, into
            )
        else:
            _, grad_h, grad_c = back_in_time(steps, states, grads, at_state)
        inputs, grad_outputs = [h_before, *norms.inputs], [*into.products, into.z]
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
        """Return weights, gains and biases."""
        count = len(self.layouts)
        return parameters[:count], parameters[count : 2 * count], parameters[2 * count :]


def _norm(y: Tensor, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return each group of a row's features normalised, in this dtype, and 1 / deviation `[rows, groups]`."""
    shape = (len(y), groups, y.shape[1] // groups)
    normed, _, scale = torch.native_layer_norm(y.view(shape).to(dtype), shape[2:], None, None, EPSILON)
    return normed.flatten(1), scale.flatten(1)


def _norm_backward(grad: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient at the norms' inputs from that at their outputs."""
    shape = (*scale.shape, normed.shape[1] // scale.shape[1])
    zeros, ones = torch.zeros_like(scale).unsqueeze(-1), torch.ones_like(scale).unsqueeze(-1)
    # Normalised values already have mean 0 and deviation 1.
    wide: Tensor = torch.ops.aten.native_layer_norm_backward(
        grad.view(shape), normed.view(shape).to(grad.dtype), shape[2:], zeros, ones, None, None, (True, False, False)
    )[0]
    return wide.mul_(scale.unsqueeze(-1)).flatten(1)
