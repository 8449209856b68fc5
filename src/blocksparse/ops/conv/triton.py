"""The convolutions on a GPU: tensors, tasks and geometry to launches."""

from __future__ import annotations

import itertools
import math
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
from ..linear.triton import _prepared
from .gpu_plan import Phase, phases
from .plan import Axis, three_axes

refusal = runtime.refusal


def tf32() -> bool:
    """Whether PyTorch's own switch allows TF32 in convolutions of float32."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")


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
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out_space = [axis.input if transposed else axis.output for axis in axes]
    y = torch.empty(x.shape[0], *out_space, layout.shape[transpose], dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    # The taps of one weight are side by side, but the kernel needs the weights of one tap to be. The weights are small
    # compared with the images.
    values = values.flatten(3).permute(0, 3, 1, 2).contiguous()
    kind = "conv", transpose, transposed, tuple(axes), activation, tf32()
    launches = _prepared(
        layout, kind, x, (values, bias, y), lambda: _conv_launches(x, layout, transpose, transposed, axes, activation)
    )
    for launch in launches:
        launch(x, values, bias, y)
    return y


def conv_wgrad(grad: Tensor, x: Tensor, layout: BlockLayout, transposed: bool, axes: Sequence[Axis]) -> Tensor:
    # The input of the convolution is gathered tap by tap, the output read once for several taps.
    a, b = (grad, x) if transposed else (x, grad)
    a, b = a.contiguous(), b.contiguous()
    shape = *layout.values_shape, *(axis.kernel for axis in axes)
    if layout.nnz == 0 or b.numel() == 0:
        return torch.zeros(shape, dtype=x.dtype, device=x.device)
    kind = "conv wgrad", transposed, tuple(axes), tf32()
    (launch,) = _prepared(layout, kind, a, (b,), lambda: [_wgrad_launch(a, b, layout, transposed, axes)])
    dtype = x.dtype if launch.splits == 1 else SUM_DTYPES[x.dtype]
    parts = torch.empty((launch.splits, *shape), dtype=dtype, device=x.device)
    launch(a, b, parts)
    return parts[0] if launch.splits == 1 else parts.sum(0).to(x.dtype)


def _conv_launches(
    x: Tensor,
    layout: BlockLayout,
    transpose: bool,
    transposed: bool,
    axes: Sequence[Axis],
    activation: str | None,
) -> list[Launch]:
    """One launch for each phase, those with the most work first."""
    _check_fits(layout, axes)
    three = three_axes(axes)
    input, output, kernel, stride = (
        [getattr(axis, name) for axis in three] for name in ("input", "output", "kernel", "stride")
    )
    found = list(itertools.product(*(phases(axis, transposed) for axis in three)))
    found.sort(key=lambda three: -math.prod(phase.count * phase.taps for phase in three))
    tasks, col, block = _tasks(layout, transpose, x.device)
    tap_places = kernel[1] * kernel[2], kernel[2], 1
    launches = []
    for three_phases in found:
        tokens = x.shape[0] * math.prod(phase.count for phase in three_phases)
        check_fits("x", "positions in one call", tokens)
        tile = _tile("dgrad" if transpose else "forward", x, layout, tokens)
        places = list(zip(three_phases, tap_places, strict=True))
        arguments = {
            "task_ptr": tasks,
            "col_ptr": col,
            "block_ptr": block,
            "tasks": tasks.shape[0],
            "tokens": tokens,
            "in_blocks": layout.grid[not transpose],
            "out_blocks": layout.grid[transpose],
            "all_taps": math.prod(kernel),
            "first_tap": sum(phase.tap * place for phase, place in places),
            **_each("in_size", output if transposed else input),
            **_each("out_size", input if transposed else output),
            **_each("out_step", stride if transposed else (1, 1, 1)),
            **_each("in_step", (1, 1, 1) if transposed else stride),
            **_each("tap_step", [phase.tap_step * place for phase, place in places]),
            **_numbers(three_phases, "first", "count", "taps", "shift", "shift_step"),
            "block_out": layout.block_shape[0],
            "block_in": layout.block_shape[1],
            "AXES": len(axes),
            "TRANSPOSE": transpose,
            "ACTIVATION": activation or "",
            **_common(x.dtype, tile),
        }
        count = cdiv(tokens, tile.block_m) * tasks.shape[0] * cdiv(layout.block_shape[transpose], tile.block_n)
        launches.append(Launch(_kernels().conv_kernel, (count, 1, 1), 4, arguments, tile))
    return launches


def _wgrad_launch(a: Tensor, b: Tensor, layout: BlockLayout, transposed: bool, axes: Sequence[Axis]) -> Launch:
    _check_fits(layout, axes)
    tokens = b.shape[:-1].numel()
    check_fits("x", "positions in one call", tokens)
    rows = layout.T if transposed else layout
    taps = math.prod(axis.kernel for axis in axes)
    tile, gpu = _tile("wgrad", a, layout, tokens), gpu_of(a.device)
    tasks = _on(layout, ("conv wgrad tasks", transposed, tile.block_k, taps), a.device, lambda: wgrad_tasks(rows, tile.block_k, taps))
    _, col, block = _tasks(layout, transposed, a.device)
    slices = cdiv(rows.block_shape[0], tile.block_n)
    splits = splits_of(tasks.shape[0] * slices, tokens, tile, gpu)
    block_out, block_in = layout.block_shape
    arguments = {
        "task_ptr": tasks,
        "col_ptr": col,
        "block_ptr": block,
        "tokens": tokens,
        "tokens_per_split": cdiv(cdiv(tokens, splits), tile.block_m) * tile.block_m,
        "numbers": layout.nnz * block_out * block_in * taps,
        "a_blocks": rows.grid[1],
        "b_blocks": rows.grid[0],
        **_numbers(three_axes(axes), "kernel", "stride", "padding", "dilation"),
        **_each("input_size", [axis.input for axis in three_axes(axes)]),
        **_each("output_size", [axis.output for axis in three_axes(axes)]),
        "a_width": rows.block_shape[1],
        "b_width": rows.block_shape[0],
        "a_place": block_in if transposed else 1,
        "b_place": 1 if transposed else block_in,
        "AXES": len(axes),
        **_common(a.dtype, tile),
    }
    return Launch(_kernels().conv_wgrad_kernel, (tasks.shape[0] * slices, splits, 1), 3, arguments, tile, splits=splits)


def _kernels() -> Any:
    from . import kernels

    return kernels


def _common(dtype: torch.dtype, tile: Tile) -> dict[str, Any]:
    return common(dtype, tile) | {"PRECISION": "tf32" if dtype == torch.float32 and tf32() else "ieee"}


def _check_fits(layout: BlockLayout, axes: Sequence[Axis]) -> None:
    """Raises a BlockSparseError for more blocks, channels or positions along an axis than kernels count."""
    check_layout_fits(layout)
    for axis in axes:
        reach = axis.input + (axis.output - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + abs(axis.padding)
        check_fits("x", "positions along an axis with all that its taps reach", reach)


def _tile(pass_: str, x: Tensor, layout: BlockLayout, tokens: int) -> Tile:
    """Returns the tile of the linear product with as many tokens, a step of at most one block."""
    work = Work(pass_, x.dtype, layout.block_shape, bucket(tokens), layout.density, tf32())
    tile = tile_for(work, gpu_of(x.device))
    if pass_ == "wgrad":
        return tile
    width = layout.block_shape[pass_ == "forward"]
    return replace(tile, block_k=min(tile.block_k, max(power_of_two(width), 16)), pairs=False)


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


def _numbers(axes: Sequence[Axis | Phase], *names: str) -> dict[str, int]:
    return {name: number for each in names for name, number in _each(each, [getattr(a, each) for a in axes]).items()}


def _each(name: str, numbers: Sequence[int]) -> dict[str, int]:
    return {f"{name}{axis}": number for axis, number in enumerate(numbers)}
