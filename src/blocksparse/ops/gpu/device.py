"""Device functions that GPU kernels share: lanes over blocks, loads of tiles, tanh, the end of a sum.

The inner dimension consists of lanes: lane l of a task is feature l % WIDTH of its entry l // WIDTH, so one step
gathers several small blocks or a part of a large one. WIDTH is the block's side rounded up to a power of two; lanes
beyond the true side are masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def lanes(first, end, lane0, width: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return (entry, feature within its block, mask of lanes that exist) for BLOCK_K lanes from lane0 on.

    The lanes belong to the entries first <= entry < end.
    """
    lane = lane0 + tl.arange(0, BLOCK_K)
    entry = first + lane // WIDTH
    k = lane % WIDTH
    k_mask = entry < end
    if width != WIDTH:
        k_mask = k_mask & (k < width)
    return entry, k, k_mask


@triton.jit
def load_inputs(rows, row_mask, col_ptr, entry, k, k_mask, width: tl.constexpr):
    """Return inputs [BLOCK_M, BLOCK_K] of the lanes, from pointers to rows; 0 outside of both masks."""
    col = tl.load(col_ptr + entry, mask=k_mask, other=0)
    mask = k_mask[None, :]
    if row_mask is not None:
        mask = mask & row_mask[:, None]
    return tl.load(rows[:, None] + (col * width + k)[None, :], mask=mask, other=0)


@triton.jit
def load_weights(
    values_ptr, block_ptr,
    entry, k, k_mask, output,
    block_out: tl.constexpr, block_in: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """Return weights [BLOCK_K, BLOCK_N] of the lanes, of the blocks or the transposed blocks."""
    block = entry if block_ptr is None else tl.load(block_ptr + entry, mask=k_mask, other=0)
    block_start = block.to(tl.int64) * (block_out * block_in)
    mask = k_mask[:, None] & (output < (block_in if TRANSPOSE else block_out))[None, :]
    if TRANSPOSE:
        offset = (block_start + k * block_in)[:, None] + output[None, :]
    else:
        offset = (block_start + k)[:, None] + (output * block_in)[None, :]
    return tl.load(values_ptr + offset, mask=mask, other=0)


@triton.jit
def dot(a, b, sums, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Return sums + a b. Triton's interpreter needs WIDEN: it stores bfloat16 as integers and would multiply those."""
    if WIDEN:
        a = a.to(sums.dtype)
        b = b.to(sums.dtype)
    if PRECISION == "tf32x3":
        # Each operand is split into its leading 11 bits and the rest. Tensor cores round sums towards zero, so they add
        # within one step only, and small products first.
        a_large = _leading(a)
        b_large = _leading(b)
        step = tl.dot(a - a_large, b_large, input_precision="tf32", out_dtype=sums.dtype)
        step = tl.dot(a_large, b - b_large, step, input_precision="tf32", out_dtype=sums.dtype)
        step = tl.where(step == step, step, 0)  # NaN from inf - inf; the large product has the inf
        return sums + tl.dot(a_large, b_large, step, input_precision="tf32", out_dtype=sums.dtype)
    return tl.dot(a, b, sums, input_precision=PRECISION, out_dtype=sums.dtype)


@triton.jit
def _leading(numbers):
    """Return float32 numbers truncated to TF32."""
    return (numbers.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def biased(sums, bias_ptr, column, output_mask):
    """Return sums + bias, or sums if `bias_ptr` is None; `output_mask` masks the columns that exist."""
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + column, mask=output_mask, other=0).to(sums.dtype)[None, :]
    return sums


@triton.jit
def activated(sums, ACTIVATION: tl.constexpr):
    """Return activation(sums); "" is the identity."""
    if ACTIVATION == "relu":
        sums = tl.where(sums < 0, 0, sums)  # NaN stays
    elif ACTIVATION == "gelu":
        sums = 0.5 * sums * (1 + tl.erf(sums * 0.7071067811865476))
    elif ACTIVATION == "silu":
        small = tl.exp(-tl.abs(sums))  # never overflows
        sums = sums * (tl.where(sums < 0, small, 1) / (1 + small))
    return sums


@triton.jit
def tanh(x):
    """Return tanh as in Cephes: a polynomial or rational function near 0, where (1 - e^-2x) / (1 + e^-2x) cancels."""
    size = tl.abs(x)
    near = size < 0.625
    z = tl.where(near, x, 0)
    square = z * z
    if x.dtype == tl.float64:
        above = (-9.64399179425052238628e-1 * square - 9.92877231001918586564e1) * square - 1.61468768441708447952e3
        below = (square + 1.12811678491632931402e2) * square + 2.23548839060100448583e3
        polynomial = above / (below * square + 4.84406305325125486048e3)
    else:
        polynomial = (-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2
        polynomial = (polynomial * square + 1.33314422036e-1) * square - 3.33332819422e-1
    small = tl.exp(-2 * size)
    far = (1 - small) / (1 + small)
    return tl.where(near, z + z * square * polynomial, tl.where(x < 0, -far, far))


@triton.jit
def finish(sums, rows, row_mask, bias_ptr, row, output, height: tl.constexpr, ACTIVATION: tl.constexpr):
    """Add the bias, apply the activation, and store to the outputs of block row `row`; `rows` points to rows of y."""
    write(sums, rows, row_mask, bias_ptr, row * height + output, output < height, ACTIVATION)


@triton.jit
def write(sums, rows, row_mask, bias_ptr, column, output_mask, ACTIVATION: tl.constexpr):
    """Add the bias, apply the activation, and store the columns in `output_mask`; `rows` points to rows of y."""
    sums = activated(biased(sums, bias_ptr, column, output_mask), ACTIVATION)
    tl.store(rows[:, None] + column[None, :], sums, mask=row_mask[:, None] & output_mask[None, :])
