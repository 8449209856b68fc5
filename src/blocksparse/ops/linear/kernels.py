"""The Triton kernels of the linear products; the plan and triton.py decide which program computes what.

A tile of tokens is the M operand, so Hopper's `wgmma` serves blocks of 16 and more. A program sums all blocks of its
task in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..gpu.device import dot, finish, lanes, load_inputs, load_weights, write


@triton.jit(do_not_specialize=["tokens", "tasks"])
def linear_kernel(
    x_ptr,  # [tokens, in], features contiguous
    values_ptr,  # [nnz, block_out, block_in]
    bias_ptr,  # [out] or None
    y_ptr,  # [tokens, out]
    partial_ptr,  # [slots, tokens, outputs of a row]: sums of parts of rows
    task_ptr,  # int32 [tasks, 3 + ROWS]: row, first entry, end of entries, slot (-1: whole row), second row (-1: none)
    col_ptr,  # int32 [entries]: the block of inputs
    block_ptr,  # int32 [entries, ROWS]: each row's block in values (or -1: none); or None where that is the entry
    tokens, tasks, x_stride, y_stride,
    block_out: tl.constexpr, block_in: tl.constexpr, TRANSPOSE: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM_DTYPE: tl.constexpr,  # the dtype of sums
    WIDEN: tl.constexpr,  # convert operands to SUM_DTYPE first: see gpu/device.py
    SPLIT: tl.constexpr,  # whether some tasks are parts of rows
    ROWS: tl.constexpr,  # rows of a task: one or two
    BLOCK_M: tl.constexpr,  # the tile: tokens, outputs of each row, lanes
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,  # consecutive token tiles of one task
):  # fmt: skip
    """Compute one tile of y = x W^T (of x W with TRANSPOSE): some tokens and outputs, all entries of one task.

    The outputs of two rows are one tile: inputs that both need are loaded once. If only one row has a
    block, the other multiplies by zeros, without loading weights.
    """
    height: tl.constexpr = block_in if TRANSPOSE else block_out
    width: tl.constexpr = block_out if TRANSPOSE else block_in
    WIDTH: tl.constexpr = triton.next_power_of_2(width)
    # A step of one entry loads its indices once; small entries are gathered by lanes, several per step.
    ONE_BY_ONE: tl.constexpr = ROWS > 1 or BLOCK_K <= WIDTH
    STEPS: tl.constexpr = triton.cdiv(width, BLOCK_K)  # of an entry
    # `wgmma` has 64 rows and up to 256 columns; with tokens as columns, they are read from shared memory less often.
    OUTPUTS_FIRST: tl.constexpr = ONE_BY_ONE and ROWS * BLOCK_N >= 64 and BLOCK_M >= 64
    task, slice_, tile = _program(tokens, tasks, height, BLOCK_N, BLOCK_M, GROUP_M)
    task_ptr += (3 + ROWS) * task
    first = tl.load(task_ptr + 1)
    end = tl.load(task_ptr + 2)
    row_in_pair = tl.arange(0, ROWS * BLOCK_N) // BLOCK_N
    output = slice_ * BLOCK_N + tl.arange(0, ROWS * BLOCK_N) % BLOCK_N
    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows beyond the last token repeat it; their sums are not stored.
    x_rows = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64) * x_stride
    sums = tl.zeros((ROWS * BLOCK_N, BLOCK_M) if OUTPUTS_FIRST else (BLOCK_M, ROWS * BLOCK_N), SUM_DTYPE)
    if ONE_BY_ONE:
        for step in range(0, (end - first) * STEPS):
            sums = _step(
                sums, step, first, None, x_rows, values_ptr, col_ptr, block_ptr, row_in_pair, output,
                block_out, block_in, TRANSPOSE, PRECISION, WIDEN, ROWS, OUTPUTS_FIRST, BLOCK_K,
            )  # fmt: skip
    else:
        for lane0 in range(0, (end - first) * WIDTH, BLOCK_K):
            entry, k, k_mask = lanes(first, end, lane0, width, WIDTH, BLOCK_K)
            x = load_inputs(x_rows, None, col_ptr, entry, k, k_mask, width)
            w = load_weights(values_ptr, block_ptr, entry, k, k_mask, output, block_out, block_in, TRANSPOSE)
            sums = dot(x, w, sums, PRECISION, WIDEN)
    output_mask = output < height
    row = tl.load(task_ptr)
    if ROWS > 1:
        row = tl.load(task_ptr + 4 * row_in_pair)
        output_mask = output_mask & (row >= 0)
    column = row * height + output
    if ROWS > 1:
        # This hint makes stores wide: the compiler does not know that columns of one `row_in_pair` have one row.
        column = tl.max_contiguous(tl.multiple_of(column, min(height & -height, BLOCK_N)), BLOCK_N)
        if tl.max((sums != sums).to(tl.int32)) > 0:
            _recompute_row_by_row(
                x_ptr, values_ptr, bias_ptr, y_ptr, col_ptr, block_ptr, tokens, x_stride, y_stride,
                first, end, tile, row_in_pair, output, column, output_mask,
                block_out, block_in, TRANSPOSE, ACTIVATION, PRECISION, SUM_DTYPE, WIDEN, ROWS, BLOCK_M, BLOCK_K,
            )  # fmt: skip
            output_mask = output_mask & (row_in_pair < 0)
    if OUTPUTS_FIRST:
        sums = tl.trans(sums)
    y_rows, token_mask = y_ptr + token.to(tl.int64) * y_stride, token < tokens
    if SPLIT:
        slot = tl.load(task_ptr + 3)
        if slot < 0:
            write(sums, y_rows, token_mask, bias_ptr, column, output_mask, ACTIVATION)
        else:
            offset = (slot.to(tl.int64) * tokens + token[:, None]) * height + output[None, :]
            tl.store(partial_ptr + offset, sums, mask=token_mask[:, None] & output_mask[None, :])
    else:
        write(sums, y_rows, token_mask, bias_ptr, column, output_mask, ACTIVATION)


@triton.jit
def _recompute_row_by_row(
    x_ptr, values_ptr, bias_ptr, y_ptr, col_ptr, block_ptr,
    tokens, x_stride, y_stride, first, end, tile, row_in_pair, output, column, output_mask,
    block_out: tl.constexpr, block_in: tl.constexpr, TRANSPOSE: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, SUM_DTYPE: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute and store the tile again, one block row at a time, because some inputs are not finite.

    The usual loop shares steps between rows and multiplies by zero where a row lacks the block; infinity times zero
    gives NaN. Tiles are small here, so that the usual loop gets the registers.
    """
    SMALL: tl.constexpr = min(BLOCK_M, 64)
    STEPS: tl.constexpr = triton.cdiv(block_out if TRANSPOSE else block_in, BLOCK_K)
    for part in range(0, ROWS * (BLOCK_M // SMALL)):
        only_row = part % ROWS
        token = tile * BLOCK_M + part // ROWS * SMALL + tl.arange(0, SMALL)
        x_rows = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64) * x_stride
        sums = tl.zeros((SMALL, row_in_pair.shape[0]), SUM_DTYPE)
        for step in tl.range(0, (end - first) * STEPS, num_stages=1):
            sums = _step(
                sums, step, first, only_row, x_rows, values_ptr, col_ptr, block_ptr, row_in_pair, output,
                block_out, block_in, TRANSPOSE, PRECISION, WIDEN, ROWS, False, BLOCK_K,
            )  # fmt: skip
        y_rows = y_ptr + token.to(tl.int64) * y_stride
        write(sums, y_rows, token < tokens, bias_ptr, column, output_mask & (row_in_pair == only_row), ACTIVATION)


@triton.jit
def _step(
    sums, step, first,
    only_row,  # 0 or 1: use only the inputs of blocks of this row of the pair; None uses all
    x_rows,
    values_ptr, col_ptr, block_ptr,
    row_in_pair, output,
    block_out: tl.constexpr, block_in: tl.constexpr, TRANSPOSE: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS_FIRST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sums plus the product of one entry, or of one part of a large entry."""
    height: tl.constexpr = block_in if TRANSPOSE else block_out
    width: tl.constexpr = block_out if TRANSPOSE else block_in
    PART: tl.constexpr = min(BLOCK_K, max(triton.next_power_of_2(width), 16))
    STEPS: tl.constexpr = triton.cdiv(width, PART)
    entry = first + step // STEPS
    k = step % STEPS * PART + tl.arange(0, PART)
    k_mask, output_mask = k < width, output < height
    if ROWS > 1:
        block = tl.load(block_ptr + entry * ROWS + row_in_pair)
        output_mask = output_mask & (block >= 0)
    elif block_ptr is None:
        block = entry
    else:
        block = tl.load(block_ptr + entry)
    start = block.to(tl.int64) * (block_out * block_in)
    if TRANSPOSE:
        offset = (k * block_in)[:, None] + (start + output)[None, :]
    else:
        offset = k[:, None] + (start + output * block_in)[None, :]
    w = tl.load(values_ptr + offset, mask=k_mask[:, None] & output_mask[None, :], other=0)
    if only_row is not None:
        k_mask = k_mask & (tl.load(block_ptr + entry * ROWS + only_row) >= 0)
    x = tl.load(x_rows[:, None] + (tl.load(col_ptr + entry) * width + k)[None, :], mask=k_mask[None, :], other=0)
    a, b = (tl.trans(w), tl.trans(x)) if OUTPUTS_FIRST else (x, w)
    return dot(a, b, sums, PRECISION, WIDEN)


@triton.jit(do_not_specialize=["tokens"])
def linear_reduce_kernel(
    partial_ptr, bias_ptr, y_ptr,
    slot_ptr,  # int32 [slots, 2]: row, and the end of its slots (-1 if this is not the row's first slot)
    tokens, y_stride,
    height: tl.constexpr, ACTIVATION: tl.constexpr, SUM_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the parts of rows in the order of their slots, whichever program wrote them first."""
    slices: tl.constexpr = triton.cdiv(height, BLOCK_N)
    tiles = tl.cdiv(tokens, BLOCK_M)
    first = (tl.program_id(0) // (tiles * slices)).to(tl.int64)
    rest = tl.program_id(0) % (tiles * slices)
    row = tl.load(slot_ptr + 2 * first)
    end = tl.load(slot_ptr + 2 * first + 1)
    token = rest // slices * BLOCK_M + tl.arange(0, BLOCK_M)
    output = rest % slices * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (token < tokens)[:, None] & (output < height)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), SUM_DTYPE)
    for part in range(0, end - first):
        offset = ((first + part) * tokens + token[:, None]) * height + output[None, :]
        sums += tl.load(partial_ptr + offset, mask=mask, other=0)
    y_rows = y_ptr + token.to(tl.int64) * y_stride
    if end >= 0:
        finish(sums, y_rows, token < tokens, bias_ptr, row, output, height, ACTIVATION)


@triton.jit(do_not_specialize=["nnz", "tokens", "tokens_per_split"])
def linear_wgrad_kernel(
    grad_ptr,  # [tokens, out]
    x_ptr,  # [tokens, in]
    values_ptr,  # [splits, nnz, block_out, block_in]
    task_ptr,  # int32 [tasks, 4]: row, first entry, end of the entries of the row, first lane of the task
    col_ptr,
    nnz, tokens, tokens_per_split, grad_stride, x_stride,
    block_out: tl.constexpr, block_in: tl.constexpr, PRECISION: tl.constexpr, SUM_DTYPE: tl.constexpr,
    WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute stored blocks of grad^T x: BLOCK_K lanes of one row's entries, summed over one split of the tokens."""
    task = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    row = tl.load(task_ptr + 4 * task)
    first = tl.load(task_ptr + 4 * task + 1)
    end = tl.load(task_ptr + 4 * task + 2)
    lane0 = tl.multiple_of(tl.load(task_ptr + 4 * task + 3), BLOCK_K)  # a hint that makes loads 16 bytes wide
    WIDTH: tl.constexpr = triton.next_power_of_2(block_in)
    entry, i, k_mask = lanes(first, end, lane0, block_in, WIDTH, BLOCK_K)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col = tl.load(col_ptr + entry, mask=k_mask, other=0)
    x_lane = x_ptr + (col * block_in + i)
    grad_lane = grad_ptr + (row * block_out + o)
    sums = tl.zeros((BLOCK_K, BLOCK_N), SUM_DTYPE)
    token_begin = split * tokens_per_split
    token_end = tl.minimum(token_begin + tokens_per_split, tokens)
    for token0 in range(token_begin, token_end, BLOCK_M):
        token = token0 + tl.arange(0, BLOCK_M)
        token_mask = token < token_end
        x = tl.load(
            x_lane[:, None] + token.to(tl.int64)[None, :] * x_stride,
            mask=token_mask[None, :] & k_mask[:, None],
            other=0,
        )
        grad = tl.load(
            grad_lane[None, :] + token.to(tl.int64)[:, None] * grad_stride,
            mask=token_mask[:, None] & (o < block_out)[None, :],
            other=0,
        )
        sums = dot(x, grad, sums, PRECISION, WIDEN)
    block = split.to(tl.int64) * nnz + entry
    offset = (block[:, None] * block_out + o[None, :]) * block_in + i[:, None]
    tl.store(values_ptr + offset, sums, mask=k_mask[:, None] & (o < block_out)[None, :])


@triton.jit
def _program(tokens, tasks, height: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """Return (task, slice of its outputs, tile of tokens) of this program: tasks in order, GROUP_M tiles of each."""
    slices: tl.constexpr = triton.cdiv(height, BLOCK_N)
    tiles = tl.cdiv(tokens, BLOCK_M)
    program = tl.program_id(0)
    per_group = tl.minimum(tiles, GROUP_M) * tasks * slices  # never more than there are programs
    group = program // per_group
    size = tl.minimum(tiles - group * GROUP_M, GROUP_M)
    rest = program - group * per_group
    return (rest // size // slices).to(tl.int64), rest // size % slices, group * GROUP_M + rest % size
