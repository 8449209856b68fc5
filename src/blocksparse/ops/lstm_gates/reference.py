"""The definition of the gates in plain PyTorch: any device, any dtype, slow."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import always_supported

unsupported_reason = always_supported


@torch.no_grad()
def forward(
    z: Tensor, add: Tensor | None, gain: Tensor | None, c: Tensor,
    *, h_out: Tensor, c_out: Tensor, gates_out: Tensor | None = None,
) -> None:  # fmt: skip
    """Write c_out, h_out and gates_out; see `lstm_gates.forward`."""
    pre = z.to(c.dtype)
    if gain is not None:
        pre = gain * pre
    if add is not None:
        pre = pre + add
    i, f, g, o = pre.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    if gates_out is not None:
        gates_out.copy_(torch.cat([i, f, g, o], -1))
    c_out.copy_(f * c + i * g)
    h_out.copy_(o * c_out.tanh())


@torch.no_grad()
def backward(
    gates: Tensor, c_before: Tensor, c: Tensor, grad_h: Tensor | None, grad_y: Tensor | None, grad_c: Tensor | None,
    *, grad_pre_out: Tensor, grad_c_out: Tensor,
) -> None:  # fmt: skip
    """Write grad_pre_out and grad_c_out; see `lstm_gates.backward`."""
    i, f, g, o = gates.to(c.dtype).chunk(4, -1)
    tanh_c = c.tanh()
    at_h = sum((grad.to(c.dtype) for grad in (grad_h, grad_y) if grad is not None), torch.zeros_like(c))
    at_c = at_h * o * (1 - tanh_c**2)
    if grad_c is not None:
        at_c = at_c + grad_c
    at_i, at_f, at_g, at_o = at_c * g, at_c * c_before, at_c * i, at_h * tanh_c
    grad_c_out.copy_(at_c * f)
    grad_pre_out.copy_(torch.cat([at_i * i * (1 - i), at_f * f * (1 - f), at_g * (1 - g**2), at_o * o * (1 - o)], -1))
