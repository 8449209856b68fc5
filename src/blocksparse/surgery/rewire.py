"""Changes a pattern in place: values, gradient and the optimizer's state follow each connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import BlockSparseError
from ..nn.module import BlockSparseModule
from .optimizer import check_optimizer

OnLayoutChange = Callable[[BlockSparseModule, Tensor], None]


def rewire(
    module: BlockSparseModule,
    drop: Any,
    rows: Any,
    cols: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    new: Tensor | None = None,
    on_layout_change: OnLayoutChange | None = None,
) -> Tensor:
    """Drops some blocks of a module's weight and grows others.

    The parameter stays the same object, so that optimizers go on with it. Of what they keep for each weight (momentum,
    say), survivors have theirs untouched and new blocks have zeros; counts of steps stay. The gradient is cleared.

    Args:
        module: any block-sparse module: a layer, or one of the weights of a recurrent one.
        drop: ints, the positions in `values` of the blocks that go.
        rows, cols: ints, the place of each new block in the grid; places that are dropped in the same call too.
        optimizer: the one that trains `module.values`, or None.
        new: the values of the new blocks, `[len(rows), *values.shape[1:]]`; zeros by default.
        on_layout_change: called with the module and the returned source, to take along what else is kept for each
            weight, such as a running mean: `mean = remap_blocks(mean, source)`.

    Returns:
        int64 `[new nnz]` on the values' device: where each block was before, -1 for the new ones.

    Raises:
        BlockSparseError: a module that is not block-sparse, an optimizer that does not have its parameter or keeps
            what cannot follow, positions or places that are out of range, given twice, or taken. Nothing is changed
            then.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.Linear(3, 2, layout=bs.BlockLayout([[1, 1, 0], [0, 0, 1]], block_size=1))
    >>> bs.sparsity.rewire(layer, drop=[1], rows=[1], cols=[0])
    tensor([ 0, -1,  2])
    >>> layer.layout.mask().int(), layer.values[1].item()
    (tensor([[1, 0, 0],
            [1, 0, 1]], dtype=torch.int32), 0.0)
    """
    check_module(module)
    values = module.values
    check_optimizer(optimizer, values, "module.values")
    layout, source = module.layout.replaced(drop, rows, cols)
    source = source.to(values.device)
    if new is not None:
        if list(new.shape) != [len(rows), *values.shape[1:]]:
            raise BlockSparseError.expected("new", [len(rows), *values.shape[1:]], list(new.shape))
        new = new.detach().to(values)
        # Blocks are kept sorted by row, then by column.
        rows, cols = (torch.as_tensor(lines, device="cpu").long() for lines in (rows, cols))
        keys = rows * layout.grid[1] + cols
        if (keys.diff() < 0).any():
            new = new[keys.argsort().to(new.device)]
    carry_state(optimizer, values, source)
    module.set_layout(layout, remap_blocks(values.detach(), source, new))
    if on_layout_change is not None:
        on_layout_change(module, source)
    return source


def remap_blocks(tensor: Tensor, source: Tensor, new: Tensor | None = None) -> Tensor:
    """Reorders per-block data for another pattern.

    Args:
        tensor: `[nnz, ...]`.
        source: int64 `[new nnz]`, as `rewire` returns it.
        new: for the blocks that were not there, in their order; zeros by default.

    >>> import torch, blocksparse as bs
    >>> bs.sparsity.remap_blocks(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([0, -1, 2]))
    tensor([5., 0., 7.])
    """
    source = source.to(tensor.device)
    kept = source >= 0
    there = tensor.new_zeros(source.numel(), *tensor.shape[1:])
    there[kept] = tensor[source[kept]]
    if new is not None:
        there[~kept] = new
    return there


def carry_state(optimizer: torch.optim.Optimizer | None, parameter: Tensor, source: Tensor) -> None:
    """Remaps the optimizer's state of a parameter along its first axis, before the parameter itself changes."""
    state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
    for name, kept in state.items():
        if isinstance(kept, Tensor) and kept.shape == parameter.shape:
            state[name] = remap_blocks(kept, source)


def check_module(module: Any) -> None:
    """Raises a BlockSparseError unless the module is block-sparse."""
    if not isinstance(module, BlockSparseModule):
        raise BlockSparseError.expected("module", "one with a block-sparse weight", type(module).__name__)
