"""The styles that `torch.distributed.tensor.parallel.parallelize_module` applies to block-sparse layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, parallel
from torch.distributed.tensor.parallel import ParallelStyle

from ...checked import is_int
from ...errors import BlockSparseError, Page, warn_user
from ...nn.module import BlockSparseModule
from ...surgery.agreement import Fact, agreed, digest, fact_of
from .cut import Cut
from .shardable import ShardableLayer, ShardableLSTM, shardable

# A warning names layers whose largest part has more than this multiple of the mean number of stored values.
MAX_IMBALANCE = 1.1
# PyTorch's own styles shard these.
DENSE = nn.Linear | nn.Embedding
# `facts_of` covers these; errors about processes that differ name them.
COMPARED = "layouts, dtypes, biases and styles"


def group_of(mesh: Any) -> dist.ProcessGroup:
    """Return the group of a one-dimensional mesh; a BlockSparseError for anything else."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        got = getattr(mesh, "shape", type(mesh).__name__)
        expected = 'a DeviceMesh of one dimension, mesh["tp"] say'
        raise BlockSparseError.expected("device_mesh", expected, got, Page.TENSOR_PARALLEL)
    return mesh.get_group()


def facts_of(label: str, module: nn.Module) -> dict[str, Fact]:
    """Return digests of a module's layouts and parameters, which must be the same on all processes."""
    facts = {}
    for name, each in module.named_modules(prefix=label):
        if isinstance(each, BlockSparseModule):
            facts[f"{name} {list(each.layout.shape)}"] = fact_of(each)
    parameters = [(name, each.dtype, each.device.type) for name, each in module.named_parameters()]
    return facts | {f"{label} (dtype, bias, device)": (0, digest(parameters))}


@contextmanager
def prefix_errors(layers: str) -> Iterator[None]:
    """Prepend the names of layers to BlockSparseErrors."""
    try:
        yield
    except BlockSparseError as error:
        raise BlockSparseError(f"{layers}: {error}" if layers else str(error)) from error


