"""Layers that tensor parallelism can shard: what a rank would store of them, and sharding them in place."""

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
from .collectives import AxisSharding
from .cut import Cut
from .modules import Colwise, ColwiseLSTM, LayerSharding, Rowwise


def shardable(module: nn.Module, axis: int) -> ShardableLayer | ShardableLSTM:
    """Return the module as one whose weights can be sharded along an axis; a BlockSparseError if they cannot be."""
    name = type(module).__name__
    if hasattr(module, "sharding"):
        raise BlockSparseError.expected(name, "a module that is not parallel yet", repr(module))
    kinds = "blocksparse.nn's Linear, Conv1d to 3d, ConvTranspose1d to 3d" + ", LSTM" * (axis == 0)
    layer: ShardableLayer | ShardableLSTM
    if isinstance(module, LSTM) and axis == 0:
        layer = ShardableLSTM(module)
    elif isinstance(module, Linear | Convolution) and "forward" not in vars(module) and _has_library_forward(module):
        layer = ShardableLayer(module, axis)
    else:
        raise BlockSparseError.expected("a module of the plan", f"one of {kinds}", name)
    for parameter in module.parameters():
        if type(parameter) is not nn.Parameter:
            got = f"{type(parameter).__name__}: call parallelize_module before fully_shard"
            raise BlockSparseError.expected(f"parameters of {name}", "plain ones", got)
    for key, each in module.named_modules():
        if isinstance(each, BlockSparseModule):
            _check_unshared(f"{key}.values".lstrip("."), each.values, each.layout.nnz)
    if isinstance(layer, ShardableLayer) and layer.module.bias is not None:
        _check_unshared("bias", layer.module.bias, layer.module.weight_shape[0])
    return layer


def _check_unshared(name: str, parameter: Tensor, size: int) -> None:
    """Raise a BlockSparseError if a parameter has another size, because another module shares and sharded it."""
    if len(parameter) != size:
        got = f"{len(parameter)}: is it another module's too, that is parallel already?"
        raise BlockSparseError.expected(name, f"one for {size}", got)


class ShardableLayer:
    """A linear layer or a convolution, whose outputs (axis 0) or inputs (axis 1) can be sharded.

    Attributes:
        features: how many features the axis has.
        block: how many features a block has.
    """

    def __init__(self, module: Any, axis: int):
        self.module, self.axis = module, axis
        self.features: int = module.weight_shape[axis]
        self.block: int = module.layout.block_shape[axis]

    def stored_per_unit(self, unit: int) -> np.ndarray:
        """Return how many values each weight stores for each unit of `unit` features, `[weights, units]`."""
        return _stored_per_unit(self.module, self.axis, self.features, unit)[None]

    def shard_(self, cut: Cut, mesh: Any, **options: Any) -> None:
        """Keep this rank's part of the layer, in place; `options` are those of `LayerSharding`."""
        module, axis = self.module, self.axis
        features = AxisSharding(
            mesh.get_group(), tuple(cut.features_of(rank, self.features) for rank in range(cut.ranks))
        )
        other, is_conv = module.weight_shape[1 - axis], isinstance(module, Convolution)
        sizes = ("out_channels", "in_channels") if is_conv else ("out_features", "in_features")
        setattr(module, sizes[axis], len(features.local_indices))
        shard_weight_(module, axis, cut.lines_of(features.rank, self.features, self.block), features.group)
        module.sharded_parameters = {}
        if axis == 0 and module.bias is not None:
            shard_parameter_(module, "bias", features)
        module.sharding = LayerSharding(mesh, features, other, -1 - module.axes if is_conv else -1, **options)
        kind: Any = type(module)
        module.__class__ = parallel_class(Rowwise if axis else Colwise, kind)


