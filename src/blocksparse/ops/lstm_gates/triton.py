"""The gates on a GPU: each pass is one launch, which neither waits nor allocates."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..checks import SUM_DTYPES, row_stride
from ..gpu import runtime
from ..gpu.runtime import Launch, cdiv, check_fits
from ..gpu.tiles import Tile, power_of_two

# Features per program: four per thread, so that even few rows make many programs.
PROGRAM_SIZE, WARPS = 512, 4
# Number of cached launches: buffers of a sequence differ in their strides, and in their addresses modulo 16.
MAX_LAUNCHES = 1024

FORWARD = ("z", "add", "gain", "c", "h", "c_out", "gates")
BACKWARD = ("gates", "c_before", "c", "grad_h", "grad_y", "grad_c", "grad_pre", "grad_c_before")


unsupported_reason = runtime.unsupported_reason


def forward(
    z: Tensor, add: Tensor | None, gain: Tensor | None, c: Tensor,
    *, h_out: Tensor, c_out: Tensor, gates_out: Tensor | None = None,
) -> None:  # fmt: skip
    """Write c_out, h_out and gates_out; see `lstm_gates.forward`."""
    dtype, device, (n, hidden) = z.dtype, z.device, c.shape
    state, one, all_four = SUM_DTYPES[dtype], (n, hidden), (n, 4 * hidden)
    strides = (
        row_stride("z", z, all_four, dtype, device),
        0 if add is None else row_stride("add", add, all_four if add.dim() == 2 else all_four[1:], dtype, device),
        0 if gain is None else row_stride("gain", gain, all_four[1:], dtype, device),
        row_stride("c", c, one, state, device),
        row_stride("h_out", h_out, one, dtype, device),
        row_stride("c_out", c_out, one, state, device),
        0 if gates_out is None else row_stride("gates_out", gates_out, all_four, dtype, device),
    )
    _run("forward", dtype, device, one, strides, z, add, gain, c, h_out, c_out, gates_out)


def backward(
    gates: Tensor, c_before: Tensor, c: Tensor, grad_h: Tensor | None, grad_y: Tensor | None, grad_c: Tensor | None,
    *, grad_pre_out: Tensor, grad_c_out: Tensor,
) -> None:  # fmt: skip
    """Write grad_pre_out and grad_c_out; see `lstm_gates.backward`."""
    dtype, device, (n, hidden) = gates.dtype, gates.device, c.shape
    state, one, all_four = SUM_DTYPES[dtype], (n, hidden), (n, 4 * hidden)
    strides = (
        row_stride("gates", gates, all_four, dtype, device),
        row_stride("c_before", c_before, one, state, device),
        row_stride("c", c, one, state, device),
        0 if grad_h is None else row_stride("grad_h", grad_h, one, dtype, device),
        0 if grad_y is None else row_stride("grad_y", grad_y, one, dtype, device),
        0 if grad_c is None else row_stride("grad_c", grad_c, one, state, device),
        row_stride("grad_pre_out", grad_pre_out, all_four, dtype, device),
        row_stride("grad_c_out", grad_c_out, one, state, device),
    )
    _run(
        "backward", dtype, device, one, strides,
        gates, c_before, c, grad_h, grad_y, grad_c, grad_pre_out, grad_c_out,
    )  # fmt: skip


def _run(
    pass_: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, int], strides: tuple[int, ...],
    *tensors: Tensor | None,
) -> None:  # fmt: skip
    """Run a pass through its cached launch."""
    if shape[0] == 0:
        return
    # Triton compiles for the presence of each tensor, and for addresses that are multiples of 16 bytes or not.
    kinds = tuple([None if tensor is None else tensor.data_ptr() % 16 == 0 for tensor in tensors])
    _plan_launch(pass_, dtype, device, shape, strides, kinds)(*tensors)


@lru_cache(maxsize=MAX_LAUNCHES)
def _plan_launch(
    pass_: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, int], strides: tuple[int, ...],
    kinds: tuple[bool | None, ...],
) -> Launch:  # fmt: skip
    """Plan the launch of a pass; `kinds`, a key of the cache, says which tensors are there and aligned."""
    from ..gpu.device import DTYPES
    from . import kernels

    n, hidden = shape
    check_fits("c", "features of the four gates", 4 * hidden)
    names = FORWARD if pass_ == "forward" else BACKWARD
    features = min(power_of_two(hidden), PROGRAM_SIZE)
    rows = min(PROGRAM_SIZE // features, power_of_two(n))
    arguments = {
        "n": n, "hidden": hidden, **{f"{name}_stride": stride for name, stride in zip(names, strides, strict=True)},
        "SUM_DTYPE": DTYPES[SUM_DTYPES[dtype]], "ROWS": rows, "FEATURES": features,
    }  # fmt: skip
    kernel = kernels.lstm_gates_forward_kernel if pass_ == "forward" else kernels.lstm_gates_backward_kernel
    grid = cdiv(n, rows) * cdiv(hidden, features), 1, 1
    return Launch(kernel, grid, len(names), arguments, Tile(rows, features, 1, WARPS, 1))
