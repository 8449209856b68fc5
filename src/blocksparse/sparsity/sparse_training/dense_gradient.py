"""Norms per block of the gradient of the dense weight, computed a few rows of blocks at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from math import prod
from typing import Any
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...layout import BlockLayout
from ...nn.conv import Convolution, Margins, PaddedConvolutionModule
from ...nn.linear import Linear
from ...ops.checks import accumulator
from ..lines import Lines
from ..selection import TieBreak, hash_positions, mark_smallest
from .dynamic_sparsity import refuse_tensor_parallel_in_ddp

TILE = 1 << 20  # weights in a tile of the gradient, unless one row of its blocks has more
SIDE = 1 << 10  # inputs of a linear layer in a tile, which then stays in the cache


class LinearPass:
    """The tensors of one backward pass of a linear layer, from which its weight gradient grad^T x is computed.

    Args:
        x: input, `[..., in]`.
        grad: gradient of the output before any activation, `[..., out]`.
        shape: (out, in) of the layout, to which both are padded.
    """

    def __init__(self, x: Tensor, grad: Tensor, shape: tuple[int, int]):
        self.x = _pad_features(x.reshape(-1, x.shape[-1]), shape[1])
        self.grad = _pad_features(grad.reshape(-1, grad.shape[-1]), shape[0])

    def weight_gradient(self, rows: slice, columns: slice) -> Tensor:
        """Return the gradient of the weights of some outputs and inputs, `[rows, columns, *kernel]`."""
        return self.grad[:, rows].T @ self.x[:, columns]


class ConvolutionPass:
    """The tensors of one backward pass of a convolution or a transposed one, for its weight gradient.

    Args:
        x: input with its padding, `[n, in, *sizes]`.
        grad: gradient of the output before any activation, `[n, out, *sizes]`.
        layer: the convolution, for its strides and paddings.
    """

    def __init__(self, x: Tensor, grad: Tensor, layer: Any):
        self.x, self.grad = _pad_features(x, layer.layout.shape[1]), _pad_features(grad, layer.layout.shape[0])
        self.kernel, self.axes = layer.kernel_size, layer.axes
        self.transposed = not isinstance(layer, PaddedConvolutionModule)
        padding = more = (0,) * self.axes  # the x of a convolution has its padding
        if self.transposed:
            padding, more = layer.padding, layer.output_padding_for(x, grad.shape)
        self.geometry = (layer.stride, padding, layer.dilation, self.transposed, more)

    def weight_gradient(self, rows: slice, columns: slice) -> Tensor:
        """Return the gradient of the weights of some outputs and inputs, `[rows, columns, *kernel]`."""
        grad, x = self.grad[:, rows], self.x[:, columns]
        shape = (x.shape[1], grad.shape[1]) if self.transposed else (grad.shape[1], x.shape[1])
        weight = x.new_empty(1).expand(*shape, *self.kernel)  # only its shape counts
        only_weight = (False, True, False)
        backward = torch.ops.aten.convolution_backward
        gradient = backward(grad, x, weight, None, *self.geometry, 1, only_weight)[1]
        return gradient.transpose(0, 1) if self.transposed else gradient


BackwardPass = LinearPass | ConvolutionPass


class GradientWatch:
    """Hooks of a layer that record its inputs and output gradients (before any activation) until `close`.

    All calls and all backward passes are recorded; their gradients add up, under DistributedDataParallel also over the
    processes of `replicas`.
    """

    def __init__(self, layer: Linear | Convolution):
        self.layer = layer
        self.passes: list[BackwardPass] = []
        self.replicas: list[Any] = []
        if layer.part is None:
            # It must run before FSDP2's hook, which frees the gathered parameters.
            self._hook = layer.register_forward_hook(_WeakHook(self), prepend=True, with_kwargs=True)
        else:  # inputs and outputs of `forward` are those of the whole layer, not of this tensor-parallel part
            layer.compute = _WatchedCompute(self)  # type: ignore[method-assign]

    def close(self) -> None:
        """Remove the hooks and drop what was recorded."""
        if self.layer.part is None:
            self._hook.remove()
        else:
            self.layer.__dict__.pop("compute", None)
        self.passes = []

    def drop_overflows(self) -> None:
        """Drop passes that are not finite, whose update GradScaler skipped; keep all if none is finite."""
        if len(self.passes) > 1:
            finite = [one for one in self.passes if one.grad.isfinite().all() & one.x.isfinite().all()]
            self.passes = finite or self.passes

    def record(
        self, output: Tensor, x: Tensor, bias: Tensor | None, activation: str | None, *args: Any, **options: Any
    ) -> None:
        """Register a hook that, in backward, appends the input and the gradient before the activation to `passes`.

        Does nothing if the output needs no gradient.

        Args:
            output: the result of the layer's `compute`.
            x, bias, activation, args, options: the arguments of that call.
        """
        if not output.requires_grad:
            return
        self.replicas = _ddp_groups()
        if self.replicas:
            refuse_tensor_parallel_in_ddp([self.layer])
        layer, pre_activation = self.layer, output.detach()
        if activation not in (None, "relu"):
            kind: Any = type(layer)
            with torch.no_grad():  # in the dtype that autocast may have changed
                pre_activation = kind.compute(layer, x.to(layer.values.dtype), bias, None, *args, **options)
        output.register_hook(partial(self._backward, x.detach(), options.get("margins"), pre_activation, activation))

    @torch.no_grad()
    def _backward(
        self, x: Tensor, margins: Margins | None, pre_activation: Tensor, activation: str | None, grad: Tensor
    ) -> None:
        """Append to `passes` the input x and the gradient before the activation, from the output's gradient `grad`."""
        layer, grad = self.layer, grad.detach()
        if activation == "relu":  # the output has the same sign
            grad = torch.ops.aten.threshold_backward(grad, pre_activation, 0)
        elif activation is not None:
            backward = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}[activation]
            grad = backward(grad, pre_activation.to(grad.dtype))
        if isinstance(layer, Linear):
            self.passes.append(LinearPass(x, grad, layer.layout.shape))
            return
        if x.dim() == layer.axes + 1:
            x, grad = x[None], grad[None]
        if isinstance(layer, PaddedConvolutionModule):
            x = layer.padded(x, margins)
        self.passes.append(ConvolutionPass(x, grad, layer))


