"""The convolutions on a GPU: tasks and geometry make the launches of a call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ...layout import BlockLayout
from ..checks import SUM_DTYPES
from ..gpu import runtime, tiles
from ..gpu.plan import linear_plan, wgrad_tasks
from ..gpu.runtime import Launch, cdiv, check_fits, check_layout_fits, common
from ..gpu.tiles import (
    FEW_TOKENS,
    Gpu,
    Tile,
    Work,
    bucket,
    fit,
    fits_tensor_memory,
    forced,
    forced_tile,
    gpu_of,
    power_of_two,
)
from ..linear.triton import prepared
from ..lower_to_triton import TracedLayout
from .gpu_plan import Phase, phases
from .plan import Axis, three_axes

# Up to this number, phases have a launch each; more phases have one launch, whose positions share no inputs.
MAX_LAUNCHES = 8

unsupported_reason = runtime.unsupported_reason

Layout = BlockLayout | TracedLayout


def tf32() -> bool:
    """Return whether PyTorch's own switch allows TF32 in convolutions of float32."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as for products


def as_linear(dtype: torch.dtype) -> bool:
    """Return whether the linear product has the precision of a convolution of this dtype."""
    return dtype != torch.float32 or tf32() == tiles.tf32()


def conv(
    x: Tensor, values: Tensor, bias: Tensor | None, layout: Layout, transpose: bool, transposed: bool,
    axes: Sequence[Axis], activation: str | None,
) -> Tensor:  # fmt: skip
    """Return activation(W * x + bias) `[n, *space, channels]`; the axes have sizes, strides, padding and dilation."""
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out_space = [axis.input if transposed else axis.output for axis in axes]
    y = torch.empty(x.shape[0], *out_space, layout.shape[transpose], dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    # In values the taps of a weight are contiguous; the kernel needs contiguous weights of a tap. This copy is small
    # compared with the images.
    values = values.flatten(3).permute(0, 3, 1, 2).contiguous()
    kind = "conv", transpose, transposed, tuple(axes), activation, tf32()
    launches = prepared(
        layout, kind, x, (values, bias, y), lambda: _conv_launches(x, layout, transpose, transposed, axes, activation)
    )
    for launch in launches:
        launch(x, values, bias, y)
    return y


def conv_wgrad(grad: Tensor, x: Tensor, layout: Layout, transposed: bool, axes: Sequence[Axis]) -> Tensor:
    """Return the stored blocks of the gradient of the values, `[nnz, block_out, block_in, *kernel]`."""
    # The kernel gathers the input of the convolution (a) tap by tap, and reads its output (b) once for several taps.
    a, b = (grad, x) if transposed else (x, grad)
    a, b = a.contiguous(), b.contiguous()
    shape = *layout.values_shape, *(axis.kernel for axis in axes)
    if layout.nnz == 0 or b.numel() == 0:
        return torch.zeros(shape, dtype=x.dtype, device=x.device)
    kind = "conv wgrad", transposed, tuple(axes), tf32()
    launches = prepared(layout, kind, a, (b,), lambda: _wgrad_launches(a, b, layout, transposed, axes))
    values = torch.empty(shape, dtype=x.dtype, device=x.device)
    if len(launches) == 1:
        launches[0](a, b, values)
        return values
    product, reduction = launches
    parts = torch.empty((product.splits, *shape), dtype=SUM_DTYPES[x.dtype], device=x.device)
    product(a, b, parts)
    reduction(parts, values)
    return values


def _conv_launches(
    x: Tensor, layout: Layout, transpose: bool, transposed: bool, axes: Sequence[Axis], activation: str | None
) -> list[Launch]:
    """Return one launch per phase, those with the most work first, or one launch for many phases."""
    _check_fits(layout, axes, x.shape[0])
    three = three_axes(axes)
    input, output, kernel, stride = (
        [getattr(axis, name) for axis in three] for name in ("input", "output", "kernel", "stride")
    )
    all_phases = list(itertools.product(*(phases(axis, transposed) for axis in three)))
    all_phases.sort(key=lambda three: -math.prod(phase.count * phase.taps for phase in three))
    tasks, col, block = _tasks(layout, transpose, x.device)
    gpu, in_step = gpu_of(x.device), 1 if transposed else stride[2]
    # Taps of the weight between neighbours along each axis.
    tap_strides = kernel[1] * kernel[2], kernel[2], 1
    launches = []
    for group in [all_phases] if in_one_launch(axes, transposed) else [[each] for each in all_phases]:
        last = group[0][2]
        tokens = x.shape[0] * math.prod(phase.count for phase in group[0])
        work = _work("dgrad" if transpose else "forward", x, layout, tokens)
        taps = last.taps if len(group) == 1 else MAX_TAPS + 1  # many phases have different taps
        tile, shared = _tile(work, tokens, last.count, taps, (in_step, last.shift_step), gpu)
        numbers = [_phase_numbers(three_phases, x.shape[0], tap_strides, shared) for three_phases in group]
        arguments = {
            "task_ptr": tasks, "col_ptr": col, "block_ptr": block,
            "phase_ptr": None if len(group) == 1 else _phase_table(cast(BlockLayout, layout), numbers, x.device),
            "tasks": tasks.shape[0], **numbers[0], "in_blocks": layout.grid[not transpose],
            "out_blocks": layout.grid[transpose], "all_taps": math.prod(kernel),
            **_axis_arguments("in_size", output if transposed else input),
            **_axis_arguments("out_size", input if transposed else output),
            **_axis_arguments("out_step", stride if transposed else (1, 1, 1)),
            **_axis_arguments("in_step", (1, 1, 1) if transposed else stride),
            **_axis_arguments("tap_step", [p.tap_step * past for p, past in zip(group[0], tap_strides, strict=True)]),
            **_axis_attributes(group[0], "shift_step"), "block_out": layout.block_shape[0],
            "block_in": layout.block_shape[1],
            "AXES": len(axes), **shared.constants, "TRANSPOSE": transpose, "ACTIVATION": activation or "",
            **_common(x.dtype, tile),
        }  # fmt: skip
        tiles_of_tokens = cdiv(max(each["tokens"] for each in numbers), tile.block_m)
        programs = tiles_of_tokens * tasks.shape[0] * cdiv(layout.block_shape[transpose], tile.block_n)
        launches.append(Launch(_kernels().conv_kernel, (programs, len(group), 1), 4, arguments, tile))
    return launches


def _most_splits(steps: int) -> int:
    """Return `steps` rounded up to a power of two, by comparisons only, which do not specialize a traced size."""
    most = 1
    while most < MAX_SPLITS and most < steps:
        most *= 2
    return most


def in_one_launch(axes: Sequence[Axis], transposed: bool) -> bool:
    """Return whether all phases have one launch, with a table; op.py keeps such calls out of lowered graphs."""
    return math.prod(len(phases(axis, transposed)) for axis in axes) > MAX_LAUNCHES


def _phase_table(layout: BlockLayout, numbers: Sequence[dict[str, int]], device: torch.device) -> Tensor:
    """Return the numbers of all phases, cached in the layout: a captured CUDA graph must neither copy nor lose them."""
    rows = tuple(tuple(each.values()) for each in numbers)
    return _cached_tensor(layout, ("conv phases", rows), device, lambda: np.array(rows, np.int32))


def _phase_numbers(
    three_phases: Sequence[Phase], images: int, tap_strides: Sequence[int], shared: InputSharing
) -> dict[str, int]:
    """Return the numbers of a phase, in the order of the kernel's table."""
    last = three_phases[2]
    groups = cdiv(last.count, shared.positions)
    numbers = {
        "tokens": images * three_phases[0].count * three_phases[1].count * groups, "groups": groups,
        "first_tap": sum(phase.tap * past for phase, past in zip(three_phases, tap_strides, strict=True)),
        **_axis_attributes(three_phases, "first", "count", "taps", "shift"),
    }  # fmt: skip
    return numbers | {"taps2": last.taps // shared.taps}


def _wgrad_launches(a: Tensor, b: Tensor, layout: Layout, transposed: bool, axes: Sequence[Axis]) -> list[Launch]:
    """Return the launch of the sampled product, and of the sum over its splits if there are several."""
    _check_fits(layout, axes, a.shape[0])
    for blocks, size in zip(layout.grid, layout.block_shape, strict=True):
        lanes = blocks * power_of_two(size) * math.prod(axis.kernel for axis in axes)
        check_fits("layout", "features, in blocks of a power of two, once for each tap,", lanes)
    rows: Layout = layout.T if transposed else layout
    last, gpu = axes[-1], gpu_of(a.device)
    work = replace(_work("wgrad", a, layout, math.prod(b.shape[:-1])), block=rows.block_shape)
    tile, shared = _wgrad_tile(work, last, gpu)
    tokens = math.prod(b.shape[:-1]) // shared.positions
    taps = math.prod(axis.kernel for axis in axes)
    step = tile.block_k, taps // shared.taps
    if isinstance(layout, TracedLayout):
        tasks = layout.schedule[ROW_TENSORS + _wgrad_steps(work, last, taps, gpu).index(step)]
    else:
        tasks = _wgrad_tasks(layout, transposed, step, a.device)
    _, col, block = _tasks(layout, transposed, a.device)
    slices = cdiv(rows.block_shape[0], tile.block_n)
    programs = tasks.shape[0] * slices
    splits = max(1, min(2 * gpu.multiprocessors // programs, _most_splits(tokens // (4 * tile.block_m))))
    block_out, block_in = layout.block_shape
    numbers = layout.nnz * block_out * block_in * taps
    three = three_axes(axes)
    arguments = {
        "task_ptr": tasks, "col_ptr": col, "block_ptr": block,
        "tokens": tokens, "tokens_per_split": cdiv(cdiv(tokens, splits), tile.block_m) * tile.block_m,
        "groups": last.output // shared.positions, "numbers": numbers, "a_blocks": rows.grid[1],
        "b_blocks": rows.grid[0], **_axis_attributes(three, "kernel", "stride", "padding", "dilation"),
        **_axis_arguments("input_size", [axis.input for axis in three]),
        **_axis_arguments("output_size", [axis.output for axis in three]), "a_width": rows.block_shape[1],
        "b_width": rows.block_shape[0], "a_place": block_in if transposed else 1,
        "b_place": 1 if transposed else block_in,
        "AXES": len(axes), **shared.constants, **_common(a.dtype, tile),
    }  # fmt: skip
    product = Launch(_kernels().conv_wgrad_kernel, (programs, splits, 1), 3, arguments, tile, splits=splits)
    if splits == 1:
        return [product]
    arguments = {"numbers": numbers, "splits": splits, "SPLITS": power_of_two(splits), "BLOCK_N": 128}
    reduction = Launch(_kernels().sum_kernel, (cdiv(numbers, 128), 1, 1), 2, arguments, replace(tile, warps=4))
    return [product, reduction]


# -- tiles --------------------------------------------------------------------------------------------------------

# Numbers of neighbouring positions to try, and the most taps of the last axis in one step.
POSITIONS, MAX_TAPS = (4, 2), 4
# Sums of a thread that leave enough registers for everything else.
MAX_SUMS = 128
# Most parts of a sum; all are loaded at once.
MAX_SPLITS = 64


class InputSharing(NamedTuple):
    """Neighbouring positions along the last axis that share inputs, and the taps of a step; (1, 1) shares none.

    Position n meets inputs `n * in_step + i * shift_step`, i < taps, so neighbours meet mostly the same inputs.
    """

    positions: int = 1
    taps: int = 1
    in_step: int = 1
    shift_step: int = 1

    @property
    def constants(self) -> dict[str, int]:
        return dict(zip(("POSITIONS", "TAPS", "IN_STEP", "SHIFT_STEP"), self, strict=True))

    @property
    def inputs(self) -> int:
        """The length of the range of inputs of all positions."""
        return (self.positions - 1) * self.in_step + (self.taps - 1) * abs(self.shift_step) + 1

    @property
    def saves_loads(self) -> bool:
        """Whether sharing saves loads, and every input of the range is needed."""
        met = {n * self.in_step + i * self.shift_step for n in range(self.positions) for i in range(self.taps)}
        return self.inputs == len(met) < self.positions * self.taps


def _tile(
    work: Work, tokens: int, count: int, taps: int, steps: tuple[int, int], gpu: Gpu
) -> tuple[Tile, InputSharing]:
    """Return the tile of forward or dgrad, whose tokens are groups of positions, and the sharing within a group.

    Along the last axis, `count` positions meet `taps` inputs each; `steps` are the steps of inputs from position to
    position and from tap to tap. A step of the kernel stays within one entry.
    """
    dgrad = work.pass_ == "dgrad"
    width, block_n = power_of_two(work.block[not dgrad]), min(max(power_of_two(work.block[dgrad]), 16), 128)
    forced = forced_tile(work.pass_)
    tile = forced or Tile(min(work.tokens, 128), block_n, 64, warps=8 if block_n > 64 else 4, stages=3)
    if _is_exact(work) and not forced:
        block_k = 16 if work.dtype == torch.float64 else max(min(block_n, 64) // 2, 16)
        tile = Tile(min(work.tokens, 64), min(block_n, 64), block_k, warps=4, stages=5)
    if gpu.kind.startswith("gfx") and not forced:  # its pipeline has one step in registers, one in shared memory
        tile = replace(tile, stages=2)
    tile = replace(tile, block_k=min(tile.block_k, max(width, 16)), pairs=False)
    for positions in POSITIONS if taps <= MAX_TAPS and not _is_exact(work) else ():
        shared = InputSharing(positions, taps, *steps)
        small = replace(tile, block_m=max(tile.block_m // positions, 16))
        if forced is None:  # the smallest tile of `wgmma` and small steps: more programs hide the latency
            small = replace(tile, block_m=64, block_k=min(tile.block_k, 64 // work.dtype.itemsize), stages=2)
        if not fits_tensor_memory(positions, taps, small.block_m, small.block_n, gpu):
            break  # two positions at a time take no fewer instructions than one
        loads = (shared.inputs * small.block_m + taps * small.block_n) * small.block_k * work.dtype.itemsize
        few = tokens <= FEW_TOKENS or block_n > 64 or cdiv(count, positions) * positions * 7 > count * 8
        fits = positions * small.block_m * small.block_n <= 32 * small.warps * MAX_SUMS
        if shared.saves_loads and fits and not few and small.stages * loads < gpu.shared_memory:
            return small, shared
    return fit(tile, work, gpu), InputSharing()


def _wgrad_tile(work: Work, last: Axis, gpu: Gpu) -> tuple[Tile, InputSharing]:
    """Return the tile of wgrad, whose tokens are groups of positions, and the sharing within a group."""
    block_n = min(max(power_of_two(work.block[0]), 16), 128)
    forced = forced_tile("wgrad")
    block_k = 64 if block_n > 32 else 128
    tile = forced or Tile(min(work.tokens, 64), block_n, block_k, warps=8 if block_n > 64 else 4, stages=4)
    if _is_exact(work) and not forced:
        tile = Tile(16, min(block_n, 64), 64 if work.dtype == torch.float64 or block_n > 32 else 128, 4, stages=4)
    if gpu.kind.startswith("gfx") and not forced:
        tile = replace(tile, stages=2)
    for positions in POSITIONS if 1 < last.kernel <= MAX_TAPS and not _is_exact(work) else ():
        shared = InputSharing(positions, last.kernel, last.stride, last.dilation)
        small = replace(tile, block_m=max(tile.block_m // positions, 16))
        if forced is None:
            small = Tile(16, min(block_n, 64), 64 if work.tf32 else block_k, warps=4, stages=min(tile.stages, 3))
        if not fits_tensor_memory(last.kernel, positions, small.block_k, small.block_n, gpu):
            break  # as above
        loads = (shared.inputs * small.block_k + positions * small.block_n) * small.block_m * work.dtype.itemsize
        fits = last.kernel * small.block_k * small.block_n <= 32 * small.warps * MAX_SUMS
        # A group beyond the end of the axis would multiply inputs that may be NaN by zeros.
        if shared.saves_loads and fits and last.output % positions == 0 and 2 * loads < gpu.shared_memory:
            return replace(small, stages=min(small.stages, (gpu.shared_memory - 1) // loads)), shared
    return fit(tile, work, gpu), InputSharing()


def _is_exact(work: Work) -> bool:
    """Return whether products are plain multiply-adds, whose operands need the registers."""
    return work.dtype in (torch.float32, torch.float64) and not work.tf32


def _work(pass_: str, x: Tensor, layout: Layout, tokens: int) -> Work:
    """Return the properties of this product that determine its tile."""
    return Work(pass_, x.dtype, layout.block_shape, bucket(tokens), layout.density, tf32())


def _kernels() -> Any:
    from . import kernels

    return kernels


def _common(dtype: torch.dtype, tile: Tile) -> dict[str, Any]:
    return common(dtype, tile) | {"PRECISION": "tf32" if dtype == torch.float32 and tf32() else "ieee"}


def _check_fits(layout: Layout, axes: Sequence[Axis], images: int) -> None:
    """Refuse more blocks, channels or positions than kernels can count."""
    if isinstance(layout, BlockLayout):  # a traced layout was checked with its schedule
        check_layout_fits(layout)
    inputs = outputs = images
    for axis in axes:
        reach = axis.input + (axis.output - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + abs(axis.padding)
        check_fits("x", "positions along an axis with all that its taps reach", reach)
        inputs, outputs = inputs * axis.input + reach, outputs * axis.output + reach
    for count in (inputs, outputs):  # kernels count positions beyond the border, too
        check_fits("x", "positions in one call, with all that its taps reach,", count)


# -- schedules --------------------------------------------------------------------------------------------------

# Tensors of a schedule before those of wgrad: tasks, columns and blocks for forward and for dgrad.
ROW_TENSORS = 6


def schedule(
    layout: BlockLayout,
    device: torch.device,
    dtype: torch.dtype,
    taps: int,
    last: tuple[int, int, int],
    transposed: bool,
) -> list[Tensor]:
    """Return the index tensors of a layout for all passes, cached in the layout.

    `taps` is the number of taps of all axes, `last` the kernel, stride and dilation of the last axis. The tasks of
    wgrad are those of a convolution, or with `transposed` of a transposed one, for each kind of tile.
    """
    key = ("conv schedule", device, dtype, taps, last, transposed, forced(dtype), tf32())
    if torch.compiler.is_dynamo_compiling():
        _schedule_while_tracing(layout, key)
    cached: list[Tensor] | None = layout._derived.get(key)
    return layout.derived(key, lambda: _schedule(layout, *key[1:6])) if cached is None else cached


def _schedule_while_tracing(layout: BlockLayout, key: Any) -> bool:
    """Make the schedule when torch.compile traces, and keep it out of the graph."""
    layout.derived(key, lambda: _schedule(layout, *key[1:6]))
    return True


_schedule_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in ops/linear/triton.py


def _schedule(
    layout: BlockLayout,
    device: torch.device,
    dtype: torch.dtype,
    taps: int,
    last: tuple[int, int, int],
    transposed: bool,
) -> list[Tensor]:
    """Return the tasks of all passes as tensors, for a compiled graph that holds them."""
    check_layout_fits(layout)
    of_rows = *_tasks(layout, False, device), *_tasks(layout, True, device)
    rows = layout.T if transposed else layout
    work = Work("wgrad", dtype, rows.block_shape, bucket(1), layout.density, tf32())
    kernel, stride, dilation = last
    axis = Axis(input=1, output=1, kernel=kernel, stride=stride, padding=0, dilation=dilation)
    steps = _wgrad_steps(work, axis, taps, gpu_of(device))
    of_wgrad = [_wgrad_tasks(layout, transposed, step, device) for step in steps]
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    return [*(nothing if each is None else each for each in of_rows), *of_wgrad]


def _wgrad_steps(work: Work, last: Axis, taps: int, gpu: Gpu) -> list[tuple[int, int]]:
    """Return the steps of each kind of tile of wgrad: `block_k` and the lanes of a block, as in `wgrad_tasks`."""
    kinds = (_wgrad_tile(work, last._replace(output=outputs), gpu) for outputs in (*POSITIONS, 1))
    return [*dict.fromkeys((tile.block_k, taps // shared.taps) for tile, shared in kinds)]


def _wgrad_tasks(layout: BlockLayout, transposed: bool, step: tuple[int, int], device: torch.device) -> Tensor:
    """Return the tasks of wgrad on the device, cached in the layout."""
    rows = layout.T if transposed else layout
    return _cached_tensor(layout, ("conv wgrad tasks", transposed, *step), device, lambda: wgrad_tasks(rows, *step))


def _tasks(layout: Layout, transpose: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tasks, columns and blocks of forward, or with `transpose` of dgrad, on the device."""
    if isinstance(layout, TracedLayout):
        tasks, col, block = layout.schedule[3:ROW_TENSORS] if transpose else layout.schedule[:3]
        return tasks, col, block if transpose else None
    plan = layout.derived(("tasks", transpose, None), lambda: linear_plan(layout, transpose))
    tasks = _cached_tensor(layout, ("conv tasks", transpose), device, lambda: plan.tasks)
    col = _cached_tensor(layout, ("conv cols", transpose), device, lambda: plan.col)
    of_entries = plan.block
    return (
        tasks,
        col,
        None if of_entries is None else _cached_tensor(layout, ("conv blocks", transpose), device, lambda: of_entries),
    )


def _cached_tensor(layout: BlockLayout, key: tuple[Any, ...], device: torch.device, array: Any) -> Tensor:
    """Return the array on the device, cached in the layout."""

    def build() -> Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(array().copy()).to(device)

    return layout.derived((*key, device), build)


def _axis_attributes(axes: Sequence[Axis | Phase], *names: str) -> dict[str, int]:
    """Return attributes of three axes as arguments of a kernel, such as stride0, stride1, stride2."""
    return {
        name: number
        for each in names
        for name, number in _axis_arguments(each, [getattr(a, each) for a in axes]).items()
    }


def _axis_arguments(name: str, numbers: Sequence[int]) -> dict[str, int]:
    """Return numbers of three axes as arguments of a kernel: name0, name1, name2."""
    return {f"{name}{axis}": number for axis, number in enumerate(numbers)}
