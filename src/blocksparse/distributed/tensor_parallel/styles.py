"""The styles that `torch.distributed.tensor.parallel.parallelize_module` applies to block-sparse layers."""

from __future__ import annotations

import math
import warnings
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
from ...errors import BlockSparseError, Page, SparsityWarning
from ...nn.module import BlockSparseModule
from ...surgery.agreement import Fact, agreed, digest, fact_of
from .cut import Cut
from .slicing import Layer, Units, sliceable

# Above this a warning says that the processes have very different parts.
UNEVEN = 1.1
# For which PyTorch has styles.
DENSE = nn.Linear | nn.Embedding
# What `facts_of` a module are.
SAME = "layouts, dtypes, biases and styles"


def group_of(mesh: Any) -> dist.ProcessGroup:
    """The processes that share each layer; a BlockSparseError unless it is a mesh of one dimension."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        got = getattr(mesh, "shape", type(mesh).__name__)
        what = 'a DeviceMesh of one dimension, mesh["tp"] say'
        raise BlockSparseError.expected("device_mesh", what, got, Page.TENSOR_PARALLEL)
    return mesh.get_group()


def facts_of(label: str, module: nn.Module) -> dict[str, Fact]:
    """What has to be equal on all processes before a module is cut: its layouts, and which parameters there are."""
    facts = {}
    for name, each in module.named_modules(prefix=label):
        if isinstance(each, BlockSparseModule):
            facts[f"{name} {list(each.layout.shape)}"] = fact_of(each)
    have = [(name, each.dtype, each.device.type) for name, each in module.named_parameters()]
    return facts | {f"{label} (dtype, bias, device)": (0, digest(have))}


@contextmanager
def naming(layers: str) -> Iterator[None]:
    try:
        yield
    except BlockSparseError as error:
        raise BlockSparseError(f"{layers}: {error}" if layers else str(error)) from error


class _Style(ParallelStyle):
    """What both styles share: arguments, checks, and the part of a layer that takes the layer's place."""

    axis: ClassVar[int]  # of the weight, that is cut
    torchs: ClassVar[Any]  # PyTorch's style, for dense layers

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
    def shared(self) -> bool:
        """Whether the features that are cut are another layer's too, which is to be cut at the same places."""
        return (self.output if self.axis == 0 else self.input) == Shard(-1)

    def with_cut(self, cut: Cut) -> _Style:
        """The same style with this cut."""
        new = type(self)(
            input_layouts=self.input, output_layouts=self.output, use_local_output=self.use_local_output, cut=cut,
            multiple=self.multiple,
        )  # fmt: skip
        new.src_data_rank = self.src_data_rank
        return new

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, DENSE):
            style = self.torchs(
                input_layouts=self.input, output_layouts=self.output, use_local_output=self.use_local_output
            )
            style.src_data_rank = self.src_data_rank
            return style._apply(module, device_mesh)
        group = group_of(device_mesh)
        with agreed(group, SAME) as facts, naming(f"{type(module).__name__}({module.extra_repr()})"):
            facts |= facts_of(type(module).__name__, module)
            found, cut = self.planned(module, device_mesh)
        if self.cut is None and self.shared:
            self._warn(found, cut)
        if self.src_data_rank is not None:
            for parameter in module.parameters():
                if not parameter.is_meta:
                    dist.broadcast(parameter.detach(), group=group, group_src=self.src_data_rank)
        with torch.no_grad():
            found.replace(
                cut, device_mesh, input=self.input, output=self.output, use_local_output=self.use_local_output
            )
        return module

    def planned(self, module: nn.Module, mesh: DeviceMesh) -> tuple[Layer | Units, Cut]:
        """What is to be cut, and where: without messages, so that an error may be this process's only."""
        found = sliceable(module, self.axis)
        for parameter in module.parameters():
            if not parameter.is_meta and parameter.device.type != mesh.device_type:
                raise BlockSparseError.expected("parameters", f"on {mesh.device_type}, as the mesh", parameter.device)
        cut = self._cut_of(found, mesh.size())
        self._check_output(found, cut)
        return found, cut

    def _cut_of(self, found: Layer | Units, ranks: int) -> Cut:
        unit = math.lcm(found.block, self.multiple or 1)
        if self.cut is None and self.shared:
            cut = Cut.even(found.features, unit, ranks)
        elif self.cut is None:
            cut = Cut.balanced(found.features, unit, ranks, found.stored(unit))
        else:
            cut = self.cut
        if cut.ranks != ranks or not cut.fits(found.features, found.block):
            what = f"one for {ranks} processes and {found.features} features in blocks of {found.block}"
            raise BlockSparseError.expected("cut", what, cut)
        return cut

    def _check_output(self, found: Layer | Units, cut: Cut) -> None:
        """Raises a BlockSparseError where the outputs of the parts are not what the caller would take them for."""
        if self.axis != 0 or not self.shared:
            return
        if isinstance(found, Units) and found.module.bidirectional:
            expected = "Replicate() for an LSTM of two directions, whose outputs lie side by side"
            raise BlockSparseError.expected("output_layouts", expected, self.output)
        parts = [cut.features_of(rank, found.features) for rank in range(cut.ranks)]
        size = -(-found.features // cut.ranks)
        ranges = (np.arange(found.features)[rank * size :][:size] for rank in range(cut.ranks))
        if not self.use_local_output and not all(map(np.array_equal, parts, ranges)):
            expected = f"True where the processes have {[len(part) for part in parts]} features: a DTensor's are even"
            raise BlockSparseError.expected("use_local_output", expected, False)

    def _warn(self, found: Layer | Units, cut: Cut) -> None:
        stored = found.stored(cut.unit).sum(0)
        share = max(stored[list(part)].sum() for part in cut.parts) / max(stored.sum(), 1)
        if share * cut.ranks > UNEVEN and dist.get_rank() == 0:
            warnings.warn(
                f"one of {cut.ranks} processes gets {share:.0%} of the blocks of {found.module}: "
                "blocksparse.distributed.parallelize_module finds cuts that balance them",
                SparsityWarning,
                stacklevel=5,
            )

    def __repr__(self) -> str:
        more = "" if self.cut is None else f", cut={self.cut}"
        more += "" if self.multiple is None else f", multiple={self.multiple}"
        return (
            f"{type(self).__name__}(input_layouts={self.input}, output_layouts={self.output}, "
            f"use_local_output={self.use_local_output}{more})"
        )


class ColwiseParallel(_Style):
    """Cuts the outputs of a block-sparse layer over the processes of a mesh: each keeps some rows of blocks.

    A `ParallelStyle` for `torch.distributed.tensor.parallel.parallelize_module`, which becomes PyTorch's own
    ColwiseParallel for dense layers.

    Args:
        input_layouts: how the input is over the processes: Replicate() by default; `Shard(dim)` of a sequence or a
            batch, which is gathered.
        output_layouts: `Shard(-1)` by default: each process has its features, of convolutions its channels.
            Replicate() gathers them, `Shard(dim)` cuts another axis.
        use_local_output: whether the output is a plain tensor, not a DTensor.
        cut: which features each process has, so that the layers that read them have the same. By default ranges of as
            many features each where the output stays cut, and parts that store as many blocks where it is gathered.
        multiple: how many features stay together, `head_dim` for attention.

    Raises:
        BlockSparseError: in `parallelize_module`, on every process: layouts that differ, a weight of fewer rows of
            blocks than processes, a module of another kind, one that is parallel already, or on another device.

    >>> from torch.distributed.tensor import Replicate
    >>> ColwiseParallel(output_layouts=Replicate())
    ColwiseParallel(input_layouts=R, output_layouts=R, use_local_output=True)

    Source: Shoeybi et al., Megatron-LM: training multi-billion parameter language models using model parallelism
    (2019); Korthikanti et al., Reducing activation recomputation in large transformer models (2022).
    """

    axis, torchs = 0, parallel.ColwiseParallel


class RowwiseParallel(_Style):
    """Cuts the inputs of a block-sparse layer over the processes of a mesh: each keeps some columns of blocks.

    The processes' outputs are summed; bias and activation come after the sum.

    Args:
        input_layouts: `Shard(-1)` by default: the features that a layer with ColwiseParallel gives; Replicate() takes
            them from the whole, `Shard(dim)` gathers another axis first.
        output_layouts: Replicate() by default; `Shard(1)`, say, for a sequence that stays cut (sequence parallelism),
            by a reduce-scatter.
        use_local_output, cut, multiple: as for `ColwiseParallel`.

    Raises:
        BlockSparseError: as `ColwiseParallel`; in the call, an input with other features than this process has.

    >>> from torch.distributed.tensor import Shard
    >>> RowwiseParallel(output_layouts=Shard(1))
    RowwiseParallel(input_layouts=S(-1), output_layouts=S(1), use_local_output=True)
    """

    axis, torchs = 1, parallel.RowwiseParallel
