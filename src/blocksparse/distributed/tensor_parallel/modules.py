"""Tensor-parallel layers: column-wise, each rank computes some outputs; row-wise, each rank reads some inputs."""

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
from ...nn.padding import pad
from ...nn.recurrent import State, cast
from ...ops.activations import ACTIVATIONS
from ...ops.recurrent import Steps, linear_of
from ...ops.recurrent.lstm import gates, unrolled
from ...surgery.agreement import agree, is_one_of_several
from ..fsdp import leave_out_if_empty
from .collectives import AxisSharding, copy_to_ranks, differentiable, identity, sum_over_ranks


@dataclass(frozen=True, eq=False)
class LayerSharding:
    """The sharding of a tensor-parallel layer: of its features, its input and its output.

    Args:
        mesh: the ranks, a mesh of one dimension.
        features: the sharding of the outputs of a column-wise layer, or of the inputs of a row-wise one.
        other_features: the number of features on the other side, which are not sharded by the weight.
        axis: the axis of features, counted from the end: -1 in a linear layer, -3 in a convolution of images.
        input, output: the placements of the layer's input and output; `Shard(-1)` is the axis of features.
        use_local_output: whether the output is a plain tensor instead of a DTensor.
    """

    mesh: DeviceMesh
    features: AxisSharding
    other_features: int
    axis: int
    input: Placement
    output: Placement
    use_local_output: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerSharding:
        return self  # a mesh cannot be copied

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks."""
        return self.features.group

    def local_input(self, x: Any) -> tuple[Tensor, Placement]:
        """Return the local tensor of an input and its normalized placement."""
        if isinstance(x, DTensor):
            if x.device_mesh != self.mesh:
                raise BlockSparseError.expected("input", f"a DTensor on {self.mesh}", x.device_mesh)
            placement = self.normalize(x.placements[0], x.dim())
            if isinstance(placement, Shard) and placement.dim != -1:
                AxisSharding.even(self.group, x.shape[placement.dim], "input")
            return x.to_local(), placement
        if not isinstance(x, Tensor):
            raise BlockSparseError.expected("input", "a tensor", type(x).__name__)
        return x, self.normalize(self.input, x.dim())

    def normalize(self, placement: Placement, dims: int) -> Placement:
        """Return the placement with `Shard(-1)` for the axis of features, and other axes counted from the front."""
        if not isinstance(placement, Shard) or placement.dim == -1:
            return placement
        dim = placement.dim % dims
        return Shard(-1) if dim == dims + self.axis else Shard(dim)

    def replicate(self, x: Tensor, placement: Placement, features: int) -> Tensor:
        """Return the whole input on each rank; its gradient is summed over ranks.

        Args:
            x: the local tensor.
            placement: its placement, `Replicate()` or `Shard(dim)`.
            features: the number of features of the whole input.
        """
        if isinstance(placement, Replicate):
            return copy_to_ranks(x, self.group)
        if not isinstance(placement, Shard):
            raise BlockSparseError.expected("input_layouts", "Replicate() or Shard(dim)", placement)
        if placement.dim == -1:
            sharding = AxisSharding.even(self.group, features, "the number of input features")
            return sharding.all_gather(x, self.axis)
        size = x.shape[placement.dim] * dist.get_world_size(self.group)
        return AxisSharding.even(self.group, size, "input").all_gather(x, placement.dim)

    def wrap_output(self, y: Tensor) -> Any:
        """Return the output as a plain tensor or as a DTensor, as `use_local_output` says."""
        if self.use_local_output:
            return y
        placement = self.normalize(self.output, y.dim())
        return DTensor.from_local(
            y, self.mesh, [Shard(y.dim() + self.axis) if placement == Shard(-1) else placement], run_check=False
        )


class Colwise:
    """Mixin for a layer whose outputs are sharded: a rank has some rows of blocks of the weight."""

    sharding: LayerSharding

    def forward(self, input: Any, *args: Any, **options: Any) -> Any:
        """Replicate the input, multiply by this rank's rows of blocks, and bring the output into its placement.

        The output stays sharded by features, is gathered, or is scattered along another axis.
        """
        sharding = self.sharding
        leave_out_if_empty(self)  # type: ignore[arg-type]
        x, placement = sharding.local_input(input)
        x = sharding.replicate(x, placement, sharding.other_features)
        y = super().forward(x, *args, **options)  # type: ignore[misc]
        output = sharding.normalize(sharding.output, y.dim())
        if output != Shard(-1):
            y = sharding.features.gather(y, sharding.axis)
            if isinstance(output, Shard):
                y = AxisSharding.even(sharding.group, y.shape[output.dim], "output").scatter(y, output.dim)
        return sharding.wrap_output(y)


class Rowwise:
    """Mixin for a layer whose inputs are sharded: a rank has some columns of blocks of the weight.

    The ranks' outputs are summed; bias and activation are applied to the sum.
    """

    sharding: LayerSharding
    bias: nn.Parameter | None
    activation: str | None
    checked = False

    def forward(self, input: Any, *args: Any, **options: Any) -> Any:
        """Multiply this rank's features of the input by its columns of blocks, and sum the products over ranks.

        The sum is replicated, or scattered along an axis; then the bias is added and the activation applied.
        """
        sharding = self.sharding
        group, features, axis = sharding.group, sharding.features, sharding.axis
        leave_out_if_empty(self)  # type: ignore[arg-type]
        x, placement = sharding.local_input(input)
        if placement != Shard(-1) and x.shape[axis] != features.size:
            raise BlockSparseError.expected("input", f"{features.size} features", x.shape[axis])
        if isinstance(placement, Replicate):
            x = features.scatter(x, axis)
        elif placement != Shard(-1):
            x = features.local_slice(sharding.replicate(x, placement, features.size), axis)
        else:
            self._check_features(x)
        y = self.compute(x, None, None, *args, **options)  # type: ignore[attr-defined]
        bias: Tensor | None = self.bias
        output: Any = sharding.normalize(sharding.output, y.dim())
        if isinstance(output, Replicate):
            y = sum_over_ranks(y, group)
        elif output == Shard(-1):
            outputs = AxisSharding.even(group, sharding.other_features, "the number of output features")
            y = outputs.reduce_scatter(y, axis)
            bias = None if bias is None else outputs.scatter(bias, 0)
        else:
            y = AxisSharding.even(group, y.shape[output.dim], "output").reduce_scatter(y, output.dim)
            bias = None if bias is None else copy_to_ranks(bias, group)
        if bias is not None:
            y = y + bias.to(y.dtype).view(-1, *[1] * (-1 - axis))  # autocast may have changed y's dtype
        return sharding.wrap_output(ACTIVATIONS[self.activation](y))

    def _check_features(self, x: Tensor) -> None:
        """Raise a BlockSparseError unless x has the features of this rank; at the first call, on all ranks."""
        features, size = self.sharding.features, x.shape[self.sharding.axis]
        problem = None
        if size != len(features.local_indices):
            expected = f"{len(features.local_indices)} features, the part of rank {features.rank} of {features.size}"
            problem = str(BlockSparseError.expected("input", expected, f"{size}: {ADVICE}"))
        if not self.checked and not torch.compiler.is_compiling() and is_one_of_several(features.group):
            agree({}, features.group, problem)
            self.checked = True
        if problem:
            raise BlockSparseError(problem)


ADVICE = (
    "the layers that write and read these features are cut at other places. Give both one `cut`, or parallelize the "
    "model with blocksparse.distributed.parallelize_module, which does"
)


class ColwiseLSTM:
    """Mixin for an LSTM: each rank computes its hidden units in a step, then all ranks gather them for the next step.

    Inputs, initial states and final states have all units. The outputs are whole on every rank anyway.
    """

    sharding: LayerSharding
    units: AxisSharding
    """The sharding of the hidden units with their padding, as the weights have them."""
    dropout: float
    training: bool

    def forward(self, input: Any, hx: State | None = None, *, table: Tensor | None = None) -> Any:
        """Gather a sharded input, run the LSTM, and scatter the output along an axis unless it is replicated.

        The states are replicated.
        """
        sharding, x = self.sharding, input
        for weight in super().children():  # type: ignore[misc]
            leave_out_if_empty(weight)
        if not isinstance(x, PackedSequence):
            x, placement = sharding.local_input(x)
            if isinstance(placement, Shard):
                dim = placement.dim % x.dim()
                x = AxisSharding.even(sharding.group, x.shape[dim] * len(self.units.indices), "input").gather(x, dim)
        y, states = super().forward(x, hx, table=table)  # type: ignore[misc]
        data = y.data if isinstance(y, PackedSequence) else y
        output: Any = sharding.normalize(sharding.output, data.dim())
        if not isinstance(output, Replicate):
            axis = sharding.features
            if output.dim != -1:
                axis = AxisSharding.even(sharding.group, data.shape[output.dim], "output")
            data = axis.scatter(data, output.dim)
        if isinstance(y, PackedSequence):
            return y._replace(data=data), states
        return sharding.wrap_output(data), states

    def _fast_inference(self, x: Any, hx: Any) -> None:
        """Decline the fast path of inference, which needs all units on one rank."""

    def _run(
        self, suffix: str, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, steps: Steps
    ) -> tuple[Tensor, ...]:
        """Run one layer in one direction; see `Recurrent._run`."""
        module: Any = self
        units, group = self.units, self.sharding.group
        (input_weight, input_layout), (weight, layout) = module._weights(suffix, "ih", "hh")
        bias = None
        if module.bias:
            bias = getattr(module, f"bias_ih{suffix}") + getattr(module, f"bias_hh{suffix}")
        x, h, input_weight, bias, weight = cast(x, h, input_weight, bias, weight)
        inputs = linear_of(pad(copy_to_ranks(x, group), input_layout), input_weight, input_layout, bias)
        inputs = inputs if index is None else inputs.index_select(0, index)

        def step(z: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            h, c = gates(z + linear_of(h, weight, layout), c)
            return units.all_gather(h, 1), c

        y, h, c = unrolled(steps, step, [inputs], copy_to_ranks(h, group), units.scatter(c, 1))
        # Outputs are replicated, and so is their gradient: each rank passes on the gradient of its own units.
        mine = torch.zeros(y.shape[1], dtype=torch.bool, device=y.device)
        mine[torch.from_numpy(units.local_indices)] = True
        y, h = (differentiable(whole, identity, partial(torch.mul, mine)) for whole in (y, h))
        return y, h, units.gather(c, 1)

    def _dropout_between_layers(self, y: Tensor) -> Tensor:
        """Return y after dropout; each rank draws the mask of its own units, because whole masks would differ."""
        if not self.training:
            return y
        features = self.sharding.features
        local = [features.scatter(each, 1) for each in y.split(features.size, 1)]
        return torch.cat([features.gather(F.dropout(each, self.dropout), 1) for each in local], 1)

    def _uses_torch_kernels(self, x: Tensor, hx: State | None) -> bool:
        """Return False: PyTorch's kernels need all units on one rank."""
        return False

    def flatten_parameters(self) -> None:
        """Do nothing: no weight is laid out as in PyTorch's LSTM."""
