"""The linear products of a mixture's experts: tokens sorted by expert, each group multiplied by its expert's weight."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..checks import autocast, check_kinds, check_same, described
from .op import EXPERT_LINEAR, EXPERT_LINEAR_WGRAD
from .parts import parts_of
from .route import Routes, collect, route, spread

__all__ = ["EXPERT_LINEAR", "EXPERT_LINEAR_WGRAD", "Routes", "collect", "expert_linear", "parts_of", "route", "spread"]


def expert_linear(x: Tensor, values: Tensor, layout: BlockLayout, starts: Tensor) -> Tensor:
    """Multiply each group of rows by its expert's weight: y[a:b] = x[a:b] W_e^T, a = starts[e], b = starts[e+1].

    Args:
        x: `[rows, in_features]`, sorted by expert.
        values: `[nnz, block_out, block_in]`, the blocks of all weights, expert by expert.
        layout: which blocks of `[experts * out_features, in_features]` these are.
        starts: int64 `[experts + 1]` on the CPU: the first row of each expert's group, and the end of the last group.

    Dtypes, devices and autocast are those of `linear`. The result can be differentiated any number of times in x and
    values. Time grows with the rows and stored blocks of each expert. An expert without rows costs only the zeros of
    its gradient.

    Returns:
        `[rows, out_features]`; exactly 0 for rows outside all groups.

    Raises:
        BlockSparseError: sizes do not fit, or dtypes or devices are mixed.

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.random((3 * 64, 32), block_size=16, density=0.5, seed=0)
        >>> starts = torch.tensor([0, 2, 2, 5])
        >>> expert_linear(torch.randn(5, 32), torch.randn(layout.values_shape), layout, starts).shape
        torch.Size([5, 64])
    """
    check_kinds(layout, x=x, values=values)
    x, values, _ = autocast(x, values, None)
    is_1d = isinstance(starts, Tensor) and starts.dim() == 1 and len(starts) > 1
    if not is_1d or starts.dtype != torch.int64 or starts.device.type != "cpu":
        got = described(starts) if isinstance(starts, Tensor) else type(starts).__name__
        raise BlockSparseError.expected("starts", "int64 [experts + 1] on the CPU, as `route` returns", got)
    experts = starts.shape[0] - 1
    if layout.grid[0] % experts:
        raise BlockSparseError.expected("layout", f"a multiple of {experts} rows of blocks", repr(layout))
    if x.dim() != 2 or x.shape[1] != layout.shape[1]:
        raise BlockSparseError.expected("x", f"[rows, {layout.shape[1]}] for {layout!r}", list(x.shape))
    if tuple(values.shape) != layout.values_shape:
        raise BlockSparseError.expected("values", f"{list(layout.values_shape)} for {layout!r}", list(values.shape))
    check_same(x, values, None)
    return EXPERT_LINEAR((values, x), layout, (starts, False))
