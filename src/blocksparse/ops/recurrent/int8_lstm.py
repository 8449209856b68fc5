"""The recurrence of the LSTM with weights in 8 bits, for inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...layout import BlockLayout
from ..int8_linear import INT8_LINEAR, int8_linear
from ..lstm_gates import LSTM_GATES
from .lstm import gates, outputs, unrolled
from .op import Rows, Trajectory, gather_rows, linear_of
from .recurrence import Recurrence


class Int8LSTM(Recurrence):
    """As `LSTM`, but for each weight that is int8, whose inputs are rounded as `int8_linear` does; without gradients.

    Args:
        layouts: as of `LSTM`; where there is one, the weight is int8.

    The tensors: x, index, h and c as of `LSTM`; V, its scales `[nnz, block_out]` (None where V is dense) and b; the
    other weights, each with its scales. The outputs are those of `LSTM`; gates and c are float32.
    """

    def definition(
        self, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, input_weight: Tensor,
        input_scales: Tensor | None, bias: Tensor | None, *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        recurrent, *projection = self._products(weights)

        def step(z: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            h, c = gates(z + recurrent(h), c)
            return (projection[0](h) if projection else h), c

        inputs = _Product(input_weight, input_scales, self.layouts[0])(x, bias)
        return unrolled(self.steps, step, (gather_rows(inputs, index),), h, c)

    def forward(
        self, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, input_weight: Tensor,
        input_scales: Tensor | None, bias: Tensor | None, *weights: Tensor | None, keep: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
        steps = self.steps
        recurrent, *projection = self._products(weights)
        hs, cs = Trajectory(steps, h), Trajectory(steps, c)
        inputs = Rows(steps, _Product(input_weight, input_scales, self.layouts[0])(x, bias), index)
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

    def _products(self, weights: Sequence[Any]) -> list[_Product]:
        triples = zip(weights[::2], weights[1::2], self.layouts[1:], strict=True)
        return [_Product(*triple) for triple in triples]


class _Product:
    """x W^T + bias of a weight that is int8 with scales, dense without."""

    def __init__(self, weight: Tensor, scales: Tensor | None, layout: BlockLayout | None):
        self.weight, self.scales, self.layout = weight, scales, layout

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.scales is None or self.layout is None:
            return linear_of(x, self.weight, None, bias)
        return int8_linear(x, self.weight, self.scales, self.layout, bias)

    def on_rows(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same of `[tokens, in]` that were checked and lie in memory."""
        if self.scales is None or self.layout is None:
            return linear_of(x, self.weight, None, bias)
        backend = INT8_LINEAR.on(x.device, x.dtype)
        y: Tensor = backend.int8_linear(x, self.weight, self.scales, bias, self.layout, None)
        return y
