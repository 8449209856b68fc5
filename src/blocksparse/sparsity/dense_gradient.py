"""The gradient that all blocks of a linear weight would have, as norms per block, a few rows of blocks at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial, reduce

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import BlockLayout
from ..nn.linear import Linear
from .magnitude import norms_of, smallest

TILE = 1 << 20  # weights in a tile, unless one row of blocks has more


class Watch:
    """Sees the inputs of a linear layer, and the gradients of its outputs before any activation, until `close`.

    All calls of the layer count, and all backward passes: their tokens are one long list.
    """

    def __init__(self, layer: Linear):
        self.layer = layer
        self.seen: list[tuple[Tensor, Tensor]] = []
        self._hook = layer.register_forward_hook(self._forward)

    def close(self) -> None:
        self._hook.remove()
        self.seen = []

    def _forward(self, layer: Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self._backward, inputs[0].detach(), output.detach()))

    def _backward(self, x: Tensor, output: Tensor, grad: Tensor) -> None:
        grad = grad.detach()
        activation = self.layer.activation
        if activation == "relu":
            grad = torch.ops.aten.threshold_backward(grad, output, 0)
        elif activation is not None:
            linear = copy.copy(self.layer)  # with the same parameters
            linear.activation = None
            with torch.no_grad():
                before = linear(x.to(linear.values.dtype))  # which autocast may have changed
            backward = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}[activation]
            grad = backward(grad, before.to(grad.dtype))
        self.seen.append((x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])))


def gradient_norms(
    seen: list[tuple[Tensor, Tensor]], layout: BlockLayout, norm: str = "l2", tile: int = TILE
) -> Iterator[tuple[int, Tensor]]:
    """Norms of the blocks of the dense gradient, sum of grad^T x, of which only one tile exists at a time.

    Args:
        seen: pairs of x `[tokens, in]` and grad `[tokens, out]`, up to the layout's shape.
        layout: of the weight.
        norm: "l2", "mean" or "max".
        tile: as many rows of blocks are computed at once as have so many weights; one at least.

    Yields:
        (first row of blocks, norms `[rows, in_blocks]`).

    >>> import torch, blocksparse as bs
    >>> from blocksparse.sparsity.dense_gradient import gradient_norms
    >>> x, grad = torch.ones(1, 4), torch.tensor([[0.0, 2.0]])
    >>> [(first, norms.tolist()) for first, norms in gradient_norms([(x, grad)], bs.patterns.dense((2, 4), (1, 2)))]
    [(0, [[0.0, 0.0], [2.8284270763397217, 2.8284270763397217]])]
    """
    (out, in_), (height, width) = layout.shape, layout.block_shape
    padded = [(_wide(x, in_), _wide(grad, out)) for x, grad in seen]
    step = max(1, tile // (height * in_)) * height
    for first in range(0, out, step):
        total = reduce(torch.add, (grad[:, first : first + step].T @ x for x, grad in padded))
        yield first // height, norms_of(total.view(-1, height, in_ // width, width), norm, (1, 3))


def largest(tiles: Iterator[tuple[int, Tensor]], taken: np.ndarray, columns: int, count: int) -> np.ndarray:
    """The numbers row * columns + column of the `count` largest norms, rising, without those taken.

    Of equal ones those that come first. Besides a tile only the best so far are kept.
    """
    keys, norms = np.empty(0, dtype=np.int64), np.empty(0)
    for first, tile in tiles:
        mine = tile.flatten().cpu().numpy()
        start = first * columns
        free = np.ones(mine.size, dtype=bool)
        free[taken[slice(*np.searchsorted(taken, [start, start + mine.size]))] - start] = False
        found = np.flatnonzero(free)
        keys = np.concatenate([keys, start + found])
        norms = np.concatenate([norms, mine[found]])
        if keys.size > count:
            best = smallest(-norms, count)
            keys, norms = keys[best], norms[best]
    return keys


def _wide(tensor: Tensor, features: int) -> Tensor:
    """In the dtype of sums, padded to so many features."""
    tensor = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    return tensor if tensor.shape[1] == features else F.pad(tensor, (0, features - tensor.shape[1]))
