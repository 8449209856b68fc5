# Tuples grow by `+` in loops that Triton unrolls: Triton does not support `*` in tuples, and mypy not these loops.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"
"""The Triton kernels of the convolutions: the tile loop of the linear product, with inputs gathered tap by tap.

The image is never unfolded. All positions of a tile meet the same taps; they belong to one phase (see gpu_plan.py).
Addresses of inputs are computed once per tile; a step, one tap of one entry, adds one number to all of them and makes
one comparison per axis. Only the last `AXES` of three axes exist; the others have one position.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..gpu.device import dot, finish, lanes


def _each(*names: str) -> list[str]:
    return [f"{name}{axis}" for name in names for axis in range(3)]


# Kernels are not compiled again for other values of these sizes and positions.
_OUTPUTS = "out_size", "first", "count", "out_step"
_INPUTS = "in_size", "taps", "tap_step", "in_step", "shift", "shift_step"
_CONV = ["tasks", "tokens", "groups", "in_blocks", "out_blocks", "all_taps", "first_tap", *_each(*_OUTPUTS, *_INPUTS)]
_WGRAD = [
    *("tokens", "tokens_per_split", "groups", "numbers", "a_blocks", "b_blocks", "output_size0", "output_size1"),
    *_each("input_size", "stride", "padding", "dilation"),
]


@triton.jit(do_not_specialize=_CONV)
def conv_kernel(
    x_ptr,  # [images, *in_size, in_blocks * width]
    values_ptr,  # [nnz, taps, block_out, block_in]
    bias_ptr,  # [out_channels] or None
    y_ptr,  # [images, *out_size, out_blocks * height]
    task_ptr,  # int32 [tasks, 4], as in linear_kernel
    col_ptr,
    block_ptr,  # int32 [entries], or None where the entry is the block
    phase_ptr,  # int32 [phases, 15], for each of many phases the arguments below, or None
    tasks,
    tokens,  # groups of `POSITIONS` positions of the phase in all images
    groups,  # along the last axis
    in_blocks, out_blocks,
    all_taps,  # of the weights
    first_tap,  # of the phase, like the arguments below
    in_size0, in_size1, in_size2,
    out_size0, out_size1, out_size2,
    first0, first1, first2,  # outputs first + out_step * n, n < count
    count0, count1, count2,
    out_step0, out_step1, out_step2,
    taps0, taps1, taps2,  # taps first_tap + i * tap_step, i < taps
    tap_step0, tap_step1, tap_step2,
    in_step0, in_step1, in_step2,  # which meet inputs n * in_step + shift + i * shift_step
    shift0, shift1, shift2,
    shift_step0, shift_step1, shift_step2,
    block_out: tl.constexpr, block_in: tl.constexpr, AXES: tl.constexpr,
    POSITIONS: tl.constexpr,  # neighbouring positions, which share the inputs of
    TAPS: tl.constexpr,  # taps of the last axis in one step: all of them, or one
    IN_STEP: tl.constexpr,  # in_step2 and shift_step2, if positions share inputs
    SHIFT_STEP: tl.constexpr, TRANSPOSE: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    SUM_DTYPE: tl.constexpr, WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of positions of one phase: all taps and entries of one task."""
    height: tl.constexpr = block_in if TRANSPOSE else block_out
    width: tl.constexpr = block_out if TRANSPOSE else block_in
    if phase_ptr is not None:
        phase = phase_ptr + tl.program_id(1) * 15
        tokens, groups, first_tap = tl.load(phase), tl.load(phase + 1), tl.load(phase + 2)
        first0, first1, first2 = tl.load(phase + 3), tl.load(phase + 4), tl.load(phase + 5)
        count0, count1, count2 = tl.load(phase + 6), tl.load(phase + 7), tl.load(phase + 8)
        taps0, taps1, taps2 = tl.load(phase + 9), tl.load(phase + 10), tl.load(phase + 11)
        shift0, shift1, shift2 = tl.load(phase + 12), tl.load(phase + 13), tl.load(phase + 14)
    slices: tl.constexpr = triton.cdiv(height, BLOCK_N)
    steps: tl.constexpr = triton.cdiv(width, BLOCK_K)
    task = tl.program_id(0) // slices % tasks
    token = tl.program_id(0) // slices // tasks * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.load(task_ptr + 4 * task)
    first = tl.load(task_ptr + 4 * task + 1)
    end = tl.load(task_ptr + 4 * task + 2)
    token_mask = token < tokens

    # Positions of the first tap's inputs along each axis. Beyond the last token, a position for which all taps are
    # outside of the image.
    n2 = token % groups * POSITIONS
    image = token // groups
    b2 = n2 * in_step2 + shift2
    o2 = first2 + n2 * out_step2
    FIRST_SHIFT: tl.constexpr = min((TAPS - 1) * SHIFT_STEP, 0)
    LAST_SHIFT: tl.constexpr = max((TAPS - 1) * SHIFT_STEP, 0) + (POSITIONS - 1) * IN_STEP
    outside = in_size2 - tl.minimum((taps2 - 1) * shift_step2, FIRST_SHIFT)
    if AXES > 1:
        n1 = image % count1
        image = image // count1
        b1 = n1 * in_step1 + shift1
        o1 = first1 + n1 * out_step1
    if AXES > 2:
        n0 = image % count0
        image = image // count0
        b0 = n0 * in_step0 + shift0
        inputs = (image * in_size0 + b0) * in_size1
        outputs = (image * out_size0 + first0 + n0 * out_step0) * out_size1
    else:
        inputs = image * in_size1
        outputs = image * out_size1
    if AXES > 1:
        inputs = (inputs + b1) * in_size2
        outputs = (outputs + o1) * out_size2
    else:
        inputs *= in_size2
        outputs *= out_size2
    inputs += b2
    outputs += o2
    b2 = tl.where(token_mask, b2, outside)
    in_channels = in_blocks * width
    lane = tl.arange(0, BLOCK_K)
    output = tl.program_id(0) % slices * BLOCK_N + tl.arange(0, BLOCK_N)
    x_tile = x_ptr + (inputs.to(tl.int64) * in_channels)[:, None] + lane[None, :]
    if TRANSPOSE:
        w_tile = values_ptr + (lane * block_in)[:, None] + output[None, :]
    else:
        w_tile = values_ptr + lane[:, None] + (output * block_in)[None, :]

    entry = first
    k = 0
    t0 = 0
    t1 = 0
    t2 = 0
    count = (end - first) * steps * taps2
    if AXES > 1:
        count *= taps1
    if AXES > 2:
        count *= taps0
    sums = ()
    for _ in tl.static_range(POSITIONS):
        sums = sums + (tl.zeros((BLOCK_M, BLOCK_N), SUM_DTYPE),)
    col = tl.load(col_ptr + entry, mask=count > 0, other=0)
    block = entry
    if block_ptr is not None:
        block = tl.load(block_ptr + entry, mask=count > 0, other=0)
    for _ in range(0, count):
        d2 = t2 * shift_step2
        reach = d2
        tap = first_tap + t2 * tap_step2
        if AXES > 1:
            d1 = t1 * shift_step1
            reach += d1 * in_size2
            tap += t1 * tap_step1
            inside_before = (b1 + d1).to(tl.uint32) < in_size1.to(tl.uint32)
        if AXES > 2:
            d0 = t0 * shift_step0
            reach += d0 * in_size1 * in_size2
            tap += t0 * tap_step0
            inside_before &= (b0 + d0).to(tl.uint32) < in_size0.to(tl.uint32)
        x_step = x_tile + (reach.to(tl.int64) * in_channels + (col * width + k))
        w_step = w_tile + (block.to(tl.int64) * all_taps + tap) * (block_out * block_in)
        w_step += k * (block_in if TRANSPOSE else 1)
        w_mask = (output < height)[None, :]
        if width % BLOCK_K != 0:
            w_mask = w_mask & (k + lane < width)[:, None]
        weights = ()
        for t in tl.static_range(TAPS):
            w_tap = w_step + t * tap_step2 * (block_out * block_in)
            if width % BLOCK_K != 0 or height % BLOCK_N != 0:
                weights = weights + (tl.load(w_tap, mask=w_mask, other=0),)
            else:
                weights = weights + (tl.load(w_tap),)
        for d in tl.static_range(FIRST_SHIFT, LAST_SHIFT + 1):
            inside = (b2 + d2 + d).to(tl.uint32) < in_size2.to(tl.uint32)
            if AXES > 1:
                inside &= inside_before
            x_mask = inside[:, None]
            if width % BLOCK_K != 0:
                x_mask = x_mask & (k + lane < width)[None, :]
            x = tl.load(x_step + d * in_channels, mask=x_mask, other=0)
            summed = ()
            for i in tl.static_range(POSITIONS):
                if (
                    (d - i * IN_STEP) % SHIFT_STEP == 0
                    and (d - i * IN_STEP) // SHIFT_STEP >= 0
                    and (d - i * IN_STEP) // SHIFT_STEP < TAPS
                ):
                    w = weights[(d - i * IN_STEP) // SHIFT_STEP]
                    summed = summed + (dot(x, w, sums[i], PRECISION, WIDEN),)
                else:
                    summed = summed + (sums[i],)
            sums = summed
        # Indices of the next step, loaded one step ahead.
        t2 += 1
        done = t2 == taps2
        t2 = tl.where(done, 0, t2)
        if AXES > 1:
            t1 += done.to(tl.int32)
            done = t1 == taps1
            t1 = tl.where(done, 0, t1)
        if AXES > 2:
            t0 += done.to(tl.int32)
            done = t0 == taps0
            t0 = tl.where(done, 0, t0)
        if steps > 1:
            k += tl.where(done, BLOCK_K, 0)
            done = k >= width
            k = tl.where(done, 0, k)
        entry += done.to(tl.int32)
        col = tl.load(col_ptr + entry, mask=entry < end, other=0)
        block = entry
        if block_ptr is not None:
            block = tl.load(block_ptr + entry, mask=entry < end, other=0)
    for i in tl.static_range(POSITIONS):
        y_rows = y_ptr + (outputs + i * out_step2).to(tl.int64) * (out_blocks * height)
        position_mask = token_mask & (n2 + i < count2)
        finish(sums[i], y_rows, position_mask, bias_ptr, row.to(tl.int64), output, height, ACTIVATION)


@triton.jit(do_not_specialize=_WGRAD)
def conv_wgrad_kernel(
    a_ptr,  # [images, *input_size, a_blocks * a_width]: the input of the convolution
    b_ptr,  # [images, *output_size, b_blocks * b_width]: its output
    values_ptr,  # [splits, nnz, block_out, block_in, taps]
    task_ptr,  # int32 [tasks, 4], as in linear_wgrad_kernel, for rows of b's blocks
    col_ptr,  # int32 [entries]: a's block
    block_ptr,  # int32 [entries], or None where the entry is the block
    tokens,  # groups of `POSITIONS` positions of the output in all images
    tokens_per_split,
    groups,  # along the last axis
    numbers,  # in all values
    a_blocks, b_blocks,
    input_size0, input_size1, input_size2,
    output_size0, output_size1,
    stride0, stride1, stride2,
    padding0, padding1, padding2,
    dilation0, dilation1, dilation2,
    kernel0: tl.constexpr, kernel1: tl.constexpr, kernel2: tl.constexpr, a_width: tl.constexpr, b_width: tl.constexpr,
    a_place: tl.constexpr,  # numbers of a block from one of its lanes to the next
    b_place: tl.constexpr, AXES: tl.constexpr,
    POSITIONS: tl.constexpr,  # as in conv_kernel
    TAPS: tl.constexpr, IN_STEP: tl.constexpr, SHIFT_STEP: tl.constexpr, PRECISION: tl.constexpr,
    SUM_DTYPE: tl.constexpr, WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_K lanes of one block row of the values' gradient, summed over one split of the output positions.

    A lane is one channel of `a` in one stored block (an entry) at one tap. With TAPS > 1, a lane has all TAPS taps of
    the last axis. The caller sums the splits. Positions advance by BLOCK_M with carry, so that the loop has no
    division.
    """
    taps: tl.constexpr = kernel0 * kernel1 * kernel2 // TAPS
    taps2: tl.constexpr = kernel2 // TAPS
    WIDTH: tl.constexpr = triton.next_power_of_2(a_width)
    FIRST_SHIFT: tl.constexpr = min((TAPS - 1) * SHIFT_STEP, 0)
    LAST_SHIFT: tl.constexpr = max((TAPS - 1) * SHIFT_STEP, 0) + (POSITIONS - 1) * IN_STEP
    slices: tl.constexpr = triton.cdiv(b_width, BLOCK_N)
    task = tl.program_id(0) // slices
    split = tl.program_id(1)
    row = tl.load(task_ptr + 4 * task)
    first = tl.load(task_ptr + 4 * task + 1)
    end = tl.load(task_ptr + 4 * task + 2)
    lane0 = tl.multiple_of(tl.load(task_ptr + 4 * task + 3), BLOCK_K)
    unit, i, k_mask = lanes(0, (end - first) * taps, lane0, a_width, WIDTH, BLOCK_K)
    entry = first + unit // taps
    tap = unit % taps
    o = tl.program_id(0) % slices * BLOCK_N + tl.arange(0, BLOCK_N)
    output_mask = o < b_width
    col = tl.load(col_ptr + entry, mask=k_mask, other=0)

    token = split * tokens_per_split + tl.arange(0, BLOCK_M)
    token_end = tl.minimum((split + 1) * tokens_per_split, tokens)
    a_channels = (a_blocks * a_width).to(tl.int64)
    b_channels = (b_blocks * b_width).to(tl.int64)
    # The address of a token's input, its increment for BLOCK_M tokens, and its corrections at the ends of axes.
    together = stride2 * POSITIONS
    p2 = token % groups * together
    image = token // groups
    d2 = tap % taps2 * dilation2 - padding2
    end2 = groups * together
    step2 = BLOCK_M % groups * together
    step = BLOCK_M // groups
    rows = input_size2 * a_channels
    a_token = p2 * a_channels
    a_lane = a_ptr + d2 * a_channels + (col * a_width + i)
    a_step = step2 * a_channels
    if AXES > 1:
        p1 = image % output_size1 * stride1
        image = image // output_size1
        d1 = tap // taps2 % kernel1 * dilation1 - padding1
        end1 = output_size1 * stride1
        step1 = step % output_size1 * stride1
        step = step // output_size1
        a_token += p1 * rows
        a_lane += d1 * rows
        a_step += step1 * rows
        a_over2 = stride1 * rows - end2 * a_channels
        rows1 = rows
        rows *= input_size1
    else:
        a_over2 = rows - end2 * a_channels
    if AXES > 2:
        p0 = image % output_size0 * stride0
        image = image // output_size0
        d0 = tap // (taps2 * kernel1) * dilation0 - padding0
        end0 = output_size0 * stride0
        step0 = step % output_size0 * stride0
        step = step // output_size0
        a_token += p0 * rows
        a_lane += d0 * rows
        a_step += step0 * rows
        a_over1 = stride0 * rows - end1 * rows1
        a_over0 = input_size0 * rows - end0 * rows
        rows *= input_size0
    elif AXES > 1:
        a_over1 = rows - end1 * rows1
    a_token += image * rows
    a_step += step * rows
    b_tile = b_ptr + (token.to(tl.int64) * (POSITIONS * b_channels))[:, None] + (row * b_width + o)[None, :]
    sums = ()
    for _ in tl.static_range(TAPS):
        sums = sums + (tl.zeros((BLOCK_K, BLOCK_N), SUM_DTYPE),)
    for token0 in range(split * tokens_per_split, token_end, BLOCK_M):
        token_mask = token0 + tl.arange(0, BLOCK_M) < token_end
        within = k_mask[:, None] & token_mask[None, :]
        if AXES > 1:
            within &= (p1[None, :] + d1[:, None]).to(tl.uint32) < input_size1.to(tl.uint32)
        if AXES > 2:
            within &= (p0[None, :] + d0[:, None]).to(tl.uint32) < input_size0.to(tl.uint32)
        grads = ()
        for n in tl.static_range(POSITIONS):
            b = tl.load(b_tile + n * b_channels, mask=token_mask[:, None] & output_mask[None, :], other=0)
            grads = grads + (b,)
        for d in tl.static_range(FIRST_SHIFT, LAST_SHIFT + 1):
            inside = within & ((p2[None, :] + (d2 + d)[:, None]).to(tl.uint32) < input_size2.to(tl.uint32))
            # Triton 3.8 does not infer this of loop-carried values; without it, it loads one number at a time.
            from_lane = tl.multiple_of(a_token + d * a_channels, a_width & -a_width)
            a = tl.load(a_lane[:, None] + from_lane[None, :], mask=inside, other=0)
            summed = ()
            for t in tl.static_range(TAPS):
                if (d - t * SHIFT_STEP) % IN_STEP == 0 and (
                    (d - t * SHIFT_STEP) // IN_STEP >= 0 and (d - t * SHIFT_STEP) // IN_STEP < POSITIONS
                ):
                    b = grads[(d - t * SHIFT_STEP) // IN_STEP]
                    summed = summed + (dot(a, b, sums[t], PRECISION, WIDEN),)
                else:
                    summed = summed + (sums[t],)
            sums = summed
        b_tile += BLOCK_M * POSITIONS * b_channels
        p2 += step2
        over = p2 >= end2
        p2 = tl.where(over, p2 - end2, p2)
        a_token += a_step + tl.where(over, a_over2, 0)
        if AXES > 1:
            p1 = tl.where(over, p1 + (step1 + stride1), p1 + step1)
            over = p1 >= end1
            p1 = tl.where(over, p1 - end1, p1)
            a_token += tl.where(over, a_over1, 0)
        if AXES > 2:
            p0 = tl.where(over, p0 + (step0 + stride0), p0 + step0)
            over = p0 >= end0
            p0 = tl.where(over, p0 - end0, p0)
            a_token += tl.where(over, a_over0, 0)
    block = entry
    if block_ptr is not None:
        block = tl.load(block_ptr + entry, mask=k_mask, other=0)
    block_offset = block.to(tl.int64) * (a_width * b_width) + i * a_place
    offset = (block_offset[:, None] + (o * b_place)[None, :]) * (taps * TAPS) + tap[:, None] * TAPS
    offset += split.to(tl.int64) * numbers
    for t in tl.static_range(TAPS):
        tl.store(values_ptr + offset + t, sums[t], mask=k_mask[:, None] & output_mask[None, :])


@triton.jit(do_not_specialize=["numbers", "splits"])
def sum_kernel(parts_ptr, values_ptr, numbers, splits, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute values as the sum of `[splits, numbers]` parts; at most SPLITS parts, which are all loaded at once."""
    number = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.arange(0, SPLITS)
    offset = split.to(tl.int64)[:, None] * numbers + number[None, :]
    parts = tl.load(parts_ptr + offset, mask=(split < splits)[:, None] & (number < numbers)[None, :], other=0)
    tl.store(values_ptr + number, tl.sum(parts, 0), mask=number < numbers)