class _WeakHook:
    """A forward hook of a layer that records its calls while the watch lives: the layer must not keep it alive."""

    def __init__(self, watch: GradientWatch):
        self.watch = ref(watch)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copying or saving a layer copies its hooks; the copy must not record.
        return partial, (_no_op_hook,)

    def __call__(
        self, layer: Linear | Convolution, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor
    ) -> None:
        # `densify` and other changes of the model hand the hooks of a layer to its replacement.
        if (watch := self.watch()) is not None and layer is watch.layer:
            options = dict(options)
            x, *args = inputs or (options.pop("input"),)
            watch.record(output, x, layer.bias, layer.activation, *args, **options)


class _WatchedCompute:
    """A replacement of the `compute` of a tensor-parallel layer that also records its call while the watch lives."""

    def __init__(self, watch: GradientWatch):
        self.layer: Any = watch.layer
        self.watch = ref(watch)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self.layer).compute, self.layer)  # a copied or saved layer gets the plain method

    def __call__(self, x: Tensor, bias: Tensor | None, activation: str | None, *args: Any, **options: Any) -> Tensor:
        y: Tensor = type(self.layer).compute(self.layer, x, bias, activation, *args, **options)
        if (watch := self.watch()) is not None:
            watch.record(y, x, bias, activation, *args, **options)
        return y


