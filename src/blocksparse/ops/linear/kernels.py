"""The Triton kernels of the linear products: tiles and loops; what runs where is decided by the plan and triton.py.

A tile of tokens is the M operand, so that Hopper's `wgmma` serves blocks of 16 and more, and a program sums all blocks
of its task in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..gpu.device import dot, finish, lanes, load_inputs, load_weights


@triton.jit
def linear_kernel(
    x_ptr,  # [tokens, in], the features of one token side by side
    values_ptr,  # [nnz, block_out, block_in]
    bias_ptr,  # [out] or None
    y_ptr,  # [tokens, out]
    partial_ptr,  # [slots, tokens, outputs of a row]: sums of parts of rows
    task_ptr,  # int32 [tasks, 4]: row, first entry, last entry, slot (or -1: the whole row)
    col_ptr,  # int32 [entries]: the block of inputs
    block_ptr,  # int32 [entries]: the block's place in values, or None where that is the entry
    tokens,
    tasks,
    x_stride,
    y_stride,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,  # the dtype of sums
    WIDEN: tl.constexpr,  # operands to it beforehand: see gpu/device.py
    SPLIT: tl.constexpr,  # some tasks are parts of rows
    BLOCK_M: tl.constexpr,  # the tile: tokens, outputs, lanes
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,  # token tiles that come to one task side by side
):
    """y = x W^T (x W with TRANSPOSE): one tile of tokens and outputs, all entries of one task."""
    height: tl.constexpr = block_in if TRANSPOSE else block_out
    task, piece, tile = _program(tokens, tasks, height, BLOCK_N, BLOCK_M, GROUP_M)
    row = tl.load(task_ptr + 4 * task)
    first = tl.load(task_ptr + 4 * task + 1)
    last = tl.load(task_ptr + 4 * task + 2)
    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    output = piece * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the last token comes the last one again: its sums are not stored.
    x_rows = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64) * x_stride
    y_rows = y_ptr + token.to(tl.int64) * y_stride
    sums = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    width: tl.constexpr = block_out if TRANSPOSE else block_in
    WIDTH: tl.constexpr = triton.next_power_of_2(width)
    for lane0 in range(0, (last - first) * WIDTH, BLOCK_K):
        entry, k, there = lanes(first, last, lane0, width, WIDTH, BLOCK_K)
        x = load_inputs(x_rows, None, col_ptr, entry, k, there, width)
        w = load_weights(values_ptr, block_ptr, entry, k, there, output, block_out, block_in, TRANSPOSE)
        sums = dot(x, w, sums, PRECISION, WIDEN)
    if SPLIT:
        slot = tl.load(task_ptr + 4 * task + 3)
        if slot < 0:
            finish(sums, y_rows, token < tokens, bias_ptr, row, output, height, ACTIVATION)
        else:
            offset = (slot.to(tl.int64) * tokens + token[:, None]) * height + output[None, :]
            tl.store(partial_ptr + offset, sums, mask=(token < tokens)[:, None] & (output < height)[None, :])
    else:
        finish(sums, y_rows, token < tokens, bias_ptr, row, output, height, ACTIVATION)


@triton.jit
def linear_pair_kernel(
    x_ptr,
    values_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,  # not used: pairs are never cut in parts
    task_ptr,  # int32 [tasks, 6]: two rows (or one and -1), where entries of both, the first, the second begin and end
    col_ptr,
    block_ptr,  # int32 [2, entries]: the block of either row
    entries,
    tokens,
    tasks,
    x_stride,
    y_stride,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Computes two rows at once as linear_kernel does one: inputs that both need are loaded once."""
    height: tl.constexpr = block_in if TRANSPOSE else block_out
    width: tl.constexpr = block_out if TRANSPOSE else block_in
    WIDTH: tl.constexpr = triton.next_power_of_2(width)
    task, piece, tile = _program(tokens, tasks, height, BLOCK_N, BLOCK_M, GROUP_M)
    row0 = tl.load(task_ptr + 6 * task)
    row1 = tl.load(task_ptr + 6 * task + 1)
    both = tl.load(task_ptr + 6 * task + 2)
    only0 = tl.load(task_ptr + 6 * task + 3)
    only1 = tl.load(task_ptr + 6 * task + 4)
    end = tl.load(task_ptr + 6 * task + 5)
    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    output = piece * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64) * x_stride
    y_rows = y_ptr + token.to(tl.int64) * y_stride
    sums0 = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    sums1 = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for lane0 in range(0, (only0 - both) * WIDTH, BLOCK_K):
        entry, k, there = lanes(both, only0, lane0, width, WIDTH, BLOCK_K)
        x = load_inputs(x_rows, None, col_ptr, entry, k, there, width)
        w0 = load_weights(values_ptr, block_ptr, entry, k, there, output, block_out, block_in, TRANSPOSE)
        w1 = load_weights(values_ptr, block_ptr + entries, entry, k, there, output, block_out, block_in, TRANSPOSE)
        sums0 = dot(x, w0, sums0, PRECISION, WIDEN)
        sums1 = dot(x, w1, sums1, PRECISION, WIDEN)
    for lane0 in range(0, (only1 - only0) * WIDTH, BLOCK_K):
        entry, k, there = lanes(only0, only1, lane0, width, WIDTH, BLOCK_K)
        x = load_inputs(x_rows, None, col_ptr, entry, k, there, width)
        w0 = load_weights(values_ptr, block_ptr, entry, k, there, output, block_out, block_in, TRANSPOSE)
        sums0 = dot(x, w0, sums0, PRECISION, WIDEN)
    for lane0 in range(0, (end - only1) * WIDTH, BLOCK_K):
        entry, k, there = lanes(only1, end, lane0, width, WIDTH, BLOCK_K)
        x = load_inputs(x_rows, None, col_ptr, entry, k, there, width)
        w1 = load_weights(values_ptr, block_ptr + entries, entry, k, there, output, block_out, block_in, TRANSPOSE)
        sums1 = dot(x, w1, sums1, PRECISION, WIDEN)
    finish(sums0, y_rows, token < tokens, bias_ptr, row0, output, height, ACTIVATION)
    if row1 >= 0:
        finish(sums1, y_rows, token < tokens, bias_ptr, row1, output, height, ACTIVATION)


