"""The convolutions on a GPU: tensors, tasks and geometry to launches."""

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

# Phases that have a launch each; more of them come in one, where their positions share nothing.
MAX_LAUNCHES = 8

refusal = runtime.refusal

Layout = BlockLayout | TracedLayout


def tf32() -> bool:
    """Whether PyTorch's own switch allows TF32 in convolutions of float32."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as that of products


def as_linear(dtype: torch.dtype) -> bool:
    """Whether the linear product may serve a convolution whose positions depend on themselves alone."""
    return dtype != torch.float32 or tf32() == tiles.tf32()


def conv(
    x: Tensor, values: Tensor, bias: Tensor | None, layout: Layout, transpose: bool, transposed: bool,
    axes: Sequence[Axis], activation: str | None,
) -> Tensor:  # fmt: skip
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out_space = [axis.input if transposed else axis.output for axis in axes]
    y = torch.empty(x.shape[0], *out_space, layout.shape[transpose], dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    # The taps of one weight are side by side, but the kernel needs the weights of one tap to be. The weights are small
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
    # The input of the convolution is gathered tap by tap, the output read once for several taps.
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
    """One launch for each phase, those with the most work first, or one for many."""
    _check_fits(layout, axes, x.shape[0])
    three = three_axes(axes)
    input, output, kernel, stride = (
        [getattr(axis, name) for axis in three] for name in ("input", "output", "kernel", "stride")
    )
    found = list(itertools.product(*(phases(axis, transposed) for axis in three)))
    found.sort(key=lambda three: -math.prod(phase.count * phase.taps for phase in three))
    tasks, col, block = _tasks(layout, transpose, x.device)
    gpu, in_step = gpu_of(x.device), 1 if transposed else stride[2]
    # Taps before those of a step to the next along each axis.
    taps_past = kernel[1] * kernel[2], kernel[2], 1
    launches = []
    for some in [found] if in_one_launch(axes, transposed) else [[each] for each in found]:
        last = some[0][2]
        tokens = x.shape[0] * math.prod(phase.count for phase in some[0])
        work = _work("dgrad" if transpose else "forward", x, layout, tokens)
        taps = last.taps if len(some) == 1 else MAX_TAPS + 1  # those of many phases differ
        tile, shared = _tile(work, tokens, last.count, taps, (in_step, last.shift_step), gpu)
        numbers = [_phase_numbers(three_phases, x.shape[0], taps_past, shared) for three_phases in some]
        arguments = {
            "task_ptr": tasks, "col_ptr": col, "block_ptr": block,
            "phase_ptr": None if len(some) == 1 else _table(cast(BlockLayout, layout), numbers, x.device),
            "tasks": tasks.shape[0], **numbers[0], "in_blocks": layout.grid[not transpose],
            "out_blocks": layout.grid[transpose], "all_taps": math.prod(kernel),
            **_each("in_size", output if transposed else input),
            **_each("out_size", input if transposed else output),
            **_each("out_step", stride if transposed else (1, 1, 1)),
            **_each("in_step", (1, 1, 1) if transposed else stride),
            **_each("tap_step", [phase.tap_step * past for phase, past in zip(some[0], taps_past, strict=True)]),
            **_numbers(some[0], "shift_step"), "block_out": layout.block_shape[0],
            "block_in": layout.block_shape[1],
            "AXES": len(axes), **shared.constants, "TRANSPOSE": transpose, "ACTIVATION": activation or "",
            **_common(x.dtype, tile),
        }  # fmt: skip
        tiles_of_tokens = cdiv(max(each["tokens"] for each in numbers), tile.block_m)
        programs = tiles_of_tokens * tasks.shape[0] * cdiv(layout.block_shape[transpose], tile.block_n)
        launches.append(Launch(_kernels().conv_kernel, (programs, len(some), 1), 4, arguments, tile))
    return launches


def _most_splits(steps: int) -> int:
    """The power of two from these steps on, by comparisons only, so that a traced size keeps its freedom."""
    most = 1
    while most < MAX_SPLITS and most < steps:
        most *= 2
    return most


def in_one_launch(axes: Sequence[Axis], transposed: bool) -> bool:
    """Whether all phases come in one launch, with a table; never of a traced layout, see op.py."""
    return math.prod(len(phases(axis, transposed)) for axis in axes) > MAX_LAUNCHES


def _table(layout: BlockLayout, numbers: Sequence[dict[str, int]], device: torch.device) -> Tensor:
    """The numbers of all phases; kept with the layout, as a captured graph may neither copy it nor lose it."""
    rows = tuple(tuple(each.values()) for each in numbers)
    return _on(layout, ("conv phases", rows), device, lambda: np.array(rows, np.int32))


def _phase_numbers(
    three_phases: Sequence[Phase], images: int, taps_past: Sequence[int], shared: Shared
) -> dict[str, int]:
    """The numbers of a phase, in the order in which the kernel reads them from a table."""
    last = three_phases[2]
    groups = cdiv(last.count, shared.together)
    numbers = {
        "tokens": images * three_phases[0].count * three_phases[1].count * groups, "groups": groups,
        "first_tap": sum(phase.tap * past for phase, past in zip(three_phases, taps_past, strict=True)),
        **_numbers(three_phases, "first", "count", "taps", "shift"),
    }  # fmt: skip
    return numbers | {"taps2": last.taps // shared.taps}


def _wgrad_launches(a: Tensor, b: Tensor, layout: Layout, transposed: bool, axes: Sequence[Axis]) -> list[Launch]:
    _check_fits(layout, axes, a.shape[0])
    for blocks, size in zip(layout.grid, layout.block_shape, strict=True):
        lanes = blocks * power_of_two(size) * math.prod(axis.kernel for axis in axes)
        check_fits("layout", "features, in blocks of a power of two, once for each tap,", lanes)
    rows: Layout = layout.T if transposed else layout
    last, gpu = axes[-1], gpu_of(a.device)
    work = replace(_work("wgrad", a, layout, math.prod(b.shape[:-1])), block=rows.block_shape)
    tile, shared = _wgrad_tile(work, last, gpu)
    tokens = math.prod(b.shape[:-1]) // shared.together
    taps = math.prod(axis.kernel for axis in axes)
    step = tile.block_k, taps // shared.taps
    if isinstance(layout, TracedLayout):
        tasks = layout.schedule[OF_ROWS + _wgrad_steps(work, last, taps, gpu).index(step)]
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
        "groups": last.output // shared.together, "numbers": numbers, "a_blocks": rows.grid[1],
        "b_blocks": rows.grid[0], **_numbers(three, "kernel", "stride", "padding", "dilation"),
        **_each("input_size", [axis.input for axis in three]),
        **_each("output_size", [axis.output for axis in three]), "a_width": rows.block_shape[1],
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

# Positions side by side that are tried, and the most taps of the last axis that a step sums.
POSITIONS, MAX_TAPS = (4, 2), 4
# Sums of a thread that leave it the registers for all else.
MAX_SUMS = 128
# Parts of a sum, which are loaded at once.
MAX_SPLITS = 64


class Shared(NamedTuple):
    """How many positions side by side along the last axis share inputs, with how many of its taps; or 1 and 1.

    Position n meets inputs `n * in_step + i * shift_step`, i < taps: those of a few positions are much the same.
    """

    together: int = 1
    taps: int = 1
    in_step: int = 1
    shift_step: int = 1

    @property
    def constants(self) -> dict[str, int]:
        return dict(zip(("POSITIONS", "TAPS", "IN_STEP", "SHIFT_STEP"), self, strict=True))

    @property
    def inputs(self) -> int:
        """The inputs of a group, from the first to the last."""
        return (self.together - 1) * self.in_step + (self.taps - 1) * abs(self.shift_step) + 1

    @property
    def pays(self) -> bool:
        """Whether it saves loads, and all those inputs are met."""
        met = {n * self.in_step + i * self.shift_step for n in range(self.together) for i in range(self.taps)}
        return self.inputs == len(met) < self.together * self.taps


def _tile(work: Work, tokens: int, count: int, taps: int, steps: tuple[int, int], gpu: Gpu) -> tuple[Tile, Shared]:
    """The tile of forward or dgrad, its tokens in groups, and what is in a group: a step stays within one entry.

    `count` positions along the last axis meet `taps` inputs each, with `steps` from position to position, tap to tap.
    """
    dgrad = work.pass_ == "dgrad"
    width, block_n = power_of_two(work.block[not dgrad]), min(max(power_of_two(work.block[dgrad]), 16), 128)
    forced = forced_tile(work.pass_)
    tile = forced or Tile(min(work.tokens, 128), block_n, 64, warps=8 if block_n > 64 else 4, stages=3)
    if _is_exact(work) and not forced:
        block_k = 16 if work.dtype == torch.float64 else max(min(block_n, 64) // 2, 16)
        tile = Tile(min(work.tokens, 64), min(block_n, 64), block_k, warps=4, stages=5)
    if gpu.kind.startswith("gfx") and not forced:  # the pipeline there is one step in registers, one in shared memory
        tile = replace(tile, stages=2)
    tile = replace(tile, block_k=min(tile.block_k, max(width, 16)), pairs=False)
    for together in POSITIONS if taps <= MAX_TAPS and not _is_exact(work) else ():
        shared = Shared(together, taps, *steps)
        small = replace(tile, block_m=max(tile.block_m // together, 16))
        if forced is None:  # the least that `wgmma` takes, and small steps: what counts is how many programs wait
            small = replace(tile, block_m=64, block_k=min(tile.block_k, 64 // work.dtype.itemsize), stages=2)
        if not fits_tensor_memory(together, taps, small.block_m, small.block_n, gpu):
            break  # two at a time take as many instructions as each by itself, or more
        loads = (shared.inputs * small.block_m + taps * small.block_n) * small.block_k * work.dtype.itemsize
        few = tokens <= FEW_TOKENS or block_n > 64 or cdiv(count, together) * together * 7 > count * 8
        fits = together * small.block_m * small.block_n <= 32 * small.warps * MAX_SUMS
        if shared.pays and fits and not few and small.stages * loads < gpu.shared_memory:
            return small, shared
    return fit(tile, work, gpu), Shared()


def _wgrad_tile(work: Work, last: Axis, gpu: Gpu) -> tuple[Tile, Shared]:
    """The tile of wgrad, its tokens in groups, and what is in a group."""
    block_n = min(max(power_of_two(work.block[0]), 16), 128)
    forced = forced_tile("wgrad")
    block_k = 64 if block_n > 32 else 128
    tile = forced or Tile(min(work.tokens, 64), block_n, block_k, warps=8 if block_n > 64 else 4, stages=4)
    if _is_exact(work) and not forced:
        tile = Tile(16, min(block_n, 64), 64 if work.dtype == torch.float64 or block_n > 32 else 128, 4, stages=4)
    if gpu.kind.startswith("gfx") and not forced:
        tile = replace(tile, stages=2)
    for together in POSITIONS if 1 < last.kernel <= MAX_TAPS and not _is_exact(work) else ():
        shared = Shared(together, last.kernel, last.stride, last.dilation)
        small = replace(tile, block_m=max(tile.block_m // together, 16))
        if forced is None:
            small = Tile(16, min(block_n, 64), 64 if work.tf32 else block_k, warps=4, stages=min(tile.stages, 3))
        if not fits_tensor_memory(last.kernel, together, small.block_k, small.block_n, gpu):
            break  # as above
        loads = (shared.inputs * small.block_k + together * small.block_n) * small.block_m * work.dtype.itemsize
        fits = last.kernel * small.block_k * small.block_n <= 32 * small.warps * MAX_SUMS
        # A group that went on beyond the end of the axis would multiply inputs that are not a number by zeros.
        if shared.pays and fits and last.output % together == 0 and 2 * loads < gpu.shared_memory:
            return replace(small, stages=min(small.stages, (gpu.shared_memory - 1) // loads)), shared
    return fit(tile, work, gpu), Shared()


def _is_exact(work: Work) -> bool:
    """Whether products are plain multiply-adds, whose operands need the registers."""
    return work.dtype in (torch.float32, torch.float64) and not work.tf32


def _work(pass_: str, x: Tensor, layout: Layout, tokens: int) -> Work:
    return Work(pass_, x.dtype, layout.block_shape, bucket(tokens), layout.density, tf32())


def _kernels() -> Any:
    from . import kernels

    return kernels


def _common(dtype: torch.dtype, tile: Tile) -> dict[str, Any]:
    return common(dtype, tile) | {"PRECISION": "tf32" if dtype == torch.float32 and tf32() else "ieee"}


def _check_fits(layout: Layout, axes: Sequence[Axis], images: int) -> None:
    """Raises a BlockSparseError for more blocks, channels or positions than kernels count."""
    if isinstance(layout, BlockLayout):  # of others the schedule has been made
        check_layout_fits(layout)
    inputs = outputs = images
    for axis in axes:
        reach = axis.input + (axis.output - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + abs(axis.padding)
        check_fits("x", "positions along an axis with all that its taps reach", reach)
        inputs, outputs = inputs * axis.input + reach, outputs * axis.output + reach
    for count in (inputs, outputs):  # beyond the border positions are counted too, though not read
        check_fits("x", "positions in one call, with all that its taps reach,", count)


# -- schedules --------------------------------------------------------------------------------------------------

# The tensors of a schedule before those of wgrad: tasks, columns and blocks for forward and for dgrad.
OF_ROWS = 6


def schedule(
    layout: BlockLayout,
    device: torch.device,
    dtype: torch.dtype,
    taps: int,
    last: tuple[int, int, int],
    transposed: bool,
) -> list[Tensor]:
    """The index tensors of a layout for all passes: of wgrad, as `transposed` as this, for each kind of tile.

    `taps` are those of all axes, `last` has the kernel, stride and dilation of the last. Made at the first call,
    then kept.
    """
    key = ("conv schedule", device, dtype, taps, last, transposed, forced(dtype), tf32())
    if torch.compiler.is_dynamo_compiling():
        _schedule_while_tracing(layout, key)
    found: list[Tensor] | None = layout._derived.get(key)
    return layout.derived(key, lambda: _schedule(layout, *key[1:6])) if found is None else found


def _schedule_while_tracing(layout: BlockLayout, key: Any) -> bool:
    layout.derived(key, lambda: _schedule(layout, *key[1:6]))
    return True


_schedule_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as that of ops/linear/triton.py


def _schedule(
    layout: BlockLayout,
    device: torch.device,
    dtype: torch.dtype,
    taps: int,
    last: tuple[int, int, int],
    transposed: bool,
) -> list[Tensor]:
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
    """The steps of each kind of tile that wgrad has, by how many outputs are side by side: `block_k`, lanes a block."""
    found = (_wgrad_tile(work, replace(last, output=outputs), gpu) for outputs in (*POSITIONS, 1))
    return [*dict.fromkeys((tile.block_k, taps // shared.taps) for tile, shared in found)]


def _wgrad_tasks(layout: BlockLayout, transposed: bool, step: tuple[int, int], device: torch.device) -> Tensor:
    rows = layout.T if transposed else layout
    return _on(layout, ("conv wgrad tasks", transposed, *step), device, lambda: wgrad_tasks(rows, *step))


def _tasks(layout: Layout, transpose: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    if isinstance(layout, TracedLayout):
        tasks, col, block = layout.schedule[3:OF_ROWS] if transpose else layout.schedule[:3]
        return tasks, col, block if transpose else None
    plan = layout.derived(("tasks", transpose, None), lambda: linear_plan(layout, transpose))
    tasks = _on(layout, ("conv tasks", transpose), device, lambda: plan.tasks)
    col = _on(layout, ("conv cols", transpose), device, lambda: plan.col)
    of_entries = plan.block
    return (
        tasks,
        col,
        None if of_entries is None else _on(layout, ("conv blocks", transpose), device, lambda: of_entries),
    )


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
