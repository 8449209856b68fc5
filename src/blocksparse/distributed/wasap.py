"""The formulas of WASAP-SGD and WASSP-SGD for gradients, networks and learning rates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..checked import integer, number
from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout
from ..sparsity.selection import block_norms, mark_smallest
from ..surgery.weight_handle import remap_blocks

WARM_EPOCHS = 5


def retain_valid(grad_values: Tensor, of_layout: BlockLayout, now_layout: BlockLayout) -> Tensor:
    """Map a gradient computed on an earlier layout to the current layout (RetainValidUpdates).

    Blocks in both layouts keep their gradient, removed blocks lose theirs, and new blocks get 0.

    Args:
        grad_values: `[of_layout.nnz, block_out, block_in]`, followed by the kernel of a convolution.
        of_layout: the layout on which the gradient was computed.
        now_layout: the current layout, with the same grid and block.

    Returns:
        `[now_layout.nnz, ...]`; `grad_values` itself if both layouts are equal.

    Raises:
        BlockSparseError: a gradient of another shape, or layouts with different grids or blocks.

    >>> import torch, blocksparse as bs
    >>> from blocksparse.distributed import retain_valid
    >>> before, now = (bs.BlockLayout(mask, 1) for mask in ([[1, 1, 0, 1]], [[0, 1, 1, 1]]))
    >>> retain_valid(torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1), before, now).flatten()
    tensor([2., 0., 3.])

    Source: Curci, Mocanu, Pechenizkiy, Truly sparse neural networks at scale (2021).
    """
    _check_same_grid([of_layout, now_layout])
    of_layout.check_values(grad_values)
    if of_layout == now_layout:
        return grad_values
    before, now = of_layout.keys_of_blocks(), now_layout.keys_of_blocks()
    if before.size == 0:
        return grad_values.new_zeros(now.size, *grad_values.shape[1:])
    source = np.minimum(np.searchsorted(before, now), before.size - 1)
    return remap_blocks(grad_values, torch.from_numpy(np.where(before[source] == now, source, -1)))


def union_average(layouts: Sequence[BlockLayout], values: Sequence[Tensor]) -> tuple[BlockLayout, Tensor]:
    """Average the weights of several networks on the union of their blocks; a missing block counts as 0.

    Args:
        layouts: one for each network, with the same grid and block.
        values: one for each network, `[nnz, block_out, block_in]`, followed by the kernel of a convolution.

    Returns:
        The union of the layouts, and the mean values on it. The sum is in this order, in float32 or float64.

    Raises:
        BlockSparseError: no layouts, different numbers of layouts and values, or shapes that do not fit.

    >>> import torch, blocksparse as bs
    >>> from blocksparse.distributed import union_average
    >>> layouts = [bs.BlockLayout(mask, 1) for mask in ([[1, 1, 0, 0]], [[0, 1, 0, 1]])]
    >>> layout, mean = union_average(layouts, [torch.tensor([1.0, 2.0]).view(2, 1, 1), torch.ones(2, 1, 1)])
    >>> layout.mask().int(), mean.flatten()
    (tensor([[1, 1, 0, 1]], dtype=torch.int32), tensor([0.5000, 1.5000, 0.5000]))

    Source: Curci, Mocanu, Pechenizkiy, Truly sparse neural networks at scale (2021).
    """
    if not layouts or len(layouts) != len(values):
        got = f"{len(layouts)} layouts and {len(values)} values"
        raise BlockSparseError.expected("layouts and values", "one of each for every worker", got)
    _check_same_grid(layouts)
    first = values[0]
    for layout, each in zip(layouts, values, strict=True):
        layout.check_values(each)
        if each.shape[1:] != first.shape[1:] or each.dtype != first.dtype or each.device != first.device:
            got = f"{list(each.shape)}, {each.dtype}, {each.device}"
            expected = f"as the first ones, {list(first.shape)}, {first.dtype}, {first.device}"
            raise BlockSparseError.expected("values", expected, got)
    keys = [layout.keys_of_blocks() for layout in layouts]
    union = np.sort(np.concatenate(keys))
    union = union[np.flatnonzero(np.diff(union, prepend=-1))]
    accumulator = first.dtype if first.dtype == torch.float64 else torch.float32
    total = torch.zeros(union.size, *first.shape[1:], dtype=accumulator, device=first.device)
    for own_keys, each in zip(keys, values, strict=True):
        total[torch.from_numpy(np.searchsorted(union, own_keys)).to(total.device)] += each.detach()
    grid = layouts[0].grid
    layout = BlockLayout.from_indices(*np.divmod(union, grid[1]), grid, layouts[0].block_shape)
    return layout, total.div_(len(layouts)).to(first.dtype)


def prune_to(layout: BlockLayout, values: Tensor, nnz: int) -> tuple[BlockLayout, Tensor]:
    """Keep the `nnz` blocks with the largest l2 norm.

    Args:
        layout: the layout before.
        values: `[layout.nnz, block_out, block_in]`, followed by the kernel of a convolution.
        nnz: the number of blocks to keep. Ties are broken at random, but the same way each time.

    Returns:
        The layout of these blocks, and their values `[nnz, ...]`.

    Raises:
        BlockSparseError: `nnz` above the number of blocks, or values of another shape.

    >>> import torch, blocksparse as bs
    >>> from blocksparse.distributed import prune_to
    >>> layout, values = prune_to(bs.BlockLayout([[1, 1, 0, 1]], 1), torch.tensor([-3.0, 1.0, 2.0]).view(3, 1, 1), 2)
    >>> layout.mask().int(), values.flatten()
    (tensor([[1, 0, 0, 1]], dtype=torch.int32), tensor([-3.,  2.]))
    """
    check_layout(layout)
    layout.check_values(values)
    if integer("nnz", nnz, 0) > layout.nnz:
        raise BlockSparseError.expected("nnz", f"at most the {layout.nnz} blocks of {layout!r}", nnz)
    drop = np.flatnonzero(mark_smallest(block_norms(values.detach()).cpu().numpy(), layout.nnz - nnz))
    pruned, source = layout.replaced(drop, [], [])
    return pruned, remap_blocks(values.detach(), source)


def warm_up(rate: float, workers: int, epoch: int) -> float:
    """Return the learning rate of the synchronous variant: rate ((K - 1) e / 5 + 1) for e <= 5, then K rate.

    Args:
        rate: the learning rate of a single worker.
        workers: K, the number of workers.
        epoch: e, the number of finished epochs.

    >>> from blocksparse.distributed import warm_up
    >>> [warm_up(0.5, 3, epoch) for epoch in (0, 1, 5, 9)]
    [0.5, 0.7, 1.5, 1.5]
    >>> warm_up(0.01, 1, 3)
    0.01

    Source: Curci, Mocanu, Pechenizkiy, Truly sparse neural networks at scale (2021).
    """
    rate = number("rate", rate, 0)
    workers, epoch = integer("workers", workers, 1), min(integer("epoch", epoch, 0), WARM_EPOCHS)
    return rate * ((workers - 1) * epoch / WARM_EPOCHS + 1)


def _check_same_grid(layouts: Sequence[BlockLayout]) -> None:
    """Check that layouts have one grid and one block shape."""
    for layout in layouts:
        check_layout(layout)
        if layout.grid != layouts[0].grid or layout.block_shape != layouts[0].block_shape:
            raise BlockSparseError.expected("layouts", f"one grid and block, as {layouts[0]!r}", repr(layout))
