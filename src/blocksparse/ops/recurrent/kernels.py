"""The Triton kernels of an LSTM's step whose four gates have one layout: a program computes all four.

Inputs are loaded once for all gates, and the activation follows the product in registers. In the values, blocks of the
gates i, f, g, o at one position are `nnz` blocks apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..gpu.device import dot, lanes, load_inputs
from ..lstm_gates.kernels import activate


# Sizes that vary between steps, as in packed sequences, must not compile the kernel again.
@triton.jit(do_not_specialize=["n", "tasks", "nnz"])
def step_forward_kernel(
    x_ptr,  # [n, in], inputs of the recurrent weight
    values_ptr,  # [4 nnz, block_out, block_in]
    pre_ptr,  # [rows, 4 hidden], added to the product
    index_ptr,  # int64 [n], the row of pre for each row, or None for the same row
    c_ptr,  # [n, hidden]
    h_ptr,  # [n, hidden], written, like the next two
    c_out_ptr,  # [n, hidden]
    gates_ptr,  # [n, 4 hidden] or None; it may be pre
    partial_ptr,  # [parts, programs of a task, tile of sums]: of block rows that are cut in parts
    counter_ptr,  # int32 [parts, programs of a task], zeros before and after
    task_ptr,  # int32 [tasks, 6]: block row, first entry, end, part (-1: all), first part of the row, end
    col_ptr,
    n, tasks, nnz, hidden, x_stride, pre_stride, c_stride, h_stride, c_out_stride, gates_stride,
    block_out: tl.constexpr, block_in: tl.constexpr, PRECISION: tl.constexpr, SUM_DTYPE: tl.constexpr,
    WIDEN: tl.constexpr,
    PARTS: tl.constexpr,  # whether some rows are cut in parts
    BLOCK_M: tl.constexpr,  # the tile: rows, features of each gate, lanes
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one time step: the product x W^T + pre, its four gates, and the new states c_out and h."""
    task, slice_, tile, program, programs = _program(tasks, block_out, BLOCK_N)
    first = tl.load(task_ptr + 6 * task + 1)
    end = tl.load(task_ptr + 6 * task + 2)
    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    x_rows = x_ptr + tl.minimum(token, n - 1).to(tl.int64) * x_stride
    WIDTH: tl.constexpr = triton.next_power_of_2(block_in)
    column = tl.arange(0, 4 * BLOCK_N)
    output = slice_ * BLOCK_N + column % BLOCK_N
    # The weights of each column, from the first gate's block on.
    w_columns = values_ptr + (((column // BLOCK_N).to(tl.int64) * nnz * block_out + output) * block_in)
    sums = tl.zeros((BLOCK_M, 4 * BLOCK_N), SUM_DTYPE)
    for lane0 in range(0, (end - first) * WIDTH, BLOCK_K):
        entry, k, k_mask = lanes(first, end, lane0, block_in, WIDTH, BLOCK_K)
        x = load_inputs(x_rows, None, col_ptr, entry, k, k_mask, block_in)
        offset = entry.to(tl.int64) * (block_out * block_in) + k
        mask = k_mask[:, None] & (output < block_out)[None, :]
        w = tl.load(w_columns[None, :] + offset[:, None], mask=mask, other=0)
        sums = dot(x, w, sums, PRECISION, WIDEN)
    complete = True
    if PARTS:
        sums, complete = _sum_parts(
            sums, partial_ptr, counter_ptr, task_ptr, task, program, programs, BLOCK_M, 4 * BLOCK_N
        )
    if complete:
        i, f, g, o = _gates_of(sums, BLOCK_M, BLOCK_N)
        feature = slice_ * BLOCK_N + tl.arange(0, BLOCK_N)
        j = (tl.load(task_ptr + 6 * task) * block_out + feature)[None, :]
        state_mask = (token < n)[:, None] & (feature < block_out)[None, :]
        row = token.to(tl.int64)
        pre_row = row if index_ptr is None else tl.load(index_ptr + row, mask=token < n, other=0)
        row = row[:, None]
        pre = pre_ptr + pre_row[:, None] * pre_stride + j
        i += tl.load(pre, mask=state_mask, other=0).to(SUM_DTYPE)
        f += tl.load(pre + hidden, mask=state_mask, other=0).to(SUM_DTYPE)
        g += tl.load(pre + 2 * hidden, mask=state_mask, other=0).to(SUM_DTYPE)
        o += tl.load(pre + 3 * hidden, mask=state_mask, other=0).to(SUM_DTYPE)
        gates = None if gates_ptr is None else gates_ptr + row * gates_stride
        c_row, c_out_row = c_ptr + row * c_stride, c_out_ptr + row * c_out_stride
        activate(i, f, g, o, c_row, h_ptr + row * h_stride, c_out_row, gates, j, hidden, state_mask)


@triton.jit(do_not_specialize=["n", "nnz"])
def step_wgrad_kernel(
    grad_ptr,  # [n, 4 hidden]
    x_ptr,  # [n, in]
    values_ptr,  # [4 nnz, block_out, block_in], written
    task_ptr,  # int32 [tasks, 4], those of `linear_wgrad_kernel` for one gate
    col_ptr,
    n, nnz, hidden, grad_stride, x_stride,
    block_out: tl.constexpr, block_in: tl.constexpr, PRECISION: tl.constexpr, SUM_DTYPE: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a step; features of each gate and lanes of the sums
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the weight's gradient over all steps: BLOCK_K lanes of one block row's entries, for all four gates."""
    task = tl.program_id(0).to(tl.int64)
    row = tl.load(task_ptr + 4 * task)
    first = tl.load(task_ptr + 4 * task + 1)
    end = tl.load(task_ptr + 4 * task + 2)
    lane0 = tl.multiple_of(tl.load(task_ptr + 4 * task + 3), BLOCK_K)
    WIDTH: tl.constexpr = triton.next_power_of_2(block_in)
    entry, i, k_mask = lanes(first, end, lane0, block_in, WIDTH, BLOCK_K)
    column = tl.arange(0, 4 * BLOCK_N)
    gate = column // BLOCK_N
    o = tl.program_id(1) * BLOCK_N + column % BLOCK_N
    col = tl.load(col_ptr + entry, mask=k_mask, other=0)
    x_lane = x_ptr + (col * block_in + i)
    grad_lane = grad_ptr + (gate * hidden + row * block_out + o)
    sums = tl.zeros((BLOCK_K, 4 * BLOCK_N), SUM_DTYPE)
    for token0 in range(0, n, BLOCK_M):
        token = token0 + tl.arange(0, BLOCK_M)
        token_mask = token < n
        at = token.to(tl.int64)
        x = tl.load(x_lane[:, None] + at[None, :] * x_stride, mask=token_mask[None, :] & k_mask[:, None], other=0)
        grad = tl.load(
            grad_lane[None, :] + at[:, None] * grad_stride, mask=token_mask[:, None] & (o < block_out)[None, :], other=0
        )
        sums = dot(x, grad, sums, PRECISION, WIDEN)
    block = gate.to(tl.int64)[None, :] * nnz + entry[:, None]
    offset = (block * block_out + o[None, :]) * block_in + i[:, None]
    tl.store(values_ptr + offset, sums, mask=k_mask[:, None] & (o < block_out)[None, :])


@triton.jit
def _program(tasks, height: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (task, slice of its features, tile of rows, index of this pair, number of pairs) of this program."""
    slices: tl.constexpr = triton.cdiv(height, BLOCK_N)
    programs = tl.num_programs(0) // tasks
    program = tl.program_id(0) % programs
    return (tl.program_id(0) // programs).to(tl.int64), program % slices, program // slices, program, programs


@triton.jit
def _sum_parts(
    sums,
    partial_ptr, counter_ptr, task_ptr,
    task, program, programs,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the sums of a whole row, and whether this program has them: it is the last to finish a part of the row.

    That program adds the parts in a fixed order, and resets the counter.
    """
    part = tl.load(task_ptr + 6 * task + 3)
    complete = part < 0
    if part >= 0:
        begin = tl.load(task_ptr + 6 * task + 4)
        end = tl.load(task_ptr + 6 * task + 5)
        inside = tl.arange(0, BLOCK_M)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        distance = programs.to(tl.int64) * (BLOCK_M * COLUMNS)
        own = partial_ptr + program * (BLOCK_M * COLUMNS) + inside
        tl.store(own + part * distance, sums)
        tl.debug_barrier()
        counter = counter_ptr + begin * programs + program
        complete = tl.atomic_add(counter, 1, sem="acq_rel") == end - begin - 1
        if complete:
            sums = tl.zeros((BLOCK_M, COLUMNS), sums.dtype)
            own += begin * distance
            for _ in range(begin, end):
                sums += tl.load(own, cache_modifier=".cg")
                own += distance
            tl.store(counter, 0)
    return sums, complete


@triton.jit
def _gates_of(sums, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Split sums `[BLOCK_M, 4 BLOCK_N]` and return the gates i, f, g, o, each `[BLOCK_M, BLOCK_N]`."""
    by_gate = tl.permute(tl.reshape(sums, (BLOCK_M, 2, 2, BLOCK_N)), (0, 3, 1, 2))
    i_g, f_o = tl.split(by_gate)
    i, g = tl.split(i_g)
    f, o = tl.split(f_o)
    return i, f, g, o
