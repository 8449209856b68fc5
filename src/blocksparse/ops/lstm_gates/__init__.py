"""The fused gates of one LSTM step, forward and backward, without autograd.

Recurrences call them between their products. All outputs are the caller's memory, so that a sequence needs one buffer
for each. Shapes, with n rows and H features:

    z, add, gates, grad_pre_out     [n, 4H], the gates i, f, g, o in this order, as in torch.nn.LSTM
    gain                            [4H]; add may be [4H], too
    h_out, grad_h, grad_y           [n, H]
    c, c_before, c_out, grad_c, grad_c_out      [n, H], float32, or float64 where the others are

All but the states c have one dtype out of float32, float64, bfloat16 and float16; arithmetic is in the dtype of the
states. Features of a row are contiguous, rows may have any stride. An output may be the same tensor as an input of its
shape, but must not overlap an input otherwise. Callers with many steps get the backend once, by
`LSTM_GATES.on(device, dtype)`.
"""

from __future__ import annotations

from torch import Tensor

from .op import LSTM_GATES

__all__ = ["LSTM_GATES", "backward", "forward"]


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
    """Write c_out = f c + i g and h_out = o tanh(c_out), with the gates i, f, g, o of gain z + add.

    Args:
        z: `[n, 4H]`, the product of the step.
        add: the other term: `[n, 4H]`, `[4H]` or None.
        gain: `[4H]` or None.
        c: `[n, H]`, the state before.
        h_out: `[n, H]`, written.
        c_out: `[n, H]`, written; it may be c.
        gates_out: `[n, 4H]`, written: the sigmoid of i, f and o and the tanh of g, which `backward` needs.

    Raises:
        BlockSparseError: wrong shapes, dtypes, devices or strides.

    Example:
        >>> import torch
        >>> h, c = torch.empty(2, 3), torch.ones(2, 3)
        >>> forward(torch.zeros(2, 12), None, None, c, h_out=h, c_out=c)
        >>> c[0, 0].item(), round(h[0, 0].item(), 4)
        (0.5, 0.2311)

    Source: Hochreiter, Schmidhuber, Long Short-Term Memory (1997), with the forget gate of Gers et al. (2000).
    """
    LSTM_GATES.on(z.device, z.dtype).forward(z, add, gain, c, h_out=h_out, c_out=c_out, gates_out=gates_out)


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
    """Write the gradients at gain z + add and at the state before, from those at h and at c.

    Args:
        gates: `[n, 4H]`, as `forward` wrote them.
        c_before, c: `[n, H]`, the states before and after.
        grad_h, grad_y: `[n, H]` or None; their sum is the gradient at h.
        grad_c: `[n, H]` or None.
        grad_pre_out: `[n, 4H]`, written.
        grad_c_out: `[n, H]`, written; it may be grad_c.

    Raises:
        BlockSparseError: as `forward`.
    """
    LSTM_GATES.on(gates.device, gates.dtype).backward(
        gates, c_before, c, grad_h, grad_y, grad_c, grad_pre_out=grad_pre_out, grad_c_out=grad_c_out
    )
