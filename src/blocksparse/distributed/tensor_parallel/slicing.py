"""What of a module is cut, what it stores for each of these features, and how the part of a process takes its place."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import BlockSparseError
from ...layout import BlockLayout
from ...nn.conv import Convolution
from ...nn.linear import Linear
from ...nn.lstm import LSTM
from ...nn.module import BlockSparseModule, Weight, replace_data
from ...nn.tensor_parallel_part import TensorParallelPart
from .cut import Cut
from .modules import Boundary, Colwise, ColwiseLSTM, Rowwise
from .moves import Spread


def sliceable(module: nn.Module, axis: int) -> Layer | Units:
    """The module as something to cut along an axis of its weights; a BlockSparseError where it cannot be."""
    name = type(module).__name__
    if hasattr(module, "boundary"):
        raise BlockSparseError.expected(name, "a module that is not parallel yet", repr(module))
    kinds = "blocksparse.nn's Linear, Conv1d to 3d, ConvTranspose1d to 3d" + ", LSTM" * (axis == 0)
    if isinstance(module, LSTM) and axis == 0:
        found: Layer | Units = Units(module)
    elif isinstance(module, Linear | Convolution) and "forward" not in vars(module) and _has_own_forward(module):
        found = Layer(module, axis)
    else:
        raise BlockSparseError.expected("a module of the plan", f"one of {kinds}", name)
    for parameter in module.parameters():
        if type(parameter) is not nn.Parameter:
            got = f"{type(parameter).__name__}: call parallelize_module before fully_shard"
            raise BlockSparseError.expected(f"parameters of {name}", "plain ones", got)
    for key, each in module.named_modules():
        if isinstance(each, BlockSparseModule):
            _check_own(f"{key}.values".lstrip("."), each.values, each.layout.nnz)
    if isinstance(found, Layer) and found.module.bias is not None:
        _check_own("bias", found.module.bias, found.module.weight_shape[0])
    return found


def _check_own(name: str, parameter: Tensor, size: int) -> None:
    if len(parameter) != size:
        got = f"{len(parameter)}: is it another module's too, that is parallel already?"
        raise BlockSparseError.expected(name, f"one for {size}", got)


class Layer:
    """A linear layer or a convolution, of which outputs (axis 0) or inputs (axis 1) are cut."""

    def __init__(self, module: Any, axis: int):
        self.module, self.axis = module, axis
        self.features: int = module.weight_shape[axis]
        self.block: int = module.layout.block_shape[axis]

    def stored(self, unit: int) -> np.ndarray:
        """The numbers that each weight stores for each unit of features, `[weights, units]`."""
        return _stored(self.module, self.axis, self.features, unit)[None]

    def replace(self, cut: Cut, mesh: Any, **options: Any) -> None:
        """Leaves the part of this process, in place."""
        module, axis = self.module, self.axis
        spread = Spread(mesh.get_group(), tuple(cut.features_of(rank, self.features) for rank in range(cut.ranks)))
        other, is_conv = module.weight_shape[1 - axis], isinstance(module, Convolution)
        sizes = ("out_channels", "in_channels") if is_conv else ("out_features", "in_features")
        setattr(module, sizes[axis], len(spread.here))
        cut_weight(module, axis, cut.lines_of(spread.rank, self.features, self.block), spread.group)
        module.cut_parameters = {}
        if axis == 0 and module.bias is not None:
            cut_parameter(module, "bias", spread)
        module.boundary = Boundary(mesh, spread, other, -1 - module.axes if is_conv else -1, **options)
        kind: Any = type(module)
        module.__class__ = parallel_class(Rowwise if axis else Colwise, kind)


class Units:
    """An LSTM, of which hidden units are cut: all four gates of each, in all layers and directions."""

    def __init__(self, module: LSTM):
        self.module, self.features = module, module.hidden_size
        self.weights = {name: each for name, each in module.named_children() if isinstance(each, Weight)}
        if type(module) is not LSTM or module.proj_size:
            got = f"proj_size={module.proj_size}" if type(module) is LSTM else type(module).__name__
            raise BlockSparseError.expected("a module of the plan", "a blocksparse.nn.LSTM without projection", got)
        self.padded = module._hidden.padded
        for name in module.sizes:
            if module.sizes[name][0].padded != self.padded:
                expected = f"{self.padded} rows a gate, as the other weights have with their blocks"
                raise BlockSparseError.expected(name, expected, module.sizes[name][0].padded)
        self.block = math.lcm(1, *(size for each in self.weights.values() for size in each.layout.block_shape))

    def stored(self, unit: int) -> np.ndarray:
        """As of a layer; of dense weights all numbers."""
        units = -(-self.features // unit)
        rows = []
        for name, (_, in_) in self.module.sizes.items():
            if name in self.weights:
                rows.append(_stored(self.weights[name], 0, self.padded, unit))
            else:
                rows.append(np.full(units, 4.0 * unit * in_.padded))
        return np.stack(rows)

    def replace(self, cut: Cut, mesh: Any, **options: Any) -> None:
        module, group = self.module, mesh.get_group()
        real = Spread(group, tuple(cut.features_of(rank, self.features) for rank in range(cut.ranks)))
        whole = Cut(self.padded, cut.unit * (self.features // cut.features), cut.parts)
        units = Spread(group, tuple(whole.features_of(rank, self.padded) for rank in range(cut.ranks)))
        rows = Spread(group, tuple(_of_gates(part, self.padded) for part in units.index))
        module.cut_parameters = {}  # type: ignore[assignment]
        for name, _ in list(module.named_parameters(recurse=False)):
            cut_parameter(module, name, rows)
        for name, weight in self.weights.items():
            block = weight.layout.block_shape[0]
            lines = np.unique(units.here // block)
            cut_weight(weight, 0, _of_gates(lines, self.padded // block), group)
            _, in_ = module.sizes[name]
            module.sizes[name] = type(module._hidden)(len(real.here), len(units.here)), in_
        state: Any = module
        state.units = units
        state.boundary = Boundary(mesh, real, module.input_size, -1, **options)
        kind: Any = LSTM
        module.__class__ = parallel_class(ColwiseLSTM, kind)


def _of_gates(index: np.ndarray, size: int) -> np.ndarray:
    """The same of each of an LSTM's four gates, of `size` each, one above the other."""
    return (np.arange(4)[:, None] * size + index).ravel()


