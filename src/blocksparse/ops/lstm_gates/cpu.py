"""The gates on the CPU: each pass is one call of the compiled core."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import BlockSparseError
from .. import cpu_core
from ..checks import SUM_DTYPES
from ..cpu_core import DTYPES

unsupported_reason = cpu_core.unsupported_reason


def forward(
    z: Tensor, add: Tensor | None, gain: Tensor | None, c: Tensor,
    *, h_out: Tensor, c_out: Tensor, gates_out: Tensor | None = None,
) -> None:  # fmt: skip
    """Write c_out, h_out and gates_out; see `lstm_gates.forward`."""
    dtype, name, (n, hidden) = z.dtype, DTYPES[z.dtype], _sizes(c)
    state, one, all_four = SUM_DTYPES[dtype], (n, hidden), (n, 4 * hidden)
    core, isa, (z_, add_, (gain_, _), *rest) = cpu_core.arguments(
        ("z", z, all_four, dtype),
        ("add", add, all_four if add is None or add.dim() == 2 else all_four[1:], dtype),
        ("gain", gain, all_four[1:], dtype),
        ("c", c, one, state),
        ("h_out", h_out, one, dtype),
        ("c_out", c_out, one, state),
        ("gates_out", gates_out, all_four, dtype),
    )
    core.gates_forward(isa, name, n, hidden, z_, add_, gain_, *rest)


def backward(
    gates: Tensor, c_before: Tensor, c: Tensor, grad_h: Tensor | None, grad_y: Tensor | None, grad_c: Tensor | None,
    *, grad_pre_out: Tensor, grad_c_out: Tensor,
) -> None:  # fmt: skip
    """Write grad_pre_out and grad_c_out; see `lstm_gates.backward`."""
    dtype, name, (n, hidden) = gates.dtype, DTYPES[gates.dtype], _sizes(c)
    state, one, all_four = SUM_DTYPES[dtype], (n, hidden), (n, 4 * hidden)
    core, isa, addresses = cpu_core.arguments(
        ("gates", gates, all_four, dtype),
        ("c_before", c_before, one, state),
        ("c", c, one, state),
        ("grad_h", grad_h, one, dtype),
        ("grad_y", grad_y, one, dtype),
        ("grad_c", grad_c, one, state),
        ("grad_pre_out", grad_pre_out, all_four, dtype),
        ("grad_c_out", grad_c_out, one, state),
    )
    core.gates_backward(isa, name, n, hidden, *addresses)


def _sizes(c: Tensor) -> torch.Size:
    """Return (n, H) from the state; all tensors share them."""
    if c.dim() != 2:
        raise BlockSparseError.expected("c", "[n, H]", list(c.shape))
    return c.shape
