"""The Triton kernels of the convolutions: the tile loop of the linear product, its inputs gathered tap by tap.

Nothing is unfolded. Outputs come in phases: positions `first + step * n` along each of three axes that meet the same
taps (a convolution has one phase, a transposed one `stride` per axis). The taps of a phase are an arithmetic sequence
along each axis, and so are the inputs they meet: tap i meets input `n * in_step + shift + i * shift_step`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..gpu.device import dot, finish, lanes, load_inputs, load_weights


@triton.jit
def conv_kernel(
    x_ptr,  # [images, *in_size, in_channels]
    values_ptr,  # [taps, nnz, block_out, block_in]
    bias_ptr,  # [out_channels] or None
    y_ptr,  # [images, *out_size, out_channels]
    phase_ptr,  # int32 [phases, 3 axes, 7]: first, count, first tap, step of taps, taps, shift, step of shifts
    task_ptr,  # int32 [tasks, 4], as in linear_kernel
    col_ptr,
    block_ptr,
    tasks,
    images,
    nnz,
    in_size0,
    in_size1,
    in_size2,
    out_size0,
    out_size1,
    out_size2,
    in_channels,
    out_channels,
    kernel1: tl.constexpr,
    kernel2: tl.constexpr,
    out_step0: tl.constexpr,
    out_step1: tl.constexpr,
    out_step2: tl.constexpr,
    in_step0: tl.constexpr,
    in_step1: tl.constexpr,
    in_step2: tl.constexpr,
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
):
    """One tile of positions of one phase, and all taps and entries of one task."""
    height: tl.constexpr = block_in if TRANSPOSE else block_out
    width: tl.constexpr = block_out if TRANSPOSE else block_in
    WIDTH: tl.constexpr = triton.next_power_of_2(width)
    slices: tl.constexpr = triton.cdiv(height, BLOCK_N)
    task = (tl.program_id(0) // slices % tasks).to(tl.int64)
    tile = tl.program_id(0) // slices // tasks
    output = tl.program_id(0) % slices * BLOCK_N + tl.arange(0, BLOCK_N)
    phase = phase_ptr + tl.program_id(1) * 21
    first0, count0, tap0, tap_step0, taps0, shift0, shift_step0 = _axis(phase)
    first1, count1, tap1, tap_step1, taps1, shift1, shift_step1 = _axis(phase + 7)
    first2, count2, tap2, tap_step2, taps2, shift2, shift_step2 = _axis(phase + 14)

    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = token < images * count0 * count1 * count2
    n2 = token % count2
    n1 = token // count2 % count1
    n0 = token // count2 // count1 % count0
    image = (token // count2 // count1 // count0).to(tl.int64)

    row = tl.load(task_ptr + 4 * task)
    first = tl.load(task_ptr + 4 * task + 1)
    last = tl.load(task_ptr + 4 * task + 2)
    steps = tl.cdiv((last - first) * WIDTH, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for step in range(0, taps0 * taps1 * taps2 * steps):
        t2 = step // steps % taps2
        t1 = step // steps // taps2 % taps1
        t0 = step // steps // taps2 // taps1
        i0 = n0 * in_step0 + shift0 + t0 * shift_step0
        i1 = n1 * in_step1 + shift1 + t1 * shift_step1
        i2 = n2 * in_step2 + shift2 + t2 * shift_step2
        inside = valid & (i0 >= 0) & (i0 < in_size0) & (i1 >= 0) & (i1 < in_size1) & (i2 >= 0) & (i2 < in_size2)
        x_rows = x_ptr + (((image * in_size0 + i0) * in_size1 + i1) * in_size2 + i2) * in_channels
        tap = ((tap0 + t0 * tap_step0) * kernel1 + tap1 + t1 * tap_step1) * kernel2 + tap2 + t2 * tap_step2
        weights = values_ptr + tap.to(tl.int64) * nnz * (block_out * block_in)
        entry, k, there = lanes(first, last, step % steps * BLOCK_K, width, WIDTH, BLOCK_K)
        x = load_inputs(x_rows, inside, col_ptr, entry, k, there, width)
        w = load_weights(weights, block_ptr, entry, k, there, output, block_out, block_in, TRANSPOSE)
        sums = dot(x, w, sums, PRECISION, WIDEN)
    o0 = first0 + n0 * out_step0
    o1 = first1 + n1 * out_step1
    o2 = first2 + n2 * out_step2
    y_rows = y_ptr + (((image * out_size0 + o0) * out_size1 + o1) * out_size2 + o2) * out_channels
    finish(sums, y_rows, valid, bias_ptr, row, output, height, ACTIVATION)


@triton.jit
def conv_wgrad_kernel(
    grad_ptr,  # [images, *grad_size, out_channels]
    x_ptr,  # [images, *x_size, in_channels]
    values_ptr,  # [splits, taps, nnz, block_out, block_in]
    task_ptr,  # int32 [tasks, 4], as in linear_wgrad_kernel
    col_ptr,
    nnz,
    images,
    tokens_per_split,
    input_size0,
    input_size1,
    input_size2,
    output_size0,
    output_size1,
    output_size2,
    in_channels,
    out_channels,
    kernel0: tl.constexpr,
    kernel1: tl.constexpr,
    kernel2: tl.constexpr,
    stride0: tl.constexpr,
    stride1: tl.constexpr,
    stride2: tl.constexpr,
    padding0: tl.constexpr,
    padding1: tl.constexpr,
    padding2: tl.constexpr,
    dilation0: tl.constexpr,
    dilation1: tl.constexpr,
    dilation2: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # grad is the input of the convolution and x its output
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tap of BLOCK_K lanes of one row's entries, summed over a part of the output positions."""
    taps: tl.constexpr = kernel0 * kernel1 * kernel2
    slices: tl.constexpr = triton.cdiv(block_out, BLOCK_N)
    task = (tl.program_id(0) // (taps * slices)).to(tl.int64)
    tap = tl.program_id(0) // slices % taps
    split = tl.program_id(1)
    row = tl.load(task_ptr + 4 * task)
    first = tl.load(task_ptr + 4 * task + 1)
    last = tl.load(task_ptr + 4 * task + 2)
    lane0 = tl.multiple_of(tl.load(task_ptr + 4 * task + 3), BLOCK_K)
    WIDTH: tl.constexpr = triton.next_power_of_2(block_in)
    entry, i, there = lanes(first, last, lane0, block_in, WIDTH, BLOCK_K)
    o = tl.program_id(0) % slices * BLOCK_N + tl.arange(0, BLOCK_N)
    col = tl.load(col_ptr + entry, mask=there, other=0)
    x_lane = x_ptr + col * block_in + i
    grad_lane = row * block_out + o
    shift0 = tap // (kernel1 * kernel2) * dilation0 - padding0
    shift1 = tap // kernel2 % kernel1 * dilation1 - padding1
    shift2 = tap % kernel2 * dilation2 - padding2
    sums = tl.zeros((BLOCK_K, BLOCK_N), SUM)
    begin = split * tokens_per_split
    end = tl.minimum(begin + tokens_per_split, images * output_size0 * output_size1 * output_size2)
    for token0 in range(begin, end, BLOCK_M):
        token = token0 + tl.arange(0, BLOCK_M)
        b2 = token % output_size2 * stride2 + shift2
        b1 = token // output_size2 % output_size1 * stride1 + shift1
        b0 = token // output_size2 // output_size1 % output_size0 * stride0 + shift0
        image = (token // output_size2 // output_size1 // output_size0).to(tl.int64)
        inside = (b0 >= 0) & (b0 < input_size0) & (b1 >= 0) & (b1 < input_size1) & (b2 >= 0) & (b2 < input_size2)
        inside = inside & (token < end)
        input = ((image * input_size0 + b0) * input_size1 + b1) * input_size2 + b2
        output = token.to(tl.int64)
        x_rows = (output if TRANSPOSED else input) * in_channels
        grad_rows = grad_ptr + (input if TRANSPOSED else output) * out_channels
        x = tl.load(x_lane[:, None] + x_rows[None, :], mask=inside[None, :] & there[:, None], other=0)
        grad = tl.load(
            grad_rows[:, None] + grad_lane[None, :], mask=inside[:, None] & (o < block_out)[None, :], other=0
        )
        sums = dot(x, grad, sums, PRECISION, WIDEN)
    block = (split.to(tl.int64) * taps + tap) * nnz + entry
    offset = (block[:, None] * block_out + o[None, :]) * block_in + i[:, None]
    tl.store(values_ptr + offset, sums, mask=there[:, None] & (o < block_out)[None, :])


@triton.jit
def _axis(numbers_ptr):
    """The seven numbers of one axis of a phase."""
    return (
        tl.load(numbers_ptr),
        tl.load(numbers_ptr + 1),
        tl.load(numbers_ptr + 2),
        tl.load(numbers_ptr + 3),
        tl.load(numbers_ptr + 4),
        tl.load(numbers_ptr + 5),
        tl.load(numbers_ptr + 6),
    )
