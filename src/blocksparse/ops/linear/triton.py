"""The linear products on a GPU: a schedule and a tile make the launches of a call.

The schedule of a layout is a few index tensors on the device that kernels read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layout import BlockLayout
from ..checks import SUM_DTYPES, contiguous_features
from ..gpu import runtime
from ..gpu.plan import LinearPlan, linear_plan, most_shared, pair_plan, share, wgrad_tasks
from ..gpu.runtime import Launch, cdiv, check_fits, check_layout_fits, common, keep_for_stream, stream_of
from ..gpu.tiles import Gpu, Work, bucket, forced, gpu_of, splits_of, tile_for, tile_of_pairs
from ..lower_to_triton import TracedLayout

# Least fraction of input loads that two rows at a time must save: blocks that only one row has are multiplied twice.
MIN_SHARED_LOADS = {"forward": 0.12, "dgrad": 0.2}
# A row whose length is this multiple of the mean is a hub.
HUB_FACTOR = 2.5
# A layout caches its launches, up to this number; then the cache is cleared, for callers whose token counts vary.
MAX_LAUNCHES = 64
LAUNCHES = "triton launches"  # key of this cache in a layout


class Schedule(NamedTuple):
    """Index tensors of a layout on a device, for the three passes; `gpu/plan.py` describes their contents."""

    forward_tasks: Tensor
    forward_col: Tensor
    forward_block: Tensor
    forward_slots: Tensor
    dgrad_tasks: Tensor
    dgrad_col: Tensor
    dgrad_block: Tensor
    dgrad_slots: Tensor
    wgrad_tasks: Tensor
    wgrad_col: Tensor


unsupported_reason = runtime.unsupported_reason


# -- schedules --------------------------------------------------------------------------------------------------


def schedule(layout: BlockLayout, device: torch.device, dtype: torch.dtype, tokens: int) -> Schedule:
    """Return the schedule of a layout on a device for about `tokens` tokens, cached in the layout."""
    key = ("triton schedule", device, dtype, bucket(tokens), forced(dtype))
    if torch.compiler.is_dynamo_compiling():
        _schedule_while_tracing(layout, key)
    cached = layout._derived.get(key)
    if cached is None:
        cached = layout.derived(key, lambda: _schedule(layout, *key[1:4]))
    return cached


def _schedule_while_tracing(layout: BlockLayout, key: Any) -> bool:
    """Make the schedule when torch.compile traces, and keep it out of the graph."""
    layout.derived(key, lambda: _schedule(layout, *key[1:4]))
    return True


# Dynamo calls this function instead of tracing into numpy, and then finds the tensors in the cache. The decorator
# `torch.compiler.assume_constant_result` has the same effect but would import all of Dynamo now. Before PyTorch 2.13,
# the layout must be a constant to Dynamo, too.
_schedule_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _schedule(layout: BlockLayout, device: torch.device, dtype: torch.dtype, tokens: int) -> Schedule:
    """Make the tables of tasks of all three products on the device."""
    check_layout_fits(layout)
    gpu = gpu_of(device)
    forward, dgrad = (
        _plan(layout, transpose, _work(pass_, dtype, layout, tokens), gpu)
        for pass_, transpose in (("forward", False), ("dgrad", True))
    )
    wgrad = wgrad_tasks(layout, tile_for(_work("wgrad", dtype, layout, tokens), gpu).block_k)
    with torch.inference_mode(False):
        arrays = [*_arrays(forward), *_arrays(dgrad), wgrad, layout.col_of_block.astype("int32")]
        return Schedule(*(torch.from_numpy(array.copy()).to(device) for array in arrays))


def _plan(layout: BlockLayout, transpose: bool, work: Work, gpu: Gpu) -> LinearPlan:
    """Return the plan of a pass: pairs of rows if they share enough loads, else rows, cut if they are long."""
    tile = tile_for(work, gpu)
    least_shared = MIN_SHARED_LOADS[work.pass_]
    if tile.pairs or (tile_of_pairs(work, gpu) and most_shared(layout, transpose) >= least_shared):
        pairs = layout.derived(("pairs", transpose), lambda: pair_plan(layout, transpose))
        if tile.pairs or share(pairs) >= least_shared:
            return pairs
    rows = layout.T if transpose else layout
    height, width = rows.block_shape
    lengths = rows.row_start[1:] - rows.row_start[:-1]
    # `mean` is the number of entries per multiprocessor. A row well above it would keep one busy alone, and so would a
    # hub near it, which ends last. Such rows are cut into parts of half the mean, but not so short that a program does
    # little besides starting.
    mean = layout.nnz * cdiv(height, tile.block_n) * cdiv(work.tokens, tile.block_m) / gpu.multiprocessors
    least = 4 * max(tile.block_k // width, 1)
    most = mean * (0.75 if lengths.max() > HUB_FACTOR * lengths.mean() else 1.5)
    longest = None if lengths.max() <= most else max(int(mean / 2), least)
    return layout.derived(("tasks", transpose, longest), lambda: linear_plan(layout, transpose, longest))


def _arrays(plan: LinearPlan) -> list[Any]:
    """Return the arrays of a plan in the order of `Schedule`."""
    return [plan.tasks, plan.col, plan.col[:0] if plan.block is None else plan.block, plan.slots]


def _work(pass_: str, dtype: torch.dtype, layout: BlockLayout | TracedLayout, tokens: int) -> Work:
    """Return the properties of a product that determine its tile."""
    return Work(pass_, dtype, layout.block_shape, bucket(tokens), layout.density)


# -- launches ---------------------------------------------------------------------------------------------------


def linear(
    x: Tensor, values: Tensor, bias: Tensor | None, layout: BlockLayout | TracedLayout, transpose: bool,
    activation: str | None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return activation(x W^T + bias) `[tokens, out]`, or x W with `transpose`, in `out` if that is given.

    x is `[tokens, in]`.
    """
    tokens, out_blocks, height = x.shape[0], layout.grid[transpose], layout.block_shape[transpose]
    check_fits("x", "tokens", tokens)
    if out is not None and out.stride(1) != 1:
        return out.copy_(linear(x, values, bias, layout, transpose, activation))
    y = torch.empty(tokens, out_blocks * height, dtype=x.dtype, device=x.device) if out is None else out
    if tokens == 0:
        return y
    x, values = contiguous_features(x), values.contiguous()
    bias = None if bias is None else bias.contiguous()
    kind = ("linear", transpose, activation, y.stride(0))
    launches = prepared(
        layout, kind, x, (values, bias, y), lambda: _linear_launches(x, y, layout, transpose, activation)
    )
    _launch(launches, x, values, bias, y, height)
    return y


