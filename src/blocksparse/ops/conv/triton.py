"""The convolutions on a GPU: tensors, tasks and geometry to a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...layout import BlockLayout
from ..checks import SUM_DTYPES
from ..gpu import runtime
from ..gpu.plan import linear_plan, wgrad_tasks
from ..gpu.runtime import Launch, cdiv, check_fits, check_layout_fits, common
from ..gpu.tiles import Tile, Work, bucket, gpu_of, power_of_two, splits_of, tile_for
from .gpu_plan import phase_table
from .plan import Axis, three_axes

refusal = runtime.refusal


def conv(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    layout: BlockLayout,
    transpose: bool,
    transposed: bool,
    axes: Sequence[Axis],
    activation: str | None,
) -> Tensor:
    from . import kernels

    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out_channels = layout.shape[transpose]
    out_space = [axis.input if transposed else axis.output for axis in axes]
    y = torch.empty(x.shape[0], *out_space, out_channels, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    _check_fits(layout, axes)
    axes = three_axes(axes)
    input, output, kernel, stride = (
        [getattr(axis, name) for axis in axes] for name in ("input", "output", "kernel", "stride")
    )
    table = phase_table(tuple(axes), transposed)
    tokens = x.shape[0] * int(table[:, :, 1].astype("int64").prod(1).max())
    check_fits("x", "positions in one call", tokens)
    tile = _tile("dgrad" if transpose else "forward", x, layout, tokens)
    tasks, col, block = _tasks(layout, transpose, x.device)
    height = layout.block_shape[transpose]
    arguments = {
        "phase_ptr": _on(layout, ("conv phases", tuple(axes), transposed), x.device, lambda: table),
        "task_ptr": tasks,
        "col_ptr": col,
        "block_ptr": block,
        "tasks": tasks.shape[0],
        "images": x.shape[0],
        "nnz": layout.nnz,
        **_each("in_size", output if transposed else input),
        **_each("out_size", input if transposed else output),
        "in_channels": x.shape[-1],
        "out_channels": out_channels,
        **_each("kernel", kernel),
        **_each("out_step", stride if transposed else (1, 1, 1)),
        **_each("in_step", (1, 1, 1) if transposed else stride),
        "block_out": layout.block_shape[0],
        "block_in": layout.block_shape[1],
        "TRANSPOSE": transpose,
        "ACTIVATION": activation or "",
        **common(x.dtype, tile),
    }
    count = cdiv(tokens, tile.block_m) * tasks.shape[0] * cdiv(height, tile.block_n)
    launch = Launch(kernels.conv_kernel, (count, len(table), 1), 4, arguments, tile)
    launch(x, _taps_first(values), bias, y)
    return y


def conv_wgrad(grad: Tensor, x: Tensor, layout: BlockLayout, transposed: bool, axes: Sequence[Axis]) -> Tensor:
    from . import kernels

    grad, x = grad.contiguous(), x.contiguous()
    kernel = [axis.kernel for axis in axes]
    output = x if transposed else grad
    tokens = output[..., 0].numel()
    if layout.nnz == 0 or tokens == 0:
        return torch.zeros(*layout.values_shape, *kernel, dtype=x.dtype, device=x.device)
    _check_fits(layout, axes)
    check_fits("x", "positions in one call", tokens)
    tile, gpu = _tile("wgrad", x, layout, tokens), gpu_of(x.device)
    tasks = _on(layout, ("conv wgrad tasks", tile.block_k), x.device, lambda: wgrad_tasks(layout, tile.block_k))
    col = _on(layout, ("conv col",), x.device, lambda: layout.col_of_block.astype("int32"))
    taps, slices = int(torch.Size(kernel).numel()), cdiv(layout.block_shape[0], tile.block_n)
    splits = splits_of(tasks.shape[0] * slices * taps, tokens, tile, gpu)
    axes = three_axes(axes)
    names = {
        "input": "input_size",
        "output": "output_size",
        **{name: name for name in ("kernel", "stride", "padding", "dilation")},
    }
    arguments = {
        "task_ptr": tasks,
        "col_ptr": col,
        "nnz": layout.nnz,
        "images": x.shape[0],
        "tokens_per_split": cdiv(cdiv(tokens, splits), tile.block_m) * tile.block_m,
        "in_channels": x.shape[-1],
        "out_channels": grad.shape[-1],
        "block_out": layout.block_shape[0],
        "block_in": layout.block_shape[1],
        "TRANSPOSED": transposed,
        **common(x.dtype, tile),
    }
    for attribute, name in names.items():
        arguments |= _each(name, [getattr(axis, attribute) for axis in axes])
    dtype = x.dtype if splits == 1 else SUM_DTYPES[x.dtype]
    parts = torch.empty(splits, taps, *layout.values_shape, dtype=dtype, device=x.device)
    launch = Launch(kernels.conv_wgrad_kernel, (tasks.shape[0] * taps * slices, splits, 1), 3, arguments, tile)
    launch(grad, x, parts)
    values = parts[0] if splits == 1 else parts.sum(0).to(x.dtype)
    return values.permute(1, 2, 3, 0).contiguous().view(*layout.values_shape, *kernel)


def _check_fits(layout: BlockLayout, axes: Sequence[Axis]) -> None:
    """Raises a BlockSparseError for more blocks, channels or positions along an axis than kernels count."""
    check_layout_fits(layout)
    for axis in axes:
        reach = axis.input + (axis.output - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + abs(axis.padding)
        check_fits("x", "positions along an axis with all that its taps reach", reach)


def _taps_first(values: Tensor) -> Tensor:
    # The taps of one weight are contiguous, but the kernels need the weights of one tap to be. The weights are small
    # compared with the images.
    return values.flatten(3).permute(3, 0, 1, 2).contiguous()


def _tile(pass_: str, x: Tensor, layout: BlockLayout, tokens: int) -> Tile:
    """Returns the tile of the linear product with as many tokens, its lanes limited to those of a row of channels."""
    tile = tile_for(Work(pass_, x.dtype, layout.block_shape, bucket(tokens), layout.density), gpu_of(x.device))
    rows = layout.T if pass_ == "dgrad" else layout
    if pass_ == "wgrad":
        block_k = rows.nnz // rows.grid[0] * rows.block_shape[1]
        # The address of each position is computed again, so wide tiles spill the registers of four warps.
        block_k = min(tile.block_k, max(power_of_two(block_k), 64))
        return replace(tile, block_k=block_k, warps=8 if block_k > 64 else 4)
    # A step stays within one tap.
    return replace(tile, block_k=min(tile.block_k, max(power_of_two(rows.block_shape[1]), 32)), pairs=False)


def _tasks(layout: BlockLayout, transpose: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    plan = layout.derived(("tasks", transpose, None), lambda: linear_plan(layout, transpose))
    tasks = _on(layout, ("conv tasks", transpose), device, lambda: plan.tasks)
    col = _on(layout, ("conv cols", transpose), device, lambda: plan.col)
    block = plan.block
    return tasks, col, None if block is None else _on(layout, ("conv blocks", transpose), device, lambda: block)


def _on(layout: BlockLayout, key: tuple[Any, ...], device: torch.device, array: Any) -> Tensor:
    """The array on the device, kept with the layout."""

    def build() -> Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(array().copy()).to(device)

    return layout.derived((*key, device), build)


def _each(name: str, numbers: Sequence[int]) -> dict[str, int]:
    return {f"{name}{axis}": number for axis, number in enumerate(numbers)}
