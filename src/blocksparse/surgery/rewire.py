"""Changes the layout of a weight in place; values and optimizer state follow their blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BlockSparseError
from ..indices import Replacement
from ..layout import BlockLayout
from ..nn.module import BlockSparseModule
from .optimizer import check_optimizer
from .weight_handle import NewValues, WeightHandle, check_new_values, handle_of

OnLayoutChange = Callable[[BlockSparseModule, Tensor], None]


def rewire(
    module: BlockSparseModule | WeightHandle,
    drop: Any,
    rows: Any,
    cols: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    new: NewValues | None = None,
    on_layout_change: OnLayoutChange | None = None,
) -> Tensor:
    """Drop some blocks of a module's weight and grow others.

    The parameter stays the same object, so optimizers continue with it, and the state of blocks that stay follows them.
    For new blocks momentum and first moments start at 0. Second moments and sums of squares start at their mean over
    the blocks that stay: the count of steps is one for the whole parameter, so from 0, Adam would correct them too
    little and move new blocks by several learning rates. The gradient is cleared.

    Args:
        module: any block-sparse module: a layer, or one of the weights of a recurrent layer.
        drop: ints, the positions in `values` of the blocks to drop.
        rows, cols: ints, the grid position of each new block; positions dropped in the same call are free.
        optimizer: an optimizer of `module.values`, or a wrapper of it. Others that have stepped on it are found.
        new: the values of the new blocks, `[len(rows), *values.shape[1:]]` (default zeros). Or a function that returns
            some of them, given their int64 positions among the new blocks in sorted order.
        on_layout_change: a function called with the module and the returned source, to move other data per weight, such
            as a running mean: `mean = remap_blocks(mean, source)`.

    Returns:
        int64 `[new nnz]` on the values' device: the old position of each block, -1 for new blocks.

    Raises:
        BlockSparseError: a module that is not block-sparse; an optimizer without its parameter, or whose state cannot
            follow (LBFGS); positions that are out of range, repeated, or taken; new values of another shape, or
            complex ones of real weights. Nothing is changed then.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.Linear(3, 2, layout=bs.BlockLayout([[1, 1, 0], [0, 0, 1]], block_size=1))
    >>> bs.sparsity.rewire(layer, drop=[1], rows=[1], cols=[0])
    tensor([ 0, -1,  2])
    >>> layer.layout.mask().int().tolist(), layer.values[1].item()
    ([[1, 0, 0], [1, 0, 1]], 0.0)
    """
    handle = handle_of(module)
    values = handle.parameter
    check_optimizer(optimizer, values, "module.values")
    check_on_layout_change(on_layout_change)
    layout, source = handle.layout.replaced(drop, rows, cols)
    if callable(new) and not isinstance(new, Tensor):
        new = partial(_values_of_function, new, values)
    elif new is not None:
        check_new_values("new", new, len(rows), values)
        # Blocks are sorted by row, then by column.
        rows, cols = (torch.as_tensor(lines, device="cpu").long() for lines in (rows, cols))
        new = partial(_values_at, new.detach(), (rows * layout.grid[1] + cols).argsort())
    return _set_layout(handle, layout, source, new, optimizer, on_layout_change)


def replace_blocks(
    handle: WeightHandle,
    change: Replacement,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    new: NewValues | None = None,
    on_layout_change: OnLayoutChange | None = None,
) -> Tensor:
    """Apply a change to a weight's layout, and return the source of its blocks, as `rewire` does, without checks."""
    return _set_layout(handle, *handle.layout._replaced(change), new, optimizer, on_layout_change)


def check_on_layout_change(function: Any) -> None:
    """Raise a BlockSparseError unless this is None or can be called."""
    if not (function is None or callable(function)):
        expected = "None or a function of (module, source)"
        raise BlockSparseError.expected("on_layout_change", expected, type(function).__name__)


def _set_layout(
    handle: WeightHandle,
    layout: BlockLayout,
    source: Tensor,
    new: NewValues | None,
    optimizer: torch.optim.Optimizer | None,
    on_layout_change: OnLayoutChange | None,
) -> Tensor:
    """Set the layout of a weight, call the user's function, and return the source on the values' device."""
    handle.set_layout(layout, source, new, optimizer)
    source = source.to(handle.parameter.device)
    if on_layout_change is not None:
        on_layout_change(handle.module, source)
    return source


def _values_of_function(function: Callable[[np.ndarray], Tensor], values: Tensor, positions: np.ndarray) -> Tensor:
    """Return what the user's function returns for these new blocks, after checks."""
    new = function(positions)
    check_new_values("what the function `new` returns", new, len(positions), values)
    return new


def _values_at(new: Tensor, order: Tensor, positions: np.ndarray) -> Tensor:
    """Return the values of the new blocks at these positions in sorted order."""
    return new[order[torch.from_numpy(positions)].to(new.device)]
