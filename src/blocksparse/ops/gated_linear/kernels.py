"""The Triton kernel of the gated pair: the tile loop of the linear product, with two sums."""

from __future__ import annotations

import triton
import triton.language as tl

from ..gpu.device import activated, biased, dot, lanes, load_inputs, load_weights


@triton.jit(do_not_specialize=["tokens"])
def gated_linear_kernel(
    x_ptr,  # [tokens, in]
    gate_ptr,  # [nnz, block_out, block_in]
    up_ptr,
    gate_bias_ptr,  # [out] or None
    up_bias_ptr,
    y_ptr,  # [tokens, out]
    task_ptr,  # int32 [tasks, 5]: row, first entry of both, of the gate alone, of up alone, end
    col_ptr,  # int32 [entries]
    gate_block_ptr,  # int32 [entries]: the block of the gate's values
    up_block_ptr,
    tokens, x_stride, y_stride,
    block_out: tl.constexpr, block_in: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    SUM_DTYPE: tl.constexpr, WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of tokens and outputs of both products; inputs that both need are loaded once."""
    WIDTH: tl.constexpr = triton.next_power_of_2(block_in)
    slices: tl.constexpr = triton.cdiv(block_out, BLOCK_N)
    tiles = tl.cdiv(tokens, BLOCK_M)
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    task = (rest // slices).to(tl.int64)
    output = rest % slices * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(task_ptr + 5 * task)
    both = tl.load(task_ptr + 5 * task + 1)
    only_gate = tl.load(task_ptr + 5 * task + 2)
    only_up = tl.load(task_ptr + 5 * task + 3)
    end = tl.load(task_ptr + 5 * task + 4)
    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    x_rows = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64) * x_stride
    gates = tl.zeros((BLOCK_M, BLOCK_N), SUM_DTYPE)
    ups = tl.zeros((BLOCK_M, BLOCK_N), SUM_DTYPE)
    for lane0 in range(0, (only_gate - both) * WIDTH, BLOCK_K):
        entry, k, k_mask = lanes(both, only_gate, lane0, block_in, WIDTH, BLOCK_K)
        x = load_inputs(x_rows, None, col_ptr, entry, k, k_mask, block_in)
        g = load_weights(gate_ptr, gate_block_ptr, entry, k, k_mask, output, block_out, block_in, False)
        u = load_weights(up_ptr, up_block_ptr, entry, k, k_mask, output, block_out, block_in, False)
        gates = dot(x, g, gates, PRECISION, WIDEN)
        ups = dot(x, u, ups, PRECISION, WIDEN)
    for lane0 in range(0, (only_up - only_gate) * WIDTH, BLOCK_K):
        entry, k, k_mask = lanes(only_gate, only_up, lane0, block_in, WIDTH, BLOCK_K)
        x = load_inputs(x_rows, None, col_ptr, entry, k, k_mask, block_in)
        g = load_weights(gate_ptr, gate_block_ptr, entry, k, k_mask, output, block_out, block_in, False)
        gates = dot(x, g, gates, PRECISION, WIDEN)
    for lane0 in range(0, (end - only_up) * WIDTH, BLOCK_K):
        entry, k, k_mask = lanes(only_up, end, lane0, block_in, WIDTH, BLOCK_K)
        x = load_inputs(x_rows, None, col_ptr, entry, k, k_mask, block_in)
        u = load_weights(up_ptr, up_block_ptr, entry, k, k_mask, output, block_out, block_in, False)
        ups = dot(x, u, ups, PRECISION, WIDEN)
    column = row * block_out + output
    output_mask = output < block_out
    y = activated(biased(gates, gate_bias_ptr, column, output_mask), ACTIVATION) * biased(
        ups, up_bias_ptr, column, output_mask
    )
    y_rows = y_ptr + token.to(tl.int64) * y_stride
    tl.store(y_rows[:, None] + column[None, :], y, mask=(token < tokens)[:, None] & output_mask[None, :])
