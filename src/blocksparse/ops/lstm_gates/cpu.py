"""The gates on the CPU: tensors to addresses, one call into the compiled core."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import BlockSparseError
from .. import cpu_core
from ..cpu_core import DTYPES, address, rows
from .operands import STATES

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
    dtype, name, n, hidden = z.dtype, DTYPES[z.dtype], *_sizes(c)
    state, one, all_four = STATES[dtype], (n, hidden), (n, 4 * hidden)
    cpu_core.core().gates_forward(
        cpu_core.isa(),
        name,
        n,
        hidden,
        rows("z", z, all_four, dtype),
        rows("add", add, all_four if add is None or add.dim() == 2 else all_four[1:], dtype),
        address("gain", gain, all_four[1:], dtype),
        rows("c", c, one, state),
        rows("h_out", h_out, one, dtype),
        rows("c_out", c_out, one, state),
        rows("gates_out", gates_out, all_four, dtype),
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
    dtype, name, n, hidden = gates.dtype, DTYPES[gates.dtype], *_sizes(c)
    state, one, all_four = STATES[dtype], (n, hidden), (n, 4 * hidden)
    cpu_core.core().gates_backward(
        cpu_core.isa(),
        name,
        n,
        hidden,
        rows("gates", gates, all_four, dtype),
        rows("c_before", c_before, one, state),
        rows("c", c, one, state),
        rows("grad_h", grad_h, one, dtype),
        rows("grad_y", grad_y, one, dtype),
        rows("grad_c", grad_c, one, state),
        rows("grad_pre_out", grad_pre_out, all_four, dtype),
        rows("grad_c_out", grad_c_out, one, state),
    )


def _sizes(c: Tensor) -> torch.Size:
    """[n, H] of all tensors is that of the state."""
    if c.dim() != 2:
        raise BlockSparseError.expected("c", "[n, H]", list(c.shape))
    return c.shape