def _ddp_groups() -> list[Any]:
    """Return the process group of the DistributedDataParallel whose forward pass is running, if any, as a list."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    # A private name of PyTorch, present in at least 2.0 to 2.15.
    active = parallel and parallel.DistributedDataParallel._active_ddp_module
    return [active.process_group] if active else []


def _no_op_hook(*_: Any) -> None:
    """Do nothing, in place of a hook in a copied layer."""


def gradient_norms(
    passes: Sequence[BackwardPass],
    layout: BlockLayout,
    kernel: tuple[int, ...] = (),
    norm: str = "l2",
    tile: int = TILE,
    *,
    replicas: Sequence[Any] = (),
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row of blocks, norms `[rows, in_blocks]`) of the dense gradient, one tile at a time.

    The gradient is summed over the passes and the replicas, at most about `tile` weights at a time. Each tile of norms
    has whole rows of blocks.
    """
    (out, in_), (height, width) = layout.shape, layout.block_shape
    across = in_ if kernel else max(SIDE // width, 1) * width
    step = max(1, tile // (height * min(across, in_) * prod(kernel))) * height

    def norms_of(rows: slice, columns: slice) -> Tensor:
        total = reduce(torch.add, (one.weight_gradient(rows, columns) for one in passes)).contiguous()
        for group in replicas:
            dist.all_reduce(total, group=group)
        return _norms_of_blocks(total.flatten(1), height, width * prod(kernel), norm)

    for first in range(0, out, step):
        rows = slice(first, min(first + step, out))
        parts = [norms_of(rows, slice(left, min(left + across, in_))) for left in range(0, in_, across)]
        yield first // height, torch.cat(parts, 1)


def _norms_of_blocks(weights: Tensor, height: int, width: int, norm: str) -> Tensor:
    """Return the norms of the blocks of a matrix, which is overwritten.

    The result is that of `norms_over` over both axes of the blocks, which takes ten times as long.
    """
    powers = weights.square_() if norm == "l2" else weights.abs_()
    combine = torch.amax if norm == "max" else torch.sum
    if height > 1:  # the rows first, which are contiguous
        powers = combine(powers.view(-1, height, powers.shape[1]), 1)
    if width > 1:
        powers = combine(powers.view(len(powers), -1, width), 2)
    if norm == "mean":
        return powers / (height * width)
    return powers.sqrt() if norm == "l2" else powers


def largest_norms(
    tiles: Iterator[tuple[int, Tensor]],
    taken: np.ndarray,
    columns: int,
    count: int,
    tie_break: TieBreak = hash_positions,
    empty: Lines | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the free places (row * columns + column, rising) with the `count` largest norms, and these norms.

    If a norm is not finite, the norms returned are [nan].

    Args:
        tiles: first row and norms of each tile.
        taken: places that are taken, rising.
        columns: columns of the grid.
        count: number of places.
        tie_break: order of places with equal norms.
        empty: lines without any taken place; the best place of each is added.
    """
    keys, norms = np.empty(0, dtype=np.int64), np.empty(0)
    rows, cols = (np.empty(0, dtype=np.int64),) * 2 if empty is None else empty
    best_of_rows, best_of_cols = [(keys, norms)], (np.zeros(cols.size, dtype=np.int64), np.full(cols.size, -1.0))
    for first, tile in tiles:
        tile_norms = tile.flatten().cpu().numpy()
        if not np.isfinite(tile_norms).all():
            return np.zeros(1, dtype=np.int64), np.full(1, np.nan)
        start = first * columns
        if rows.size or cols.size:
            grid = tile_norms.reshape(-1, columns)
            places = start + np.arange(grid.size).reshape(grid.shape)
            inside = rows[(rows >= first) & (rows < first + len(grid))] - first
            best_of_rows.append(_best_of_columns(places[inside].T, grid[inside].T, tie_break))
            places, grid = _best_of_columns(places[:, cols], grid[:, cols], tie_break)
            places, grid = np.stack([best_of_cols[0], places]), np.stack([best_of_cols[1], grid])
            best_of_cols = _best_of_columns(places, grid, tie_break)
        may_grow = _free_places(start, tile_norms.size, taken)
        if keys.size >= count:
            may_grow &= tile_norms >= norms.min(initial=np.inf)
        keys = np.concatenate([keys, start + np.flatnonzero(may_grow)])
        norms = np.concatenate([norms, tile_norms[may_grow]])
        if keys.size > count:
            best = mark_smallest(-norms, count, lambda at: tie_break(keys[at]))  # noqa: B023 (called at once)
            keys, norms = keys[best], norms[best]
    candidates = [(keys, norms), *best_of_rows, best_of_cols]
    keys, first_of = np.unique(np.concatenate([each for each, _ in candidates]), return_index=True)
    return keys, np.concatenate([each for _, each in candidates])[first_of]


def largest_norms_of_rows(
    tiles: Iterator[tuple[int, Tensor]],
    taken: np.ndarray,
    columns: int,
    counts: np.ndarray,
    tie_break: TieBreak = hash_positions,
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each row, the `counts[row]` free places with the largest norms, and these norms.

    See `largest_norms` for the other arguments and the order.
    """
    best = [(np.empty(0, dtype=np.int64), np.empty(0))]
    for first, tile in tiles:
        tile_norms = tile.flatten().cpu().numpy()
        if not np.isfinite(tile_norms).all():
            return np.zeros(1, dtype=np.int64), np.full(1, np.nan)
        places = first * columns + np.arange(tile_norms.size)
        free = _free_places(first * columns, tile_norms.size, taken)
        marks = mark_largest_of_rows(places[free], tile_norms[free], columns, counts, tie_break)
        best.append((places[free][marks], tile_norms[free][marks]))
    places, norms = (np.concatenate(each) for each in zip(*best, strict=True))
    return places, norms


def _free_places(start: int, count: int, taken: np.ndarray) -> np.ndarray:
    """Return a mask of the `count` places from `start` on that are not taken; taken places are rising."""
    free = np.ones(count, dtype=bool)
    free[taken[slice(*np.searchsorted(taken, [start, start + count]))] - start] = False
    return free


def mark_largest_of_rows(
    places: np.ndarray, norms: np.ndarray, columns: int, counts: np.ndarray, tie_break: TieBreak
) -> np.ndarray:
    """Return a mask of the `counts[row]` places with the largest norms of each row; places are rising."""
    rows = places // columns
    order = np.lexsort((tie_break(places), -norms, rows))
    rank = np.arange(places.size) - np.searchsorted(rows, rows)  # within the row
    marks = np.zeros(places.size, dtype=bool)
    marks[order[rank < counts[rows]]] = True
    return marks


def _best_of_columns(places: np.ndarray, norms: np.ndarray, tie_break: TieBreak) -> tuple[np.ndarray, np.ndarray]:
    """Return the place with the largest norm in each column of a matrix of places, and that norm."""
    last = np.iinfo(np.uint64).max
    best = np.where(norms == norms.max(0, initial=-1), tie_break(places), last).argmin(0)
    along = np.arange(best.size)
    return places[best, along], norms[best, along]


def _pad_features(tensor: Tensor, features: int) -> Tensor:
    """Convert to the dtype of sums, and pad axis 1 with zeros to `features`."""
    tensor = tensor.to(accumulator(tensor.dtype))
    missing = features - tensor.shape[1]
    return F.pad(tensor, [0, 0] * (tensor.dim() - 2) + [0, missing]) if missing else tensor