class _BlockSparseStyle(ParallelStyle):
    """Base of both styles: arguments, checks, and sharding a layer in place."""

    axis: ClassVar[int]  # the axis of the weight that is sharded
    dense_style: ClassVar[Any]  # PyTorch's style, for dense layers

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        cut: Cut | None = None,
        multiple: int | None = None,
    ):
        super().__init__()
        self.input = input_layouts or (Replicate() if self.axis == 0 else Shard(-1))
        self.output = output_layouts or (Shard(-1) if self.axis == 0 else Replicate())
        for name, placement in (("input_layouts", self.input), ("output_layouts", self.output)):
            if not isinstance(placement, Replicate | Shard):
                raise BlockSparseError.expected(name, "Replicate() or Shard(dim)", repr(placement))
        if cut is not None and not isinstance(cut, Cut):
            raise BlockSparseError.expected("cut", "a Cut", type(cut).__name__)
        if multiple is not None and (not is_int(multiple) or multiple < 1):
            raise BlockSparseError.expected("multiple", "a positive int", repr(multiple))
        self.use_local_output, self.cut, self.multiple = use_local_output, cut, multiple

    @property
    def is_shared(self) -> bool:
        """Whether the sharded features are also another layer's, which needs the same cut."""
        return (self.output if self.axis == 0 else self.input) == Shard(-1)

    def with_cut(self, cut: Cut) -> _BlockSparseStyle:
        """Return a copy of this style with a cut."""
        new = type(self)(
            input_layouts=self.input, output_layouts=self.output, use_local_output=self.use_local_output, cut=cut,
            multiple=self.multiple,
        )  # fmt: skip
        new.src_data_rank = self.src_data_rank
        return new

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut the module over the mesh, in place; torch.distributed's `parallelize_module` calls this."""
        options: Any = {
            "input_layouts": self.input,
            "output_layouts": self.output,
            "use_local_output": self.use_local_output,
        }
        if isinstance(module, DENSE):
            style = self.dense_style(**options)
            style.src_data_rank = self.src_data_rank
            return style._apply(module, device_mesh)
        group = group_of(device_mesh)
        with agreed(group, COMPARED) as facts, prefix_errors(f"{type(module).__name__}({module.extra_repr()})"):
            facts |= facts_of(type(module).__name__, module)
            layer, cut = self.checked_cut(module, device_mesh)
        if self.cut is None and self.is_shared:
            self._warn_if_uneven(layer, cut)
        if self.src_data_rank is not None:
            for parameter in module.parameters():
                if not parameter.is_meta:
                    dist.broadcast(parameter.detach(), group=group, group_src=self.src_data_rank)
        with torch.no_grad():
            layer.shard_(cut, device_mesh, input=self.input, output=self.output, use_local_output=self.use_local_output)
        return module

    def checked_cut(self, module: nn.Module, mesh: DeviceMesh) -> tuple[ShardableLayer | ShardableLSTM, Cut]:
        """Return the layer and its cut, without messages: a BlockSparseError concerns this process only."""
        layer = shardable(module, self.axis)
        for parameter in module.parameters():
            if not parameter.is_meta and parameter.device.type != mesh.device_type:
                raise BlockSparseError.expected("parameters", f"on {mesh.device_type}, as the mesh", parameter.device)
        ranks, unit = mesh.size(), math.lcm(layer.block, self.multiple or 1)
        if self.cut is None and self.is_shared:
            cut = Cut.even(layer.features, unit, ranks)
        elif self.cut is None:
            cut = Cut.balanced(layer.features, unit, ranks, layer.stored_per_unit(unit))
        else:
            cut = self.cut
        if cut.ranks != ranks or not cut.fits(layer.features, layer.block):
            expected = f"one for {ranks} processes and {layer.features} features in blocks of {layer.block}"
            raise BlockSparseError.expected("cut", expected, cut)
        self._check_output(layer, cut)
        return layer, cut

    def _check_output(self, layer: ShardableLayer | ShardableLSTM, cut: Cut) -> None:
        """Raise a BlockSparseError if `Shard(-1)` does not describe the outputs of the ranks."""
        if self.axis != 0 or not self.is_shared:
            return
        if isinstance(layer, ShardableLSTM) and layer.module.bidirectional:
            expected = "Replicate() for an LSTM of two directions, whose outputs lie side by side"
            raise BlockSparseError.expected("output_layouts", expected, self.output)
        parts = [cut.features_of(rank, layer.features) for rank in range(cut.ranks)]
        size = -(-layer.features // cut.ranks)
        ranges = (np.arange(layer.features)[rank * size :][:size] for rank in range(cut.ranks))
        if not self.use_local_output and not all(map(np.array_equal, parts, ranges)):
            expected = f"True where the processes have {[len(part) for part in parts]} features: a DTensor's are even"
            raise BlockSparseError.expected("use_local_output", expected, False)

    def _warn_if_uneven(self, layer: ShardableLayer | ShardableLSTM, cut: Cut) -> None:
        """Warn, on rank 0, if one process gets a much larger share of the blocks than the others."""
        stored = layer.stored_per_unit(cut.unit).sum(0)
        fraction = max(stored[list(part)].sum() for part in cut.parts) / max(stored.sum(), 1)
        if fraction * cut.ranks > MAX_IMBALANCE and dist.get_rank() == 0:
            warn_user(
                f"one of {cut.ranks} processes gets {fraction:.0%} of the blocks of {layer.module}: "
                "blocksparse.distributed.parallelize_module finds cuts that balance them",
            )

    def __repr__(self) -> str:
        more = "" if self.cut is None else f", cut={self.cut}"
        more += "" if self.multiple is None else f", multiple={self.multiple}"
        return (
            f"{type(self).__name__}(input_layouts={self.input}, output_layouts={self.output}, "
            f"use_local_output={self.use_local_output}{more})"
        )


class ColwiseParallel(_BlockSparseStyle):
    """Shards the outputs of a block-sparse layer over a mesh: each process keeps some rows of blocks.

    This is a `ParallelStyle` for `torch.distributed.tensor.parallel.parallelize_module`. For dense layers it is
    PyTorch's own ColwiseParallel.

    Args:
        input_layouts: placement of the input. Replicate() by default; `Shard(dim)` gathers a sequence or batch first.
        output_layouts: placement of the output. `Shard(-1)` by default: each process has its own features, or channels
            of a convolution. Replicate() gathers them; `Shard(dim)` shards another axis.
        use_local_output: whether the output is a plain tensor instead of a DTensor.
        cut: the features of each process, so that layers that read them have the same ones. By default, ranges of
            equally many features if the output stays sharded, and parts of equally many blocks if it is gathered.
        multiple: the number of features that stay together, such as `head_dim` for attention.

    Raises:
        BlockSparseError: in `parallelize_module`, on every process: layouts that differ; fewer rows of blocks than
            processes; a module of another kind, on another device, or parallel already.

    >>> from torch.distributed.tensor import Replicate
    >>> ColwiseParallel(output_layouts=Replicate())
    ColwiseParallel(input_layouts=R, output_layouts=R, use_local_output=True)

    Source: Shoeybi et al., Megatron-LM: training multi-billion parameter language models using model parallelism
    (2019); Korthikanti et al., Reducing activation recomputation in large transformer models (2022).
    """

    axis, dense_style = 0, parallel.ColwiseParallel


class RowwiseParallel(_BlockSparseStyle):
    """Shards the inputs of a block-sparse layer over a mesh: each process keeps some columns of blocks.

    The outputs of the processes are summed; bias and activation are applied to the sum.

    Args:
        input_layouts: placement of the input. `Shard(-1)` by default: the features from a layer with ColwiseParallel.
            Replicate() takes them from the whole input; `Shard(dim)` gathers another axis first.
        output_layouts: placement of the output. Replicate() by default; `Shard(1)` keeps a sequence sharded (sequence
            parallelism) by a reduce-scatter.
        use_local_output, cut, multiple: as for `ColwiseParallel`.

    Raises:
        BlockSparseError: as `ColwiseParallel`; in a call, an input whose features are not those of this process.

    >>> from torch.distributed.tensor import Shard
    >>> RowwiseParallel(output_layouts=Shard(1))
    RowwiseParallel(input_layouts=S(-1), output_layouts=S(1), use_local_output=True)
    """

    axis, dense_style = 1, parallel.RowwiseParallel
