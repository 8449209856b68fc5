"""The styles that `torch.distributed.tensor.parallel.parallelize_module` applies to block-sparse layers."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, parallel
from torch.distributed.tensor.parallel import ParallelStyle

from ...checked import is_int
from ...errors import BlockSparseError, SparsityWarning
from ...layout import BlockLayout
from ...nn.conv import Convolution
from ...nn.linear import Linear
from ...nn.module import BlockSparseModule, replace_data
from ...nn.part import Part
from ...surgery.agreement import Fact, agree, fact_of
from .cut import Cut
from .modules import Boundary, Colwise, Rowwise
from .moves import Spread

# Above this a warning says that the processes have very different parts.
UNEVEN = 1.1


class _Style(ParallelStyle):
    """What both styles share: arguments, checks, and the part of a layer that takes the layer's place."""

    axis: ClassVar[int]  # of the weight, that is cut
    kind: ClassVar[type]  # what comes before the class of the layer
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

    def unit_of(self, module: Any) -> tuple[int, int]:
        """How many features of a layer are cut, and how many of them stay together."""
        block = module.layout.block_shape[self.axis]
        return module.weight_shape[self.axis], math.lcm(block, self.multiple or 1)

    def stored(self, module: Any, unit: int) -> np.ndarray:
        """What the weight stores for each unit of features, `[units]`."""
        layout = module.layout
        lines = (layout.row_of_block, layout.col_of_block)[self.axis]
        numbers = math.prod(module.values.shape[1:])
        units = -(-module.weight_shape[self.axis] // unit)
        return np.bincount(lines // (unit // layout.block_shape[self.axis]), minlength=units) * float(numbers)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Linear | nn.Embedding):
            style = self.torchs(
                input_layouts=self.input, output_layouts=self.output, use_local_output=self.use_local_output
            )
            style.src_data_rank = self.src_data_rank
            return style._apply(module, device_mesh)
        if not isinstance(device_mesh, DeviceMesh) or device_mesh.ndim != 1:
            got = getattr(device_mesh, "shape", type(device_mesh).__name__)
            raise BlockSparseError.expected("device_mesh", 'a DeviceMesh of one dimension, mesh["tp"] say', got)
        group = device_mesh.get_group()
        facts: dict[str, Fact] = {}
        problem = None
        try:
            self._check(module, device_mesh)
            weights = [(name, each) for name, each in module.named_modules() if isinstance(each, BlockSparseModule)]
            facts = {f"{type(module).__name__} {name}".strip(): fact_of(weight) for name, weight in weights}
            cut = self._cut_of(module, len(dist.get_process_group_ranks(group)))
        except BlockSparseError as error:
            problem = str(error)
        agree(facts, group, problem)
        if problem is not None:  # a mesh of one process
            raise BlockSparseError(problem)
        if self.src_data_rank is not None:
            for parameter in module.parameters():
                if not parameter.is_meta:
                    dist.broadcast(parameter.detach(), group=group, group_src=self.src_data_rank)
        with torch.no_grad():
            self._replace(module, device_mesh, cut)
        return module

    def _check(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Raises a BlockSparseError for a module that cannot be cut."""
        name = type(module).__name__
        if isinstance(module, Colwise | Rowwise) or any(getattr(m, "part", None) is not None for m in module.modules()):
            raise BlockSparseError.expected(name, "a module that is not parallel yet", repr(module))
        self._check_kind(module)
        for parameter in module.parameters():
            if type(parameter) is not nn.Parameter:
                got = f"{type(parameter).__name__}: call parallelize_module before fully_shard"
                raise BlockSparseError.expected(f"parameters of {name}", "plain ones", got)
            if not parameter.is_meta and parameter.device.type != mesh.device_type:
                raise BlockSparseError.expected(
                    f"parameters of {name}", f"on {mesh.device_type}, as the mesh", parameter.device
                )

    def _check_kind(self, module: nn.Module) -> None:
        if not isinstance(module, Linear | Convolution) or "forward" in vars(module) or not _has_own_forward(module):
            kinds = "blocksparse.nn's Linear, Conv1d to 3d, ConvTranspose1d to 3d"
            raise BlockSparseError.expected("a module of the plan", f"one of {kinds}", type(module).__name__)

    def _cut_of(self, module: Any, ranks: int) -> Cut:
        features, unit = self.unit_of(module)
        block = module.layout.block_shape[self.axis]
        if self.cut is None and self.shared:
            cut = Cut.even(features, unit, ranks)
            self._warn(module, cut)
        elif self.cut is None:
            cut = Cut.balanced(features, unit, ranks, self.stored(module, unit)[None])
        else:
            cut = self.cut
        if cut.ranks != ranks or not cut.fits(features, block):
            what = f"one for {ranks} processes and {features} features in blocks of {block}"
            raise BlockSparseError.expected("cut", what, cut)
        return cut

    def _warn(self, module: Any, cut: Cut) -> None:
        stored = self.stored(module, cut.unit)
        share = max(stored[list(part)].sum() for part in cut.parts) / max(stored.sum(), 1)
        if share * cut.ranks > UNEVEN and (not dist.is_initialized() or dist.get_rank() == 0):
            warnings.warn(
                f"one of {cut.ranks} processes gets {share:.0%} of the blocks of {module}: "
                "blocksparse.distributed.parallelize_module finds cuts that balance them",
                SparsityWarning,
                stacklevel=5,
            )

    def _replace(self, module: Any, mesh: DeviceMesh, cut: Cut) -> None:
        group, axis = mesh.get_group(), self.axis
        features, other = module.weight_shape[axis], module.weight_shape[1 - axis]
        spread = Spread(group, tuple(cut.features_of(rank, features) for rank in range(cut.ranks)))
        lines = cut.lines_of(spread.rank, features, module.layout.block_shape[axis])
        sizes = ("out_channels", "in_channels") if isinstance(module, Convolution) else ("out_features", "in_features")
        setattr(module, sizes[axis], len(spread.here))
        cut_weight(module, axis, lines, group)
        module.cut_parameters = {}
        if axis == 0 and module.bias is not None:
            cut_parameter(module, "bias", spread)
        behind = -1 - module.axes if isinstance(module, Convolution) else -1
        module.boundary = Boundary(mesh, spread, other, behind, self.input, self.output, self.use_local_output)
        kind: Any = type(module)
        module.__class__ = parallel_class(self.kind, kind)

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

    axis, kind, torchs = 0, Colwise, parallel.ColwiseParallel


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

    axis, kind, torchs = 1, Rowwise, parallel.RowwiseParallel


@cache
def parallel_class(kind: Any, of: Any) -> type:
    """The class of a layer with another behaviour before it."""
    return type(f"{kind.__name__}{of.__name__}", (kind, of), {"__module__": kind.__module__})


def _has_own_forward(module: nn.Module) -> bool:
    """Whether the layer computes as its class in blocksparse.nn, not as a class of a user's."""
    ours: Any = next(each for each in type(module).__mro__ if each.__module__.startswith("blocksparse.nn."))
    return type(module).forward is ours.forward


def cut_weight(module: BlockSparseModule, axis: int, lines: np.ndarray, group: Any) -> None:
    """Leaves of a weight these rows (columns) of blocks, in place."""
    layout = module.layout
    index = (layout.row_of_block, layout.col_of_block)
    keep = np.isin(index[axis], lines)
    places = [each[keep] for each in index]
    places[axis] = np.searchsorted(lines, places[axis])
    grid = tuple(len(lines) if k == axis else size for k, size in enumerate(layout.grid))
    new = BlockLayout.from_indices(places[0], places[1], (grid[0], grid[1]), layout.block_shape)
    kept = torch.from_numpy(np.flatnonzero(keep)).to(module.values.device)
    module.part = Part(layout.grid, axis, lines, group)
    module.set_layout(new, module.values.detach().index_select(0, kept))


def cut_parameter(module: Any, name: str, spread: Spread) -> None:
    """Leaves of a dense parameter the rows of this process, in place, and notes which in `module.cut_parameters`."""
    parameter: Tensor = getattr(module, name)
    here = torch.from_numpy(spread.here).to(parameter.device)
    replace_data(parameter, parameter.detach().index_select(0, here))
    module.cut_parameters[name] = spread
