"""The norms per block of the gradient of the dense weight, a few rows of blocks at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...layout import BlockLayout
from ...nn.conv import Convolution
from ...nn.linear import Linear
from ..lines import Lines
from ..selection import TieBreak, hash_positions, mark_smallest, norms_over
from .dynamic_sparsity import check_beside_ddp

TILE = 1 << 20  # weights in a tile, unless one row of blocks has more


class LinearPass:
    """grad^T x of `[..., out]` before any activation and `[..., in]`, both padded to the layout's shape."""

    def __init__(self, x: Tensor, grad: Tensor, shape: tuple[int, int]):
        self.x = _wide(x.reshape(-1, x.shape[-1]), shape[1])
        self.grad = _wide(grad.reshape(-1, grad.shape[-1]), shape[0])

    def rows(self, first: int, last: int) -> Tensor:
        """The gradient of these outputs' weights, `[rows, in, *kernel]`."""
        return self.grad[:, first:last].T @ self.x


class ConvolutionPass:
    """The same of a convolution or a transposed one.

    Args:
        x: `[n, in, *sizes]`, with its margins.
        grad: `[n, out, *sizes]`, before any activation.
        layer: whose strides and paddings count.
    """

    def __init__(self, x: Tensor, grad: Tensor, layer: Convolution):
        self.x, self.grad = _wide(x, layer.layout.shape[1]), _wide(grad, layer.layout.shape[0])
        self.kernel, self.axes = layer.kernel_size, layer.axes
        more = getattr(layer, "output_padding", None)
        self.transposed = more is not None
        padding = layer.padding if self.transposed else (0,) * self.axes  # else x has it
        self.steps = (layer.stride, padding, layer.dilation, self.transposed, more or (0,) * self.axes)

    def rows(self, first: int, last: int) -> Tensor:
        grad = self.grad[:, first:last]
        shape = (self.x.shape[1], last - first) if self.transposed else (last - first, self.x.shape[1])
        weight = self.x.new_empty(1).expand(*shape, *self.kernel)  # only its shape counts
        of_weight = (False, True, False)
        found = torch.ops.aten.convolution_backward(grad, self.x, weight, None, *self.steps, 1, of_weight)[1]
        return found.transpose(0, 1) if self.transposed else found


Pass = LinearPass | ConvolutionPass


def is_finite(one: Pass) -> bool:
    """Whether the pass had no overflow."""
    return bool(one.grad.isfinite().all() & one.x.isfinite().all())


class Watch:
    """Sees the inputs of a layer, and the gradients of its outputs before any activation, until `close`.

    All calls count, and all backward passes: gradients add up, under DistributedDataParallel over the `replicas` too.
    """

    def __init__(self, layer: Linear | Convolution):
        self.layer = layer
        self.seen: list[Pass] = []
        self.replicas: list[Any] = []
        if layer.part is None:
            # Before the hook with which FSDP2 frees the gathered parameters.
            self._hook = layer.register_forward_hook(self, prepend=True)
        else:  # inputs and outputs of `forward` are not yet, or no more, those of this part
            layer.compute = _Compute(self)  # type: ignore[method-assign]

    def close(self) -> None:
        if self.layer.part is None:
            self._hook.remove()
        else:
            self.layer.__dict__.pop("compute", None)
        self.seen = []

    def drop_overflows(self) -> None:
        """Forgets passes whose update GradScaler skipped, unless all passes overflowed."""
        if len(self.seen) > 1:
            self.seen = [one for one in self.seen if is_finite(one)] or self.seen

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or saved layer takes its hooks along.
        return partial, (_ignore,)

    def __call__(self, layer: Linear | Convolution, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.see(inputs[0].detach(), layer.bias, layer.activation, output)

    def see(self, x: Tensor, bias: Tensor | None, activation: str | None, output: Tensor) -> None:
        """Notes what was computed, and asks for the gradient of it."""
        if not output.requires_grad:
            return
        self.replicas = _replicas_of_call()
        if self.replicas:
            check_beside_ddp([self.layer])
        layer, before = self.layer, output.detach()
        if activation not in (None, "relu"):
            kind: Any = type(layer)
            with torch.no_grad():  # in the dtype that autocast may have changed
                before = kind.compute(layer, x.to(layer.values.dtype), bias, None)
        output.register_hook(partial(self._backward, x, before, activation))

    @torch.no_grad()
    def _backward(self, x: Tensor, before: Tensor, activation: str | None, grad: Tensor) -> None:
        layer, grad = self.layer, grad.detach()
        if activation == "relu":  # of the output, which is positive where what comes before it is
            grad = torch.ops.aten.threshold_backward(grad, before, 0)
        elif activation is not None:
            backward = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}[activation]
            grad = backward(grad, before.to(grad.dtype))
        if isinstance(layer, Linear):
            self.seen.append(LinearPass(x, grad, layer.layout.shape))
            return
        if x.dim() == layer.axes + 1:
            x, grad = x[None], grad[None]
        padded = getattr(layer, "padded", lambda x: x)
        self.seen.append(ConvolutionPass(padded(x), grad, layer))