@triton.jit
def linear_reduce_kernel(
    partial_ptr,
    bias_ptr,
    y_ptr,
    slot_ptr,  # int32 [slots, 2]: row, and behind the row's last slot (or -1: not the row's first)
    tokens,
    y_stride,
    height: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The rows that came in parts: their sums in the order of the slots, whichever program wrote them first."""
    slices: tl.constexpr = triton.cdiv(height, BLOCK_N)
    tiles = tl.cdiv(tokens, BLOCK_M)
    first = (tl.program_id(0) // (tiles * slices)).to(tl.int64)
    rest = tl.program_id(0) % (tiles * slices)
    row = tl.load(slot_ptr + 2 * first)
    end = tl.load(slot_ptr + 2 * first + 1)
    token = rest // slices * BLOCK_M + tl.arange(0, BLOCK_M)
    output = rest % slices * BLOCK_N + tl.arange(0, BLOCK_N)
    here = (token < tokens)[:, None] & (output < height)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for part in range(0, end - first):
        offset = ((first + part) * tokens + token[:, None]) * height + output[None, :]
        sums += tl.load(partial_ptr + offset, mask=here, other=0)
    y_rows = y_ptr + token.to(tl.int64) * y_stride
    if end >= 0:
        finish(sums, y_rows, token < tokens, bias_ptr, row, output, height, ACTIVATION)


@triton.jit
def linear_wgrad_kernel(
    grad_ptr,  # [tokens, out]
    x_ptr,  # [tokens, in]
    values_ptr,  # [splits, nnz, block_out, block_in]
    task_ptr,  # int32 [tasks, 4]: row, first entry, last entry of the row, first lane of the task
    col_ptr,
    nnz,
    tokens,
    tokens_per_split,
    grad_stride,
    x_stride,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The blocks of grad^T x that the layout stores: BLOCK_K lanes of one row's entries, a part of the tokens."""
    task = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    row = tl.load(task_ptr + 4 * task)
    first = tl.load(task_ptr + 4 * task + 1)
    last = tl.load(task_ptr + 4 * task + 2)
    lane0 = tl.multiple_of(tl.load(task_ptr + 4 * task + 3), BLOCK_K)  # said, so that loads are 16 bytes wide
    WIDTH: tl.constexpr = triton.next_power_of_2(block_in)
    entry, i, there = lanes(first, last, lane0, block_in, WIDTH, BLOCK_K)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col = tl.load(col_ptr + entry, mask=there, other=0)
    x_lane = x_ptr + (col * block_in + i)
    grad_lane = grad_ptr + (row * block_out + o)
    sums = tl.zeros((BLOCK_K, BLOCK_N), SUM)
    begin = split * tokens_per_split
    end = tl.minimum(begin + tokens_per_split, tokens)
    for token0 in range(begin, end, BLOCK_M):
        token = token0 + tl.arange(0, BLOCK_M)
        known = token < end
        x = tl.load(
            x_lane[:, None] + token.to(tl.int64)[None, :] * x_stride, mask=known[None, :] & there[:, None], other=0
        )
        grad = tl.load(
            grad_lane[None, :] + token.to(tl.int64)[:, None] * grad_stride,
            mask=known[:, None] & (o < block_out)[None, :],
            other=0,
        )
        sums = dot(x, grad, sums, PRECISION, WIDEN)
    block = split.to(tl.int64) * nnz + entry
    offset = (block[:, None] * block_out + o[None, :]) * block_in + i[:, None]
    tl.store(values_ptr + offset, sums, mask=there[:, None] & (o < block_out)[None, :])


@triton.jit
def _program(tokens, tasks, height: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """(task, slice of its outputs, tile of tokens) of this program: tasks in their order, GROUP_M tiles at each."""
    slices: tl.constexpr = triton.cdiv(height, BLOCK_N)
    tiles = tl.cdiv(tokens, BLOCK_M)
    program = tl.program_id(0)
    per_group = tl.minimum(tiles, GROUP_M) * tasks * slices  # never more than there are programs
    group = program // per_group
    size = tl.minimum(tiles - group * GROUP_M, GROUP_M)
    rest = program - group * per_group
    return (rest // size // slices).to(tl.int64), rest // size % slices, group * GROUP_M + rest % size
