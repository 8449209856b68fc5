"""Pruning of the least important neurons during training."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...checked import boolean, integer, number
from ...errors import BlockSparseError
from ...layout import BlockLayout
from ...nn.module import BlockSparseModule, Weight
from ...surgery.prunable import Skip
from ...surgery.rewire import OnLayoutChange, rewire
from ...surgery.weight_handle import WeightHandle, handle_of
from ..selection import stored_norms
from .dynamic_sparsity import DynamicSparsity, Modules


class ImportancePruning(DynamicSparsity):
    """Importance pruning: removes all connections into the least important neurons. Call `step` after each epoch.

    A neuron's importance is the sum of |w| over its incoming connections, I_j = sum_i |w_ij|. Neurons below the
    percentile of their layer lose all incoming connections, and nothing grows instead. If blocks have several rows, a
    whole row of blocks is removed, by the mean importance of its neurons. `compact` then removes neurons without
    connections. Under DistributedDataParallel, wrap the model again after a call that changed it.

    Args:
        modules: a model or a list of modules, with linear layers and convolutions.
        optimizer, skip, on_layout_change: see `SET`. Skip the output layer.
        percentile: 20 by default, as in the papers' sequential code; 10 in the parallel one.
        begin: first call of `step` that may prune; 201 by default, as in the papers' code.
        every: calls from one pruning to the next; 10 by default, as in the sequential code; 20 in the parallel one.
        keep_lines: whether each input keeps its connection to the most important neuron that it reaches; True by
            default. False prunes as the papers do.
        seed: seed of the choice among equally important neurons for `keep_lines`, 0 by default.

    Raises:
        BlockSparseError: as for `DynamicSparsity`; weights of recurrent layers; a percentile outside of 0 to 100.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Linear(100, 50, density=0.5, block_size=1)
        >>> method = bs.sparsity.ImportancePruning(layer, percentile=20, begin=0, every=1)
        >>> method.step(), int((bs.sparsity.importance(layer) == 0).sum())
        (True, 10)

    Source: Curci, Mocanu, Pechenizkiy, Truly sparse neural networks at scale (2021), and its code.
    """

    def __init__(
        self,
        modules: Modules,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        percentile: float = 20,
        begin: int = 201,
        every: int = 10,
        skip: Skip = (),
        seed: int = 0,
        keep_lines: bool = True,
        on_layout_change: OnLayoutChange | None = None,
    ):
        super().__init__(modules, optimizer, skip=skip, every=every, seed=seed, on_layout_change=on_layout_change)
        self.keep_lines = boolean("keep_lines", keep_lines)
        self.percentile = number("percentile", percentile, 0, 100)
        self.begin = integer("begin", begin, 0)
        for name, module in self.modules.items():
            if isinstance(module, Weight):
                expected = "a linear layer or a convolution (name other layers in skip)"
                raise BlockSparseError.expected(name, expected, type(module).__name__)

    def _change_layouts(self) -> None:
        """Drop the blocks of rows whose importance is below the percentile, except those that a column needs."""
        for i, _, weight in self._trained_weights():
            scores, layout = importance(weight).nan_to_num(nan=torch.inf).numpy(), weight.layout
            # Not interpolated: between infinite scores, which rows with NaN get, that would be NaN.
            unimportant = scores < np.percentile(scores, self.percentile, method="higher")
            if self.keep_lines:
                order = np.lexsort((self._tie_break(i)(np.arange(scores.size)), -scores))
                unimportant &= ~_most_important_of_columns(layout, order)
            drop = np.flatnonzero(unimportant[layout.row_of_block])
            rewire(weight, drop, [], [], self.optimizer, on_layout_change=self.on_layout_change)


def _most_important_of_columns(layout: BlockLayout, order: np.ndarray) -> np.ndarray:
    """Return a mask `[out_blocks]` of the rows that come first in `order` in some column of blocks."""
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    first = np.full(layout.grid[1], order.size)
    np.minimum.at(first, layout.col_of_block, rank[layout.row_of_block])
    marks = np.zeros(order.size, dtype=bool)
    marks[order[first[first < order.size]]] = True
    return marks


def importance(module: BlockSparseModule | WeightHandle) -> Tensor:
    """Return the importance of each row of blocks: the sum of |w| per neuron of the row, float64 `[out_blocks]`, CPU.

    With blocks of one row this is I_j = sum_i |w_ij| of each neuron j.

    Args:
        module: a block-sparse module.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.Linear(2, 2, layout=bs.BlockLayout([[1, 1], [0, 1]], block_size=1))
    >>> layer.values.data = torch.tensor([1.0, -2.0, 0.5]).reshape(3, 1, 1)
    >>> bs.sparsity.importance(layer)
    tensor([3.0000, 0.5000], dtype=torch.float64)
    """
    weight = handle_of(module)
    layout, used = weight.layout, weight.used
    sums = stored_norms(weight, "mean").astype(np.float64) * weight.local.shape[1:].numel()
    total = np.bincount(layout.row_of_block, weights=sums, minlength=layout.grid[0])
    if used is None:
        neurons = np.full(layout.grid[0], layout.block_shape[0])
    else:
        neurons = used[0].view(layout.grid[0], -1).sum(1).numpy()
    return torch.from_numpy(total / np.maximum(neurons, 1))
