"""The Triton kernels of the gates: one pass over memory, a tile of rows and features per program."""

from __future__ import annotations

import triton
import triton.language as tl

from ..gpu.device import tanh


@triton.jit
def _sigmoid(x):
    """Return 1 / (1 + e^-x) without overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1) / (1 + small)


@triton.jit
def _tile(n, hidden, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """Return this program's rows [ROWS, 1], features [1, FEATURES], and the mask of those that exist."""
    slices = tl.cdiv(hidden, FEATURES)
    row = (tl.program_id(0) // slices).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(0) % slices * FEATURES + tl.arange(0, FEATURES)
    return row[:, None], feature[None, :], (row < n)[:, None] & (feature < hidden)[None, :]


@triton.jit
def _before_gate(z_row, add_row, gain_ptr, feature, end, mask, SUM_DTYPE: tl.constexpr):
    """Return gain z + add at `feature` < end; the pointers of add and gain may be None."""
    v = tl.load(z_row + feature, mask=mask, other=0).to(SUM_DTYPE)
    if gain_ptr is not None:
        v *= tl.load(gain_ptr + feature, mask=feature < end, other=0).to(SUM_DTYPE)
    if add_row is not None:
        v += tl.load(add_row + feature, mask=mask, other=0).to(SUM_DTYPE)
    return v


@triton.jit
def activate(i, f, g, o, c_row, h_row, c_out_row, gates_row, j, hidden, mask):
    """Activate the gates and store the new states c and h, and also the activated gates unless `gates_row` is None."""
    i = _sigmoid(i)
    f = _sigmoid(f)
    g = tanh(g)
    o = _sigmoid(o)
    c = f * tl.load(c_row + j, mask=mask, other=0) + i * g
    tl.store(c_out_row + j, c, mask=mask)
    tl.store(h_row + j, o * tanh(c), mask=mask)
    if gates_row is not None:
        tl.store(gates_row + j, i, mask=mask)
        tl.store(gates_row + hidden + j, f, mask=mask)
        tl.store(gates_row + 2 * hidden + j, g, mask=mask)
        tl.store(gates_row + 3 * hidden + j, o, mask=mask)


@triton.jit(do_not_specialize=["n"])
def lstm_gates_forward_kernel(
    z_ptr,  # [n, 4 hidden]
    add_ptr,  # [n, 4 hidden], or [4 hidden] with stride 0, or None
    gain_ptr,  # [4 hidden] or None
    c_ptr,  # [n, hidden]
    h_ptr,  # [n, hidden]
    c_out_ptr,  # [n, hidden]
    gates_ptr,  # [n, 4 hidden] or None
    n, hidden, z_stride, add_stride, c_stride, h_stride, c_out_stride, gates_stride,
    SUM_DTYPE: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute z gain + add, the four gates i, f, g, o of it, and the new states c_out and h."""
    row, j, mask = _tile(n, hidden, ROWS, FEATURES)
    z = z_ptr + row * z_stride
    add = None if add_ptr is None else add_ptr + row * add_stride
    i = _before_gate(z, add, gain_ptr, j, hidden, mask, SUM_DTYPE)
    f = _before_gate(z, add, gain_ptr, hidden + j, 2 * hidden, mask, SUM_DTYPE)
    g = _before_gate(z, add, gain_ptr, 2 * hidden + j, 3 * hidden, mask, SUM_DTYPE)
    o = _before_gate(z, add, gain_ptr, 3 * hidden + j, 4 * hidden, mask, SUM_DTYPE)
    gates = None if gates_ptr is None else gates_ptr + row * gates_stride
    c_row, h_row, c_out_row = c_ptr + row * c_stride, h_ptr + row * h_stride, c_out_ptr + row * c_out_stride
    activate(i, f, g, o, c_row, h_row, c_out_row, gates, j, hidden, mask)


@triton.jit(do_not_specialize=["n"])
def lstm_gates_backward_kernel(
    gates_ptr,  # [n, 4 hidden]
    c_before_ptr,  # [n, hidden], unless noted
    c_ptr,
    grad_h_ptr,  # or None
    grad_y_ptr,  # or None
    grad_c_ptr,  # or None
    grad_pre_ptr,  # [n, 4 hidden]
    grad_c_before_ptr,
    n, hidden, gates_stride, c_before_stride, c_stride, grad_h_stride, grad_y_stride, grad_c_stride, grad_pre_stride,
    grad_c_before_stride,
    SUM_DTYPE: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the gates' inputs (grad_pre) and of the old state (grad_c_before).

    They follow from the activated gates, the states, and the gradients of the new states and of the output. The
    gradient of h is grad_h + grad_y.
    """
    row, j, mask = _tile(n, hidden, ROWS, FEATURES)
    gates = gates_ptr + row * gates_stride + j
    i = tl.load(gates, mask=mask, other=0).to(SUM_DTYPE)
    f = tl.load(gates + hidden, mask=mask, other=0).to(SUM_DTYPE)
    g = tl.load(gates + 2 * hidden, mask=mask, other=0).to(SUM_DTYPE)
    o = tl.load(gates + 3 * hidden, mask=mask, other=0).to(SUM_DTYPE)
    c_before = tl.load(c_before_ptr + row * c_before_stride + j, mask=mask, other=0)
    t = tanh(tl.load(c_ptr + row * c_stride + j, mask=mask, other=0))
    at_h = tl.zeros((ROWS, FEATURES), SUM_DTYPE)
    if grad_h_ptr is not None:
        at_h += tl.load(grad_h_ptr + row * grad_h_stride + j, mask=mask, other=0).to(SUM_DTYPE)
    if grad_y_ptr is not None:
        at_h += tl.load(grad_y_ptr + row * grad_y_stride + j, mask=mask, other=0).to(SUM_DTYPE)
    at_c = at_h * o * (1 - t * t)
    if grad_c_ptr is not None:
        at_c += tl.load(grad_c_ptr + row * grad_c_stride + j, mask=mask, other=0)
    tl.store(grad_c_before_ptr + row * grad_c_before_stride + j, at_c * f, mask=mask)
    grad_pre = grad_pre_ptr + row * grad_pre_stride + j
    tl.store(grad_pre, at_c * g * (i * (1 - i)), mask=mask)
    tl.store(grad_pre + hidden, at_c * c_before * (f * (1 - f)), mask=mask)
    tl.store(grad_pre + 2 * hidden, at_c * i * (1 - g * g), mask=mask)
    tl.store(grad_pre + 3 * hidden, at_h * t * (o * (1 - o)), mask=mask)
