"""The LSTM of which each process has some units, with all four gates of each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils.rnn import PackedSequence

from ...nn.recurrent import State, cast, pad
from ...ops.recurrent import Steps, linear_of
from ...ops.recurrent.lstm import gates, unrolled
from ...surgery.fsdp import leave_out_if_empty
from .modules import Boundary
from .moves import Spread, copy_to_compute, evenly, identity, move


class ColwiseLSTM:
    """Before the class LSTM: the processes compute their units of a step, then gather all for the next one.

    Inputs and initial states are those of all units, as are final states. The outputs are there whole anyway.
    """

    boundary: Boundary
    units: Spread
    """Of the hidden units with their padding, as the weights have them."""
    dropout: float
    training: bool

    def forward(self, input: Any, hx: State | None = None, *, table: Tensor | None = None) -> Any:
        boundary, x = self.boundary, input
        for weight in super().children():  # type: ignore[misc]
            leave_out_if_empty(weight)
        if not isinstance(x, PackedSequence):
            x, placement = boundary.local(x)
            if isinstance(placement, Shard):
                dim = placement.dim % x.dim()
                x = evenly(boundary.group, x.shape[dim] * len(self.units.index), "input").gather(x, dim)
        y, states = super().forward(x, hx, table=table)  # type: ignore[misc]
        data = y.data if isinstance(y, PackedSequence) else y
        wanted: Any = boundary.normal(boundary.output, data.dim())
        if not isinstance(wanted, Replicate):
            spread = boundary.spread
            if wanted.dim != -1:
                spread = evenly(boundary.group, data.shape[wanted.dim], "output")
            data = spread.split(data, wanted.dim)
        if isinstance(y, PackedSequence):
            return y._replace(data=data), states
        return boundary.leaving(data), states

    def _run(
        self, suffix: str, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, steps: Steps
    ) -> tuple[Tensor, ...]:
        module: Any = self
        units, group = self.units, self.boundary.group
        (input_weight, input_layout), (weight, layout) = module._weights(suffix, "ih", "hh")
        bias = None
        if module.bias:
            bias = getattr(module, f"bias_ih{suffix}") + getattr(module, f"bias_hh{suffix}")
        x, h, input_weight, bias, weight = cast(x, h, input_weight, bias, weight)
        inputs = linear_of(pad(copy_to_compute(x, group), input_layout), input_weight, input_layout, bias)
        inputs = inputs if index is None else inputs.index_select(0, index)

        def step(z: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            h, c = gates(z + linear_of(h, weight, layout), c)
            return units.gather_to_compute(h, 1), c

        y, h, c = unrolled(steps, step, [inputs], copy_to_compute(h, group), units.split(c, 1))
        # Outputs are replicated, and so is their gradient: each process goes on with that of its units.
        mine = torch.zeros(y.shape[1], dtype=torch.bool, device=y.device)
        mine[torch.from_numpy(units.here)] = True
        y, h = (move(whole, identity, partial(torch.mul, mine)) for whole in (y, h))
        return y, h, units.gather(c, 1)

    def _between(self, y: Tensor) -> Tensor:
        # Each process drops its own, as all would draw differently for the whole.
        if not self.training:
            return y
        width = sum(len(part) for part in self.boundary.spread.index)
        whole = [self.boundary.spread.split(each, 1) for each in y.split(width, 1)]
        return torch.cat([self.boundary.spread.gather(F.dropout(each, self.dropout), 1) for each in whole], 1)

    def _is_torchs(self, x: Tensor, hx: State | None) -> bool:
        return False

    def flatten_parameters(self) -> None:
        """Nothing: no weight is as PyTorch's LSTM has it."""
