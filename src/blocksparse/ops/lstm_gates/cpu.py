"""The gates on the CPU: tensors to addresses, one call into the compiled core."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import cpu_core
from ..cpu_core import DTYPES
from .operands import STATES, row_stride

NONE = (0, 0)

refusal = cpu_core.refusal


def forward(
    z: Tensor,
    add: Tensor | None,
    gain: Tensor | None,
    c: Tensor,
    *,
    h_out: Tensor,
    c_out: Tensor,
    gates_out: Tensor | None = None,
) -> None:
    dtype, (n, hidden) = z.dtype, c.shape
    state, one, all_four = STATES[dtype], (n, hidden), (n, 4 * hidden)
    cpu_core.core().gates_forward(
        cpu_core.isa(),
        DTYPES[dtype],
        n,
        hidden,
        _rows("z", z, all_four, dtype),
        NONE if add is None else _rows("add", add, all_four if add.dim() == 2 else all_four[1:], dtype),
        0 if gain is None else _rows("gain", gain, all_four[1:], dtype)[0],
        _rows("c", c, one, state),
        _rows("h_out", h_out, one, dtype),
        _rows("c_out", c_out, one, state),
        NONE if gates_out is None else _rows("gates_out", gates_out, all_four, dtype),
    )


def backward(
    gates: Tensor,
    c_before: Tensor,
    c: Tensor,
    grad_h: Tensor | None,
    grad_y: Tensor | None,
    grad_c: Tensor | None,
    *,
    grad_pre_out: Tensor,
    grad_c_out: Tensor,
) -> None:
    dtype, (n, hidden) = gates.dtype, c.shape
    state, one, all_four = STATES[dtype], (n, hidden), (n, 4 * hidden)
    cpu_core.core().gates_backward(
        cpu_core.isa(),
        DTYPES[dtype],
        n,
        hidden,
        _rows("gates", gates, all_four, dtype),
        _rows("c_before", c_before, one, state),
        _rows("c", c, one, state),
        NONE if grad_h is None else _rows("grad_h", grad_h, one, dtype),
        NONE if grad_y is None else _rows("grad_y", grad_y, one, dtype),
        NONE if grad_c is None else _rows("grad_c", grad_c, one, state),
        _rows("grad_pre_out", grad_pre_out, all_four, dtype),
        _rows("grad_c_out", grad_c_out, one, state),
    )


_CPU = torch.device("cpu")


def _rows(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    stride = row_stride(name, tensor, shape, dtype, _CPU)
    return tensor.data_ptr(), stride
