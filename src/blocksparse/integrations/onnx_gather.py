"""Block-sparse layers as ONNX operators: per class of rows of blocks, a Gather of the inputs and a batched MatMul."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..conversion.densify import ACTIVATIONS
from ..layout import BlockLayout
from ..nn.conv import Conv1d, Conv2d, Conv3d
from ..nn.linear import Linear
from ..nn.module import check_parameters
from ..nn.multi_weight import MultiWeightModule
from ..nn.weight_norm import WeightNorm
from ..surgery.carry import carry_over
from ..surgery.replace import check_replaceable, replace_modules

# A further class of rows costs a runtime about as much as multiplying by so many weights.
CLASS_COST = 8192
# Rows and columns. With smaller blocks the indices and copies cost more than the weights that are saved.
SMALLEST_BLOCK = 8


def with_gathers(model: nn.Module) -> nn.Module:
    """Replace the block-sparse linear layers and 1 x 1 convolutions of a model by `GatherLinear`, in place."""
    inner = {
        child
        for module in model.modules()
        if isinstance(module, MultiWeightModule | WeightNorm)
        for child in list(module.modules())[1:]
    }
    names = {module: name for name, module in model.named_modules() if _can_gather(module) and module not in inner}
    for module, name in names.items():
        check_parameters(module, name or "model")
    check_replaceable(model, names)
    return replace_modules(
        model, {module: carry_over(module, GatherLinear(module), name) for module, name in names.items()}
    )


def _can_gather(module: nn.Module) -> bool:
    """Return whether a module is a product with one sparse matrix, of blocks that are not too small."""
    layer: Any = module
    if type(layer) in (Conv1d, Conv2d, Conv3d):
        is_product = {*layer.kernel_size, *layer.stride} == {1} and set(layer.padding) == {0}
    else:
        is_product = type(layer) is Linear
    return is_product and layer.layout.density < 1 and min(layer.layout.block_shape) >= SMALLEST_BLOCK


class GatherLinear(nn.Module):
    """A block-sparse linear layer or 1 x 1 convolution as operators that ONNX has, for the export only.

    Features come first, `[in_features, tokens]`, so that gathering blocks of inputs copies whole rows, and the batched
    product of each class writes whole rows of blocks.
    """

    def __init__(self, layer: Any):
        super().__init__()
        layout, values = layer.layout, layer.values.detach()
        self.block, self.grid = layout.block_shape, layout.grid
        self.outputs, self.inputs = layer.weight_shape
        self.spatial = values.dim() - 3
        self.activation = ACTIVATIONS[layer.activation]() if layer.activation else None
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)
        values = values.reshape(values.shape[:3])
        classes = classes_of_rows(np.diff(layout.row_start), CLASS_COST / (self.block[0] * self.block[1]))
        self.classes = len(classes)
        for number, rows in enumerate(classes):
            weight, columns = _padded_rows(layout, values, rows)
            self.register_buffer(f"weight{number}", weight)
            self.register_buffer(f"columns{number}", columns)
        order = np.argsort(np.concatenate(classes), kind="stable")
        is_sorted = bool((order == np.arange(order.size)).all())
        self.register_buffer("order", None if is_sorted else torch.from_numpy(order).to(values.device))

    def forward(self, input: Tensor) -> Tensor:
        """Return activation(input W^T + bias)."""
        axis = input.dim() - 1 - self.spatial
        x = input.transpose(0, axis)
        sizes = x.shape[1:]
        x = x if len(sizes) == 1 else x.reshape(self.inputs, -1)
        if padding := self.grid[1] * self.block[1] - self.inputs:
            x = F.pad(x, (0, 0, 0, padding))
        x = x.reshape(self.grid[1], self.block[1], -1)
        rows = []
        for number in range(self.classes):
            weight: Any = getattr(self, f"weight{number}")
            columns: Any = getattr(self, f"columns{number}")
            rows.append(weight @ x.index_select(0, columns).reshape(weight.shape[0], weight.shape[2], -1))
        order: Any = self.order
        y = rows[0] if self.classes == 1 else torch.cat(rows)
        y = y if order is None else y.index_select(0, order)
        y = y.reshape(self.grid[0] * self.block[0], -1)
        if self.grid[0] * self.block[0] != self.outputs:
            y = y[: self.outputs]
        if self.bias is not None:
            y = y + self.bias.unsqueeze(1)
        y = (y if len(sizes) == 1 else y.reshape(self.outputs, *sizes)).transpose(0, axis)
        return y if self.activation is None else self.activation(y)


def classes_of_rows(counts: np.ndarray, cost: float) -> list[np.ndarray]:
    """Divide rows of blocks into classes that store the number of blocks of their longest row for each row.

    The classes minimise the stored blocks plus a cost per class.

    Args:
        counts: the number of blocks of each row.
        cost: of a class, in blocks.

    Returns:
        The indices of the rows of each class.

    >>> import numpy as np
    >>> [rows.tolist() for rows in classes_of_rows(np.array([3, 9, 0, 3, 8]), cost=1)]
    [[2], [0, 3], [4, 1]]
    """
    order = np.argsort(counts, kind="stable")
    lengths, starts = np.unique(counts[order], return_index=True)
    ends = np.append(starts, counts.size)
    best, begin = np.zeros(lengths.size + 1), np.zeros(lengths.size + 1, dtype=int)
    for last in range(1, lengths.size + 1):
        # Rows without blocks also store one.
        totals = best[:last] + max(lengths[last - 1], 1) * (ends[last] - ends[:last]) + cost
        begin[last] = np.argmin(totals)
        best[last] = totals[begin[last]]
    classes, last = [], lengths.size
    while last:
        classes.append(order[ends[begin[last]] : ends[last]])
        last = begin[last]
    return classes[::-1]


def _padded_rows(layout: BlockLayout, values: Tensor, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return some rows of blocks, padded with blocks of zeros to the length of the longest.

    Returns:
        `[rows, block_out, blocks * block_in]`, and int64 `[rows * blocks]`, the column of each block.
    """
    starts, counts = layout.row_start[rows].astype(np.int64), np.diff(layout.row_start)[rows]
    position = np.arange(max(int(counts.max()), 1))
    stored = position < counts[:, None]
    # Padding refers to a block of zeros behind the stored ones, and to the first column.
    source = torch.from_numpy(np.where(stored, starts[:, None] + position, layout.nnz))
    columns = torch.from_numpy(np.append(layout.col_of_block.astype(np.int64), 0))[source]
    values = F.pad(values, (0, 0, 0, 0, 0, 1))
    weight = values[source.to(values.device)].transpose(1, 2).reshape(len(rows), layout.block_shape[0], -1)
    return weight.contiguous(), columns.flatten().to(values.device)
