"""Changes a pattern in place: values, gradient and the optimizer's state follow each connection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BlockSparseError
from ..nn.module import BlockSparseModule
from .optimizer import check_optimizer
from .weight_handle import NewValues, WeightHandle, handle_of

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
    """Drops some blocks of a module's weight and grows others.

    The parameter stays the same object, so that optimizers continue with it. The state that they keep for each weight
    follows: blocks that stay keep theirs. For new blocks momentum and first moments start at 0, second moments and sums
    of squares at their mean over the blocks that stay, as a count of steps is one for the whole parameter: from 0, Adam
    would correct them too little, and move new blocks by several learning rates. The gradient is cleared.

    Args:
        module: any block-sparse module: a layer, or one of the weights of a recurrent one.
        drop: ints, the positions in `values` of the blocks that go.
        rows, cols: ints, the place of each new block in the grid; places that are dropped in the same call too.
        optimizer: one that trains `module.values`, or a wrapper of it. Others that have stepped on it are found.
        new: the values of the new blocks, `[len(rows), *values.shape[1:]]`; zeros by default. Or a function that
            returns those of some, given the positions of these, int64, among the new blocks in sorted order.
        on_layout_change: called with the module and the returned source, to take along what else is kept for each
            weight, such as a running mean: `mean = remap_blocks(mean, source)`.

    Returns:
        int64 `[new nnz]` on the values' device: where each block was before, -1 for the new ones.

    Raises:
        BlockSparseError: no block-sparse module, an optimizer that does not have its parameter or keeps what cannot
            follow (LBFGS), positions or places out of range, given twice, or taken. Nothing is changed then.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.Linear(3, 2, layout=bs.BlockLayout([[1, 1, 0], [0, 0, 1]], block_size=1))
    >>> bs.sparsity.rewire(layer, drop=[1], rows=[1], cols=[0])
    tensor([ 0, -1,  2])
    >>> layer.layout.mask().int().tolist(), layer.values[1].item()
    ([[1, 0, 0], [1, 0, 1]], 0.0)
    """
    stored = handle_of(module)
    values = stored.parameter
    check_optimizer(optimizer, values, "module.values")
    layout, source = stored.layout.replaced(drop, rows, cols)
    if isinstance(new, Tensor):
        if list(new.shape) != [len(rows), *values.shape[1:]]:
            raise BlockSparseError.expected("new", [len(rows), *values.shape[1:]], list(new.shape))
        # Blocks are kept sorted by row, then by column.
        rows, cols = (torch.as_tensor(lines, device="cpu").long() for lines in (rows, cols))
        new = partial(_chosen, new.detach(), (rows * layout.grid[1] + cols).argsort())
    stored.set_layout(layout, source, new, optimizer)
    source = source.to(values.device)
    if on_layout_change is not None:
        on_layout_change(stored.module, source)
    return source


def _chosen(new: Tensor, order: Tensor, positions: np.ndarray) -> Tensor:
    """Of the new blocks those at these positions, once they are in order."""
    return new[order[torch.from_numpy(positions)].to(new.device)]