def _stored(module: Any, axis: int, features: int, unit: int) -> np.ndarray:
    layout = module.layout
    first = (layout.row_of_block, layout.col_of_block)[axis] * layout.block_shape[axis]
    numbers = math.prod(module.values.shape[1:])
    return np.bincount(first % features // unit, minlength=-(-features // unit)) * float(numbers)


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
    used = None if module.used is None else list(module.used)
    index = (layout.row_of_block, layout.col_of_block)
    keep = np.isin(index[axis], lines)
    places = [each[keep] for each in index]
    places[axis] = np.searchsorted(lines, places[axis])
    grid = tuple(len(lines) if k == axis else size for k, size in enumerate(layout.grid))
    new = BlockLayout.from_indices(places[0], places[1], (grid[0], grid[1]), layout.block_shape)
    kept = torch.from_numpy(np.flatnonzero(keep)).to(module.values.device)
    module.part = TensorParallelPart(layout.grid, axis, lines, group)
    values = module.values.detach().index_select(0, kept)
    if isinstance(module, Weight):  # whose sizes are its layout's
        module._layout = new
        module.reset_layout_buffers()
    module.set_layout(new, values)
    if used is not None:
        used[axis] = used[axis].view(-1, layout.block_shape[axis])[torch.from_numpy(lines)].flatten()
        module._used = None if all(bool(side.all()) for side in used) else (used[0], used[1])


def cut_parameter(module: Any, name: str, spread: Spread) -> None:
    """Leaves of a dense parameter the rows of this process, in place, and notes which in `module.cut_parameters`."""
    parameter: Tensor = getattr(module, name)
    here = torch.from_numpy(spread.here).to(parameter.device)
    replace_data(parameter, parameter.detach().index_select(0, here))
    module.cut_parameters[name] = spread