class ShardableLSTM:
    """An LSTM, whose hidden units can be sharded: all four gates of a unit, in all layers and directions.

    Attributes:
        features: how many hidden units it has.
        block: how many units must stay together.
        weights: its block-sparse weights by name.
        padded: how many rows each gate has, with padding.
    """

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

    def stored_per_unit(self, unit: int) -> np.ndarray:
        """Return how many values each weight stores for each unit of `unit` hidden units, `[weights, units]`."""
        units = -(-self.features // unit)
        rows = []
        for name, (_, in_) in self.module.sizes.items():
            if name in self.weights:
                rows.append(_stored_per_unit(self.weights[name], 0, self.padded, unit))
            else:
                rows.append(np.full(units, 4.0 * unit * in_.padded))
        return np.stack(rows)

    def shard_(self, cut: Cut, mesh: Any, **options: Any) -> None:
        """Keep this rank's part of the LSTM, in place; `options` are those of `LayerSharding`."""
        module, group = self.module, mesh.get_group()
        real = AxisSharding(group, tuple(cut.features_of(rank, self.features) for rank in range(cut.ranks)))
        padded_cut = Cut(self.padded, cut.unit * (self.features // cut.features), cut.parts)
        units = AxisSharding(group, tuple(padded_cut.features_of(rank, self.padded) for rank in range(cut.ranks)))
        rows = AxisSharding(group, tuple(_in_all_gates(part, self.padded) for part in units.indices))
        module.sharded_parameters = {}  # type: ignore[assignment]
        for name, _ in list(module.named_parameters(recurse=False)):
            shard_parameter_(module, name, rows)
        for name, weight in self.weights.items():
            block = weight.layout.block_shape[0]
            lines = np.unique(units.local_indices // block)
            shard_weight_(weight, 0, _in_all_gates(lines, self.padded // block), group)
            _, in_ = module.sizes[name]
            module.sizes[name] = type(module._hidden)(len(real.local_indices), len(units.local_indices)), in_
        attributes: Any = module
        attributes.units = units
        attributes.sharding = LayerSharding(mesh, real, module.input_size, -1, **options)
        kind: Any = LSTM
        module.__class__ = parallel_class(ColwiseLSTM, kind)


def _in_all_gates(index: np.ndarray, size: int) -> np.ndarray:
    """Return these indices in each of an LSTM's four gates, which lie one above the other with `size` rows each."""
    return (np.arange(4)[:, None] * size + index).ravel()


def _stored_per_unit(module: Any, axis: int, features: int, unit: int) -> np.ndarray:
    """Return how many values a weight stores for each unit; a weight of several gates has `features` rows a gate."""
    layout = module.layout
    first = (layout.row_of_block, layout.col_of_block)[axis] * layout.block_shape[axis]
    values_per_block = math.prod(module.values.shape[1:])
    return np.bincount(first % features // unit, minlength=-(-features // unit)) * float(values_per_block)


@cache
def parallel_class(mixin: Any, of: Any) -> type:
    """Return the class of a layer with a mixin in front of it."""
    return type(f"{mixin.__name__}{of.__name__}", (mixin, of), {"__module__": mixin.__module__})


def _has_library_forward(module: nn.Module) -> bool:
    """Return whether a layer has the forward of its class in blocksparse.nn; a user's subclass may override it."""
    ours: Any = next(each for each in type(module).__mro__ if each.__module__.startswith("blocksparse.nn."))
    return type(module).forward is ours.forward


def shard_weight_(module: BlockSparseModule, axis: int, lines: np.ndarray, group: Any) -> None:
    """Keep these rows (axis 0) or columns (axis 1) of blocks of a weight, in place."""
    layout = module.layout
    used = None if module.used is None else list(module.used)
    index = (layout.row_of_block, layout.col_of_block)
    keep = np.isin(index[axis], lines)
    places = [each[keep] for each in index]
    places[axis] = np.searchsorted(lines, places[axis])
    grid = tuple(len(lines) if k == axis else size for k, size in enumerate(layout.grid))
    new = BlockLayout.from_indices(places[0], places[1], (grid[0], grid[1]), layout.block_shape)
    positions = torch.from_numpy(np.flatnonzero(keep)).to(module.values.device)
    module.part = TensorParallelPart(layout.grid, axis, lines, group)
    values = module.values.detach().index_select(0, positions)
    if isinstance(module, Weight):  # it takes its sizes from its layout
        module._layout = new
        module.reset_layout_buffers()
    module.set_layout(new, values)
    if used is not None:
        used[axis] = used[axis].view(-1, layout.block_shape[axis])[torch.from_numpy(lines)].flatten()
        module._used_rows_and_columns = None if all(bool(side.all()) for side in used) else (used[0], used[1])


def shard_parameter_(module: Any, name: str, rows: AxisSharding) -> None:
    """Keep this rank's rows of a dense parameter, in place; `module.sharded_parameters` notes which."""
    parameter: Tensor = getattr(module, name)
    local = torch.from_numpy(rows.local_indices).to(parameter.device)
    replace_data(parameter, parameter.detach().index_select(0, local))
    module.sharded_parameters[name] = rows