def _launch(launches: list[Launch], x: Tensor, values: Tensor, bias: Tensor | None, y: Tensor, height: int) -> None:
    """Run the product, and the sums of rows that were cut in parts."""
    product, *reductions = launches
    shape = product.slots, y.shape[0], height
    partial = torch.empty(shape, dtype=SUM_DTYPES[x.dtype], device=x.device) if reductions else None
    product(x, values, bias, y, partial)
    for reduction in reductions:
        reduction(partial, bias, y)


def linear_fast(
    x: Tensor, values: Tensor, bias: Tensor | None, layout: BlockLayout, transpose: bool, activation: str | None
) -> Tensor | None:
    """Return the result of a call without gradients that repeats an earlier one; None if only `linear` can serve it."""
    cache = layout._derived.get(LAUNCHES)
    if cache is None:
        return None
    dtype, device, shape = x.dtype, x.device, x.shape
    in_features, out_features = layout.shape if transpose else layout.shape[::-1]
    if shape[-1:] != (in_features,) or x.stride(-1) != 1 or not (len(shape) == 2 or x.is_contiguous()):
        return None
    for tensor, expected in ((values, layout.values_shape), (bias, (out_features,))):
        if tensor is not None and not (
            tensor.dtype is dtype and tensor.shape == expected and tensor.device == device and tensor.is_contiguous()
        ):
            return None
    tokens, distance = (shape[0], x.stride(0)) if len(shape) == 2 else (x.numel() // in_features, in_features)
    y = torch.empty(tokens, out_features, dtype=dtype, device=device)
    kind = ("linear", transpose, activation, y.stride(0))
    launches = cache.get(_launch_key(kind, x, tokens, distance, (values, bias, y)))
    if launches is None:
        return None
    _launch(launches, x, values, bias, y, layout.block_shape[transpose])
    return y if len(shape) == 2 else y.view(*shape[:-1], out_features)


def linear_wgrad(grad: Tensor, x: Tensor, layout: BlockLayout | TracedLayout, out: Tensor | None = None) -> Tensor:
    """Return the stored blocks of grad^T x `[nnz, block_out, block_in]`, in `out` if that is given."""
    if out is not None:
        return out.copy_(linear_wgrad(grad, x, layout))
    shape = (layout.nnz, *layout.block_shape)
    if layout.nnz == 0 or x.shape[0] == 0:
        return torch.zeros(shape, dtype=x.dtype, device=x.device)
    check_fits("x", "tokens", x.shape[0])
    grad, x = contiguous_features(grad), contiguous_features(x)
    kind = ("wgrad", grad.stride(0))
    (launch,) = prepared(layout, kind, x, (grad,), lambda: [_wgrad_launch(grad, x, layout)])
    if launch.splits == 1:
        values = torch.empty(shape, dtype=x.dtype, device=x.device)
        launch(grad, x, values)
        return values
    parts = torch.empty((launch.splits, *shape), dtype=SUM_DTYPES[x.dtype], device=x.device)
    launch(grad, x, parts)
    return parts.sum(0).to(x.dtype)


def prepared(
    layout: BlockLayout | TracedLayout,
    kind: tuple[Any, ...],
    x: Tensor,
    others: tuple[Tensor | None, ...],
    prepare: Callable[[], list[Launch]],
) -> list[Launch]:
    """Return the launches of a call, cached in the layout.

    Triton compiles for strides, and for addresses that are multiples of 16 bytes or not. Launches are prepared per
    stream, so the schedule's memory can be kept for that stream.
    """
    if isinstance(layout, TracedLayout):
        return prepare()
    key = _launch_key(kind, x, x.shape[0], x.stride(0), others)
    cache: dict[Any, list[Launch]] = layout.derived(LAUNCHES, dict)
    launches = cache.get(key)
    if launches is None:
        if len(cache) >= MAX_LAUNCHES:
            cache.clear()
        launches = cache[key] = prepare()
        for launch in launches:
            keep_for_stream(x.device, *launch.arguments)
    return launches


def _launch_key(
    kind: tuple[Any, ...], x: Tensor, tokens: int, distance: int, others: tuple[Tensor | None, ...]
) -> tuple[Any, ...]:
    """Return everything that a launch depends on; `distance` is the stride between the rows of x."""
    aligned = tuple([None if tensor is None else tensor.data_ptr() % 16 == 0 for tensor in (x, *others)])
    return kind, x.dtype, x.device, stream_of(x), tokens, distance, aligned, forced(x.dtype)


def _linear_launches(
    x: Tensor, y: Tensor, layout: BlockLayout | TracedLayout, transpose: bool, activation: str | None
) -> list[Launch]:
    """Plan the launches of a product: the kernel, and a sum for rows that were cut in parts."""
    from . import kernels

    tasks, col, block, slots = _schedule_of(layout, x)[4:8] if transpose else _schedule_of(layout, x)[:4]
    tokens, height = x.shape[0], layout.block_shape[transpose]
    gpu, work = gpu_of(x.device), _work("dgrad" if transpose else "forward", x.dtype, layout, tokens)
    rows, count, parts = int(tasks.shape[1]) - 3, int(tasks.shape[0]), int(slots.shape[0])
    tile = (tile_of_pairs(work, gpu) if rows == 2 else None) or tile_for(work, gpu)
    token_tiles, slices = cdiv(tokens, tile.block_m), cdiv(height, tile.block_n)
    arguments = {
        "task_ptr": tasks, "col_ptr": col, "block_ptr": block if transpose or rows > 1 else None, "slot_ptr": slots,
        "tokens": tokens, "tasks": count, "x_stride": x.stride(0), "y_stride": y.stride(0),
        "block_out": layout.block_shape[0], "block_in": layout.block_shape[1], "height": height,
        "TRANSPOSE": transpose, "ACTIVATION": activation or "", "SPLIT": parts > 0, "ROWS": rows,
        "GROUP_M": tile.group_m, **common(x.dtype, tile),
    }  # fmt: skip
    product = Launch(kernels.linear_kernel, (token_tiles * count * slices, 1, 1), 5, arguments, tile, slots=parts)
    if parts == 0:
        return [product]
    reduction = token_tiles * parts * slices, 1, 1
    return [product, Launch(kernels.linear_reduce_kernel, reduction, 3, arguments, tile)]


def _wgrad_launch(grad: Tensor, x: Tensor, layout: BlockLayout | TracedLayout) -> Launch:
    """Plan the launch of the gradient of values."""
    from . import kernels

    tasks, col = _schedule_of(layout, x)[8:]
    tokens, gpu = x.shape[0], gpu_of(x.device)
    tile = tile_for(_work("wgrad", x.dtype, layout, tokens), gpu)
    slices = cdiv(layout.block_shape[0], tile.block_n)
    count = int(tasks.shape[0])
    splits = splits_of(count * slices, tokens, tile, gpu)
    arguments = {
        "task_ptr": tasks, "col_ptr": col,
        "nnz": layout.nnz, "tokens": tokens,
        "tokens_per_split": cdiv(cdiv(tokens, splits), tile.block_m) * tile.block_m, "grad_stride": grad.stride(0),
        "x_stride": x.stride(0), "block_out": layout.block_shape[0], "block_in": layout.block_shape[1],
        **common(x.dtype, tile),
    }  # fmt: skip
    return Launch(kernels.linear_wgrad_kernel, (count, slices, splits), 3, arguments, tile, splits=splits)


def _schedule_of(layout: BlockLayout | TracedLayout, x: Tensor) -> Sequence[Tensor]:
    """Return the schedule of a layout for the rows of x."""
    if isinstance(layout, TracedLayout):
        return layout.schedule
    return schedule(layout, x.device, x.dtype, x.shape[0])
