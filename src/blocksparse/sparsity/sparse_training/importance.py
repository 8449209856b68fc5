"""Pruning of the least important neurons while the network trains."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...checked import integer, number
from ...errors import BlockSparseError
from ...layout import BlockLayout
from ...nn.module import BlockSparseModule, Weight
from ...surgery.prunable import Skip
from ...surgery.rewire import OnLayoutChange, rewire
from ...surgery.weight_handle import WeightHandle, handle_of
from ..selection import stored_norms
from .dynamic_sparsity import DynamicSparsity, Modules


class ImportancePruning(DynamicSparsity):
    """Importance pruning. `step`, after each epoch, removes all connections into the least important neurons.

    A neuron's importance is the sum of |w| over its incoming connections, I_j = sum_i |w_ij|. Those below the
    percentile of their layer lose all incoming connections, and nothing grows instead: the stored blocks become fewer
    for good. With blocks of several rows a row of blocks goes as a whole, by the mean importance of its neurons.
    Neurons without connections that are left can be taken out of the network by `compact`. A neuron stays if it is the
    most important one of those that an input still reaches, so that no input loses its last connection. Under
    DistributedDataParallel, wrap the model again after a call that changed it.

    Args:
        modules: a model, or some modules: linear layers and convolutions.
        optimizer, skip, on_layout_change: as for `SET`. The output layer is to be skipped.
        percentile: 20 in the papers' sequential code, 10 in the parallel one.
        begin: the first call of `step` that may prune; the papers' codes leave out 200 epochs.
        every: calls from one pruning to the next: 10 in the sequential code, 20 in the parallel one.
        keep_lines: whether each column of blocks keeps a block; False prunes as the papers do.
        seed: of which of equally important neurons stay for that.

    Raises:
        BlockSparseError: as `DynamicSparsity`; weights of recurrent layers; a percentile outside of 0 to 100.

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
        self.keep_lines = keep_lines
        self.percentile = number("percentile", percentile, 0, 100)
        self.begin = integer("begin", begin, 0)
        for name, module in self.modules.items():
            if isinstance(module, Weight):
                raise BlockSparseError.expected(name, "a linear layer or a convolution (or it in skip)", "a weight")

    def _change(self) -> None:
        for i, _, stored in self._trained():
            important, layout = importance(stored).numpy(), stored.layout
            unimportant = important < np.percentile(important, self.percentile)
            if self.keep_lines:
                best = np.lexsort((self._order(i)(np.arange(important.size)), -important))
                unimportant &= ~_needed(layout, unimportant, best)
            drop = np.flatnonzero(unimportant[layout.row_of_block])
            rewire(stored, drop, [], [], self.optimizer, on_layout_change=self.on_layout_change)


def _needed(layout: BlockLayout, unimportant: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Marks the first row, in the order `best`, of each column of blocks that has blocks in unimportant rows only."""
    place = np.empty_like(best)
    place[best] = np.arange(best.size)
    first = np.full(layout.grid[1], best.size)
    np.minimum.at(first, layout.col_of_block, place[layout.row_of_block])
    needed = np.zeros(best.size, dtype=bool)
    needed[best[first[first < best.size]]] = True
    return needed & unimportant


def importance(module: BlockSparseModule | WeightHandle) -> Tensor:
    """The sum of |w| in each row of blocks of `module`, per neuron of the row: float64 `[out_blocks]`, CPU.

    With blocks of one row this is I_j = sum_i |w_ij| of each neuron j.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.Linear(2, 2, layout=bs.BlockLayout([[1, 1], [0, 1]], block_size=1))
    >>> layer.values.data = torch.tensor([1.0, -2.0, 0.5]).reshape(3, 1, 1)
    >>> bs.sparsity.importance(layer)
    tensor([3.0000, 0.5000], dtype=torch.float64)
    """
    stored = handle_of(module)
    layout, used = stored.layout, stored.used
    sums = stored_norms(stored, "mean").astype(np.float64) * stored.local.shape[1:].numel()
    rows = np.repeat(np.arange(layout.grid[0]), np.diff(layout.row_start))
    total = np.bincount(rows, weights=sums, minlength=layout.grid[0])
    if used is None:
        neurons = np.full(layout.grid[0], layout.block_shape[0])
    else:
        neurons = used[0].view(layout.grid[0], -1).sum(1).numpy()
    return torch.from_numpy(total / np.maximum(neurons, 1))
