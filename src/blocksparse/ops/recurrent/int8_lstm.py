"""The recurrence of the LSTM with weights in 8 bits, for inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...layout import BlockLayout
from ..int8_linear import INT8_LINEAR, int8_linear
from ..lstm_gates import LSTM_GATES
from .lstm import gates, outputs, unrolled
from .op import StateTrajectory, StepInputs, gather_rows, linear_of
from .recurrence import Recurrence


class Int8LSTM(Recurrence):
    """`LSTM` with int8 weights, whose inputs are rounded as in `int8_linear`; it has no gradient.

    Args:
        layouts: as in `LSTM`; a weight with a layout is int8, the others are dense.

    The tensors are x, index, h and c as in `LSTM`; V, its scales `[nnz, block_out]` (None if V is dense) and b; then
    the other weights, each with its scales. The outputs are those of `LSTM`; gates and c are float32.
    """

    def definition(
        self, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, input_weight: Tensor,
        input_scales: Tensor | None, bias: Tensor | None, *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        recurrent, *projection = self._products(weights)

        def step(z: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            h, c = gates(z + recurrent(h), c)
            return (projection[0](h) if projection else h), c

        inputs = _RoundedProduct(input_weight, input_scales, self.layouts[0])(x, bias)
        return unrolled(self.steps, step, (gather_rows(inputs, index),), h, c)

    def forward(
        self, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, input_weight: Tensor,
        input_scales: Tensor | None, bias: Tensor | None, *weights: Tensor | None, keep: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
        """Run all time steps; each is one product in 8 bits and the gates."""
        steps = self.steps
        recurrent, *projection = self._products(weights)
        hs, cs = StateTrajectory(steps, h), StateTrajectory(steps, c)
        inputs = StepInputs(steps, _RoundedProduct(input_weight, input_scales, self.layouts[0])(x, bias), index)
        run = LSTM_GATES.on(x.device, x.dtype).forward
        for t in steps.order:
            z = recurrent.on_rows(hs.before[t])
            left = z.new_empty(len(z), c.shape[1]) if projection else hs.after[t]
            run(z, inputs[t], None, cs.before[t], h_out=left, c_out=cs.after[t])
            if projection:
                hs.after[t].copy_(projection[0].on_rows(left))
            if not steps.aligned:
                hs.advance(t)
                cs.advance(t)
        return outputs(hs, cs, keep=False), ()

    def _products(self, weights: Sequence[Any]) -> list[_RoundedProduct]:
        triples = zip(weights[::2], weights[1::2], self.layouts[1:], strict=True)
        return [_RoundedProduct(*triple) for triple in triples]


class _RoundedProduct:
    """x W^T + bias with an int8 weight and its scales, or with a dense weight."""

    def __init__(self, weight: Tensor, scales: Tensor | None, layout: BlockLayout | None):
        self.weight, self.scales, self.layout = weight, scales, layout

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.scales is None or self.layout is None:
            return linear_of(x, self.weight, None, bias)
        return int8_linear(x, self.weight, self.scales, self.layout, bias)

    def on_rows(self, x: Tensor) -> Tensor:
        """Return the product for checked rows `[tokens, in]`, without the checks of the public function."""
        if self.scales is None or self.layout is None:
            return linear_of(x, self.weight, None)
        backend = INT8_LINEAR.on(x.device, x.dtype)
        y: Tensor = backend.int8_linear(x, self.weight, self.scales, None, self.layout, None)
        return y