class _Compute:
    """Takes the place of the `compute` of a layer that is watched."""

    def __init__(self, watch: Watch):
        self.watch = watch

    def __reduce__(self) -> tuple[Any, ...]:
        layer: Any = self.watch.layer
        return partial, (type(layer).compute, layer)  # of a copied or saved layer

    def __call__(self, x: Tensor, bias: Tensor | None, activation: str | None, *args: Any, **options: Any) -> Tensor:
        layer: Any = self.watch.layer
        y: Tensor = type(layer).compute(layer, x, bias, activation, *args, **options)
        self.watch.see(x.detach(), bias, activation, y)
        return y


def _replicas_of_call() -> list[Any]:
    """The group of the DistributedDataParallel in whose forward pass this is, if any."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    # A name that is private to PyTorch, of 2.0 to 2.14 at least.
    active = parallel and parallel.DistributedDataParallel._active_ddp_module
    return [active.process_group] if active else []


def _ignore(*_: Any) -> None:
    """Stands in the place of a hook in a copy."""


def gradient_norms(
    seen: Sequence[Pass],
    layout: BlockLayout,
    kernel: tuple[int, ...] = (),
    norm: str = "l2",
    tile: int = TILE,
    *,
    replicas: Sequence[Any] = (),
) -> Iterator[tuple[int, Tensor]]:
    """Yields (first row of blocks, norms `[rows, in_blocks]`) of the dense gradient, one tile at a time.

    It is the sum of the passes and over the replicas; a tile has about `tile` weights, in whole rows of blocks.
    """
    (out, in_), (height, width) = layout.shape, layout.block_shape
    step = max(1, tile // (height * in_ * prod(kernel))) * height
    of_block = (1, 3, *range(4, 4 + len(kernel)))
    for first in range(0, out, step):
        last = min(first + step, out)
        total = reduce(torch.add, (one.rows(first, last) for one in seen))
        if replicas:
            total = total.contiguous()
            for group in replicas:
                dist.all_reduce(total, group=group)
        yield first // height, norms_over(total.reshape(-1, height, in_ // width, width, *kernel), norm, of_block)


def largest(
    tiles: Iterator[tuple[int, Tensor]],
    taken: np.ndarray,
    columns: int,
    count: int,
    order: TieBreak = hash_positions,
    lines: Lines | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers row * columns + column of the `count` largest norms, rising, without those taken, and these norms.

    Of equal ones those that come first in the order. The norms are [nan] where one is not finite.

    Args:
        lines: rows and columns without any that is taken: the largest in each of them is added.
    """
    keys, norms = np.empty(0, dtype=np.int64), np.empty(0)
    rows, cols = (np.empty(0, dtype=np.int64),) * 2 if lines is None else lines
    of_rows, of_cols = [(keys, norms)], (np.zeros(cols.size, dtype=np.int64), np.full(cols.size, -1.0))
    for first, tile in tiles:
        mine = tile.flatten().cpu().numpy()
        if not np.isfinite(mine).all():
            return np.zeros(1, dtype=np.int64), np.full(1, np.nan)
        start = first * columns
        if rows.size or cols.size:
            mine = mine.reshape(-1, columns)
            places = start + np.arange(mine.size).reshape(mine.shape)
            inside = rows[(rows >= first) & (rows < first + len(mine))] - first
            of_rows.append(_best(places[inside].T, mine[inside].T, order))
            places, of_tile = _best(places[:, cols], mine[:, cols], order)
            of_cols = _best(np.stack([of_cols[0], places]), np.stack([of_cols[1], of_tile]), order)
            mine = mine.ravel()
        free = np.ones(mine.size, dtype=bool)
        free[taken[slice(*np.searchsorted(taken, [start, start + mine.size]))] - start] = False
        found = np.flatnonzero(free)
        keys = np.concatenate([keys, start + found])
        norms = np.concatenate([norms, mine[found]])
        if keys.size > count:
            best = mark_smallest(-norms, count, lambda at: order(keys[at]))  # noqa: B023 (called at once)
            keys, norms = keys[best], norms[best]
    every = [(keys, norms), *of_rows, of_cols]
    keys, first_of = np.unique(np.concatenate([each for each, _ in every]), return_index=True)
    return keys, np.concatenate([each for _, each in every])[first_of]


def _best(places: np.ndarray, norms: np.ndarray, order: TieBreak) -> tuple[np.ndarray, np.ndarray]:
    """The place with the largest norm in each column of these, and that norm."""
    last = np.iinfo(np.uint64).max
    best = np.where(norms == norms.max(0, initial=-1), order(places), last).argmin(0)
    along = np.arange(best.size)
    return places[best, along], norms[best, along]


def _wide(tensor: Tensor, features: int) -> Tensor:
    """Converts to the dtype of sums and pads axis 1 to `features`."""
    tensor = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    missing = features - tensor.shape[1]
    return F.pad(tensor, [0, 0] * (tensor.dim() - 2) + [0, missing]) if missing else tensor
