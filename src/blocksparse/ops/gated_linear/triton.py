"""The gated pair on a GPU: both products in one kernel."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...layout import BlockLayout
from ..checks import contiguous_features
from ..gpu import runtime
from ..gpu.runtime import Launch, cdiv, check_fits, check_layout_fits, common
from ..gpu.tiles import FEW_TOKENS, Gpu, Tile, Work, bucket, fit, gpu_of, tile_for
from ..linear.triton import prepared
from .plan import gated_plan

unsupported_reason = runtime.unsupported_reason

# Sums of both products that fit in the registers of a thread.
MAX_SUMS = 128


def gated_linear(
    x: Tensor, gate: Tensor, gate_layout: BlockLayout, up: Tensor, up_layout: BlockLayout, gate_bias: Tensor | None,
    up_bias: Tensor | None, activation: str | None,
) -> Tensor:  # fmt: skip
    """Return activation(x G^T + gate_bias) * (x U^T + up_bias) by one kernel that loads x once for both."""
    tokens = x.shape[0]
    y = torch.empty(tokens, gate_layout.shape[0], dtype=x.dtype, device=x.device)
    if tokens == 0:
        return y
    x, gate, up = contiguous_features(x), gate.contiguous(), up.contiguous()
    gate_bias = None if gate_bias is None else gate_bias.contiguous()
    up_bias = None if up_bias is None else up_bias.contiguous()
    kind = ("gated", up_layout, activation)
    (launch,) = prepared(
        gate_layout,
        kind,
        x,
        (gate, up, gate_bias, up_bias, y),
        lambda: [_plan_launch(x, y, gate_layout, up_layout, activation)],
    )
    launch(x, gate, up, gate_bias, up_bias, y)
    return y


def _plan_launch(x: Tensor, y: Tensor, gate: BlockLayout, up: BlockLayout, activation: str | None) -> Launch:
    """Plan the kernel's launch for tensors of these shapes and strides."""
    from . import kernels

    tokens, (height, width) = x.shape[0], gate.block_shape
    check_fits("x", "tokens", tokens)
    for layout in (gate, up):
        check_layout_fits(layout)
    tasks, col, *block = gate.derived(("gated schedule", up, x.device), lambda: _schedule(gate, up, x.device))
    density = (gate.density + up.density) / 2
    tile = _tile(Work("forward", x.dtype, gate.block_shape, bucket(tokens), density), gpu_of(x.device))
    arguments = {
        "task_ptr": tasks, "col_ptr": col, "gate_block_ptr": block[0], "up_block_ptr": block[1],
        "tokens": tokens, "x_stride": x.stride(0), "y_stride": y.stride(0), "block_out": height, "block_in": width,
        "ACTIVATION": activation or "", **common(x.dtype, tile),
    }  # fmt: skip
    programs = cdiv(tokens, tile.block_m) * len(tasks) * cdiv(height, tile.block_n)
    return Launch(kernels.gated_linear_kernel, (programs, 1, 1), 6, arguments, tile)


def _schedule(gate: BlockLayout, up: BlockLayout, device: torch.device) -> list[Tensor]:
    """Return the tables of tasks on the device."""
    plan = gated_plan(gate, up)
    with torch.inference_mode(False):
        return [torch.from_numpy(array.copy()).to(device) for array in (plan.tasks, plan.col, *plan.block)]


def _tile(work: Work, gpu: Gpu) -> Tile:
    """Return the tile of one product of this work, reduced to leave room for the sums and weights of two.

    Measured on an H100 with bfloat16, density 0.05, 14,336 x 4,096: two warps take 13.1 us, four take 18.5 (32 tokens,
    blocks of 32). A pipeline of 4 stages, which leaves room for a second program, takes 449 us, one of 5 takes 590
    (4,096 tokens). Four warps on 128 x 64 sums take 284 us, eight take 309 (blocks of 128).
    """
    tile = replace(tile_for(work, gpu), pairs=True)
    if work.dtype.itemsize == 2 and work.tokens <= FEW_TOKENS:
        tile = replace(tile, block_n=min(tile.block_n, 32), block_k=min(tile.block_k, 64), warps=2)
    elif work.dtype.itemsize == 2 and tile.block_n > 32:
        tile = replace(tile, block_m=min(tile.block_m, 128), block_n=64, warps=4, stages=min(tile.stages, 4))
    elif work.dtype.itemsize == 2:
        tile = replace(tile, stages=min(tile.stages, 4))
    most = MAX_SUMS * 32 * tile.warps // 2
    while tile.block_m * tile.block_n > most and tile.block_m > 16:
        tile = replace(tile, block_m=tile.block_m // 2)
    return fit(tile, work, gpu)
