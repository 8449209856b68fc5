"""The products of all experts on the CPU: each is one call of the compiled core, which shares experts among threads."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...layout import BlockLayout
from .. import cpu_core
from ..checks import contiguous_features
from ..cpu_core import DTYPES
from ..cpu_plan import row_plan
from ..linear import LINEAR
from ..linear import cpu as linear_cpu
from ..registry import features_of
from .parts import parts_of


class _Groups(NamedTuple):
    """The plans of all experts, in the order of the experts.

    plans: objects of the compiled core, for x W^T and for x W.
    blocks: int64 `[experts + 1]`, where the blocks of each expert start, and the end.
    row, col: int32 `[nnz]`, the place of each block within its expert's weight.
    """

    plans: tuple[list[Any], list[Any]]
    blocks: np.ndarray
    row: np.ndarray
    col: np.ndarray


def serves(layout: BlockLayout, x: Tensor, forward: bool = False) -> bool:
    """Return whether one call of the core serves all experts of a layout, faster than a call for each.

    With dense weights, it is faster in forward passes only.
    """
    if layout.block_shape == (1, 1) or LINEAR.on(x.device, x.dtype) is not linear_cpu:
        return False  # single weights have kernels of their own
    if layout.nnz < layout.grid[0] * layout.grid[1]:
        return True
    return forward and layout.grid[1] == 1 and x.dtype in (torch.float32, torch.float64)


def _groups(layout: BlockLayout, experts: int) -> _Groups:
    def make() -> _Groups:
        parts = parts_of(layout, experts)
        plans = tuple([row_plan(part.layout, transpose) for part in parts] for transpose in (False, True))
        height = layout.grid[0] // experts
        return _Groups(
            (plans[0], plans[1]),
            np.array([0, *(part.blocks.stop for part in parts)], dtype=np.int64),
            (layout.row_of_block % height).astype(np.int32),
            layout.col_of_block.astype(np.int32),
        )

    return layout.derived(("expert plans", experts), make)


def expert_linear(x: Tensor, values: Tensor, layout: BlockLayout, starts: Tensor, transpose: bool) -> Tensor:
    """Return x W^T of each expert's rows, or x W with `transpose`; rows behind the last expert's are 0."""
    experts, rows = starts.shape[0] - 1, cpu_core.row_count(x)
    groups, (out, in_) = _groups(layout, experts), _features(layout, experts, transpose)
    x, values = contiguous_features(x), values.data.contiguous()
    core, isa, (of_x, (values_address, _)) = cpu_core.arguments(
        ("x", x, (rows, in_), x.dtype), ("values", values, layout.values_shape, x.dtype)
    )
    y, y_address = cpu_core.allocate((rows, out), x)
    y[int(starts[-1]) :].zero_()
    core.expert_linear(
        plans=groups.plans[transpose], isa=isa, dtype=DTYPES[x.dtype], rows=starts.numpy(), blocks=groups.blocks,
        x=of_x, values=values_address, y=y_address,
    )  # fmt: skip
    return y


def expert_linear_wgrad(grad: Tensor, x: Tensor, layout: BlockLayout, starts: Tensor) -> Tensor:
    """Return the stored blocks of grad^T x of each expert's rows; those of an expert without rows are 0."""
    experts, rows = starts.shape[0] - 1, cpu_core.row_count(x)
    groups, (out, in_) = _groups(layout, experts), _features(layout, experts)
    grad, x = contiguous_features(grad), contiguous_features(x)
    core, isa, (of_grad, of_x) = cpu_core.arguments(
        ("grad", grad, (rows, out), x.dtype), ("x", x, (rows, in_), x.dtype)
    )
    values, address = cpu_core.allocate(layout.values_shape, x)
    core.expert_linear_wgrad(
        isa=isa, dtype=DTYPES[x.dtype], block=layout.block_shape, features=(out, in_), rows=starts.numpy(),
        blocks=groups.blocks, grad=of_grad, x=of_x, values=address, row=groups.row, col=groups.col,
    )  # fmt: skip
    return values


def _features(layout: BlockLayout, experts: int, transpose: bool = False) -> tuple[int, int]:
    """Return (out, in) of the product with one expert's weight, or with the transposed weight."""
    return features_of((layout.grid[0] // experts, layout.grid[1]), layout.block_shape, transpose)
