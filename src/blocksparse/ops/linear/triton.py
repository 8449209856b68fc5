"""The linear products on a GPU: tensors, schedule and tile to a launch.

What kernels need of a layout is its schedule, a few index tensors on their device. A compiled graph has no layout: it
brings them along as inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from .. import triton_runtime
from .gpu_plan import LinearPlan, linear_plan, pair_plan, wgrad_tasks
from .tiles import Gpu, Tile, Work, bucket, forced, gpu_of, tile_for

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Schedule(NamedTuple):
    """The index tensors of a layout on a device, for the three passes; see `gpu_plan` for what is in them."""

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


class TracedLayout(NamedTuple):
    """What a graph that is being traced knows of a layout."""

    grid: tuple[int, int]
    block_shape: tuple[int, int]
    nnz: int
    schedule: Sequence[Tensor]

    @property
    def density(self) -> float:
        return self.nnz / (self.grid[0] * self.grid[1])


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in DTYPES:
        return f"it serves {', '.join(str(known) for known in DTYPES)}"
    return triton_runtime.refusal(device)


# -- schedules --------------------------------------------------------------------------------------------------


def schedule(layout: BlockLayout, device: torch.device, dtype: torch.dtype, tokens: int) -> Schedule:
    """The schedule of this layout on this device for about so many tokens, made at the first call and kept with it."""
    key = ("triton schedule", device, dtype, bucket(tokens), forced())
    if torch.compiler.is_compiling():
        _schedule_while_tracing(layout, key)
    found = layout._derived.get(key)
    if found is None:
        found = layout.derived(key, lambda: _schedule(layout, *key[1:4]))
    return found


def _schedule_while_tracing(layout: BlockLayout, key: Any) -> bool:
    layout.derived(key, lambda: _schedule(layout, *key[1:4]))
    return True


# Dynamo runs it as it is, instead of tracing into numpy, and then finds the tensors in place. This is what
# `torch.compiler.assume_constant_result` does, which would import all of Dynamo now.
_schedule_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _schedule(layout: BlockLayout, device: torch.device, dtype: torch.dtype, tokens: int) -> Schedule:
    if layout.nnz >= 2**31:
        raise BlockSparseError.expected("layout", "fewer than 2^31 blocks on a GPU", f"{layout.nnz}")
    gpu = gpu_of(device)
    forward, dgrad = (
        _plan(layout, transpose, tile_for(_work(pass_, dtype, layout, tokens), gpu), tokens, gpu)
        for pass_, transpose in (("forward", False), ("dgrad", True))
    )
    wgrad = wgrad_tasks(layout, tile_for(_work("wgrad", dtype, layout, tokens), gpu).lanes)
    with torch.inference_mode(False):
        arrays = [*_arrays(forward), *_arrays(dgrad), wgrad, layout.col_of_block.astype("int32")]
        return Schedule(*(torch.from_numpy(array.copy()).to(device) for array in arrays))


def _plan(layout: BlockLayout, transpose: bool, tile: Tile, tokens: int, gpu: Gpu) -> LinearPlan:
    if tile.pairs:
        return layout.derived(("pairs", transpose), lambda: pair_plan(layout, transpose))
    rows = layout.T if transpose else layout
    height, width = rows.block_shape
    lengths = rows.row_start[1:] - rows.row_start[:-1]
    # Entries per multiprocessor. A row well above that would keep one busy alone: it is cut in parts of about half of
    # it, though not so short that a program does little but start and stop.
    mean = layout.nnz * _cdiv(height, tile.outputs) * _cdiv(tokens, tile.tokens) / gpu.multiprocessors
    least = 4 * max(tile.lanes // width, 1)
    longest = None if lengths.max() <= 1.5 * mean else max(int(mean / 2), least)
    return layout.derived(("tasks", transpose, longest), lambda: linear_plan(layout, transpose, longest))


def _arrays(plan: LinearPlan) -> list[Any]:
    return [plan.tasks, plan.col, plan.col[:0] if plan.block is None else plan.block, plan.slots]


def _work(pass_: str, dtype: torch.dtype, layout: BlockLayout | TracedLayout, tokens: int) -> Work:
    return Work(pass_, dtype, layout.block_shape, bucket(tokens), layout.density)


# -- launches ---------------------------------------------------------------------------------------------------


def linear(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    layout: BlockLayout | TracedLayout,
    transpose: bool,
    activation: str | None,
) -> Tensor:
    from . import kernels

    tokens = x.shape[0]
    tasks, col, block, slots = _schedule_of(layout, x)[4:8] if transpose else _schedule_of(layout, x)[:4]
    rows, height = layout.grid[transpose], layout.block_shape[transpose]
    y = torch.empty(tokens, rows * height, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, values = _features_contiguous(x), values.contiguous()
    pairs = tasks.shape[1] == 6
    tile = tile_for(_work("dgrad" if transpose else "forward", x.dtype, layout, tokens), gpu_of(x.device))
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    common = {
        "block_out": layout.block_shape[0],
        "block_in": layout.block_shape[1],
        "TRANSPOSE": transpose,
        "ACTIVATION": activation or "",
        "PRECISION": _precision(x.dtype),
        "SUM": kernels.DTYPES[sums],
        "WIDEN": triton_runtime.interpreting(),
        "TOKENS": tile.tokens,
        "OUTPUTS": tile.outputs,
        "LANES": tile.lanes,
        "GROUP": tile.group,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    token_tiles, slices = _cdiv(tokens, tile.tokens), _cdiv(height, tile.outputs)
    grid = (token_tiles * tasks.shape[0] * slices,)
    if pairs:
        _launch(
            kernels.linear_pair_kernel, grid,
            x, values, bias, y, tasks, col, block, col.shape[0], tokens, tasks.shape[0], x.stride(0), y.stride(0),
            **common,
        )  # fmt: skip
        return y
    split = slots.shape[0] > 0
    partial = torch.empty(slots.shape[0], tokens, height, dtype=sums, device=x.device) if split else None
    _launch(
        kernels.linear_kernel, grid,
        x, values, bias, y, partial, tasks, col, block if transpose else None, tokens, tasks.shape[0], x.stride(0),
        y.stride(0), SPLIT=split, **common,
    )  # fmt: skip
    if split:
        _launch(
            kernels.linear_reduce_kernel, (slots.shape[0], token_tiles, slices),
            partial, bias, y, slots, tokens, y.stride(0), height=height, num_warps=4,
            **{name: common[name] for name in ("ACTIVATION", "SUM", "TOKENS", "OUTPUTS")},
        )  # fmt: skip
    return y


def linear_wgrad(grad: Tensor, x: Tensor, layout: BlockLayout | TracedLayout) -> Tensor:
    from . import kernels

    tokens = x.shape[0]
    tasks, col = _schedule_of(layout, x)[8:]
    shape = (layout.nnz, *layout.block_shape)
    if layout.nnz == 0 or tokens == 0:
        return torch.zeros(shape, dtype=x.dtype, device=x.device)
    grad, x = _features_contiguous(grad), _features_contiguous(x)
    gpu = gpu_of(x.device)
    tile = tile_for(_work("wgrad", x.dtype, layout, tokens), gpu)
    slices = _cdiv(layout.block_shape[0], tile.outputs)
    # Few blocks and many tokens: several programs share the tokens of a block, or most of the GPU stands idle.
    splits = max(1, min(2 * gpu.multiprocessors // (tasks.shape[0] * slices), bucket(tokens) // (8 * tile.tokens)))
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    values = torch.empty((splits, *shape), dtype=sums if splits > 1 else x.dtype, device=x.device)
    tokens_per_split = _cdiv(_cdiv(tokens, splits), tile.tokens) * tile.tokens
    _launch(
        kernels.linear_wgrad_kernel, (tasks.shape[0], slices, splits),
        grad, x, values, tasks, col, layout.nnz, tokens, tokens_per_split, grad.stride(0), x.stride(0),
        block_out=layout.block_shape[0], block_in=layout.block_shape[1],
        PRECISION=_precision(x.dtype), SUM=kernels.DTYPES[sums], WIDEN=triton_runtime.interpreting(),
        TOKENS=tile.tokens, OUTPUTS=tile.outputs, LANES=tile.lanes, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return values[0] if splits == 1 else values.sum(0).to(x.dtype)


def _schedule_of(layout: BlockLayout | TracedLayout, x: Tensor) -> Sequence[Tensor]:
    if isinstance(layout, TracedLayout):
        return layout.schedule
    return schedule(layout, x.device, x.dtype, x.shape[0])


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    if isinstance(args[0], FunctionalTensor):  # traced
        kernel = torch.library.wrap_triton(kernel)
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


def _precision(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _features_contiguous(x: Tensor) -> Tensor:
    # The kernels take any distance between tokens, but the features of one token side by side.
    return x if x.stride(1) == 1 else x.contiguous()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
