"""Layers of which each process holds some outputs (Colwise) or some inputs (Rowwise), and what moves around them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.utils.rnn import PackedSequence

from ...errors import BlockSparseError
from ...nn.recurrent import State, cast, pad
from ...ops.activations import ACTIVATIONS
from ...ops.recurrent import Steps, linear_of
from ...ops.recurrent.lstm import gates, unrolled
from ...surgery.agreement import agree, is_one_of_several
from ..fsdp import leave_out_if_empty
from .moves import Spread, copy_to_compute, evenly, identity, move, sum_to_whole


@dataclass(frozen=True, eq=False)
class Boundary:
    """What comes into a layer that is cut, what goes out of it, and between which processes.

    Args:
        mesh: the processes, of one dimension.
        spread: which of the features that are cut each process has: the outputs of Colwise, the inputs of Rowwise.
        features: the number of the features that are not cut.
        axis: of the features, from behind: -1 of a linear layer, -3 of a convolution of images.
        input, output: how the layer's are over the processes; features are `Shard(-1)`.
        use_local_output: whether the output is a plain tensor, not a DTensor.
    """

    mesh: DeviceMesh
    spread: Spread
    features: int
    axis: int
    input: Placement
    output: Placement
    use_local_output: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> Boundary:
        return self  # processes cannot be copied

    @property
    def group(self) -> dist.ProcessGroup:
        return self.spread.group

    def local(self, x: Any) -> tuple[Tensor, Placement]:
        """The part of an input that is here, and how it is spread."""
        if isinstance(x, DTensor):
            if x.device_mesh != self.mesh:
                raise BlockSparseError.expected("input", f"a DTensor on {self.mesh}", x.device_mesh)
            return x.to_local(), self.normal(x.placements[0], x.dim())
        if not isinstance(x, Tensor):
            raise BlockSparseError.expected("input", "a tensor", type(x).__name__)
        return x, self.normal(self.input, x.dim())

    def normal(self, placement: Placement, dims: int) -> Placement:
        """The placement with the features as `Shard(-1)`, and other axes counted from the front."""
        if not isinstance(placement, Shard) or placement.dim == -1:
            return placement
        dim = placement.dim % dims
        return Shard(-1) if dim == dims + self.axis else Shard(dim)

    def leaving(self, y: Tensor) -> Any:
        """The output as the caller wants it."""
        if self.use_local_output:
            return y
        placement = self.normal(self.output, y.dim())
        return DTensor.from_local(
            y, self.mesh, [Shard(y.dim() + self.axis) if placement == Shard(-1) else placement], run_check=False
        )


def _whole(x: Tensor, placement: Placement, boundary: Boundary, features: int) -> Tensor:
    """All of the input, of which each process computes something else."""
    group = boundary.group
    if isinstance(placement, Replicate):
        return copy_to_compute(x, group)
    if not isinstance(placement, Shard):
        raise BlockSparseError.expected("input_layouts", "Replicate() or Shard(dim)", placement)
    if placement.dim == -1:
        return evenly(group, features, "the number of input features").gather_to_compute(x, boundary.axis)
    size = x.shape[placement.dim] * dist.get_world_size(group)
    return evenly(group, size, "input").gather_to_compute(x, placement.dim)


class Colwise:
    """Before the class of a layer whose outputs are cut: its weight is some of the rows of blocks."""

    boundary: Boundary

    def forward(self, input: Any, *args: Any, **options: Any) -> Any:
        boundary = self.boundary
        leave_out_if_empty(self)  # type: ignore[arg-type]
        x, placement = boundary.local(input)
        y = super().forward(_whole(x, placement, boundary, boundary.features), *args, **options)  # type: ignore[misc]
        wanted = boundary.normal(boundary.output, y.dim())
        if wanted != Shard(-1):
            y = boundary.spread.gather(y, boundary.axis)
            if isinstance(wanted, Shard):
                y = evenly(boundary.group, y.shape[wanted.dim], "output").split(y, wanted.dim)
        return boundary.leaving(y)


class Rowwise:
    """Before the class of a layer whose inputs are cut: its weight is some of the columns of blocks.

    What the processes compute is summed; bias and activation come after the sum.
    """

    boundary: Boundary
    bias: nn.Parameter | None
    activation: str | None
    checked = False

    def forward(self, input: Any, *args: Any, **options: Any) -> Any:
        boundary = self.boundary
        group, spread, axis = boundary.group, boundary.spread, boundary.axis
        leave_out_if_empty(self)  # type: ignore[arg-type]
        x, placement = boundary.local(input)
        if isinstance(placement, Replicate):
            x = spread.split(x, axis)
        elif placement != Shard(-1):
            x = spread.take(_whole(x, placement, boundary, sum(spread.sizes)), axis)
        else:
            self._check_features(x)
        y = self.compute(x, None, None, *args, **options)  # type: ignore[attr-defined]
        bias: Tensor | None = self.bias
        wanted: Any = boundary.normal(boundary.output, y.dim())
        if isinstance(wanted, Replicate):
            y = sum_to_whole(y, group)
        elif wanted == Shard(-1):
            parts = evenly(group, boundary.features, "the number of output features")
            y = parts.sum_to_parts(y, axis)
            bias = None if bias is None else parts.split(bias, 0)
        else:
            y = evenly(group, y.shape[wanted.dim], "output").sum_to_parts(y, wanted.dim)
            bias = None if bias is None else copy_to_compute(bias, group)
        if bias is not None:
            y = y + bias.to(y.dtype).view(-1, *[1] * (-1 - axis))  # y may be of autocast's dtype
        return boundary.leaving(ACTIVATIONS[self.activation](y))

    def _check_features(self, x: Tensor) -> None:
        """Raises a BlockSparseError unless these are the features of this process; at the first call on all."""
        spread, have = self.boundary.spread, x.shape[self.boundary.axis]
        problem = None
        if have != len(spread.here):
            expected = f"{len(spread.here)} features, the part of rank {spread.rank} of {sum(spread.sizes)}"
            problem = str(BlockSparseError.expected("input", expected, f"{have}: {ADVICE}"))
        if not self.checked and not torch.compiler.is_compiling() and is_one_of_several(spread.group):
            agree({}, spread.group, problem)
            self.checked = True
        if problem:
            raise BlockSparseError(problem)


ADVICE = (
    "the layers that write and read these features are cut at other places. Give both one `cut`, or parallelize the "
    "model with blocksparse.distributed.parallelize_module, which does"
)


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

    def _one_step(self, x: Any, hx: Any) -> None:
        """That is one of a process that has all units."""

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
