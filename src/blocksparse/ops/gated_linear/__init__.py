"""The gated pair of block-sparse products, activation(x G^T) * (x U^T), used by the MLPs of language models."""

from __future__ import annotations

from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout, check_layout
from ..activations import ACTIVATIONS
from ..checks import check_activation, in_autocast
from ..linear import check_shapes, linear
from ..registry import can_bypass_dispatcher, needs_grad
from .op import GATED_LINEAR

__all__ = ["GATED_LINEAR", "gated_linear"]


def gated_linear(
    x: Tensor,
    gate: Tensor,
    gate_layout: BlockLayout,
    up: Tensor,
    up_layout: BlockLayout,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    activation: str | None = "silu",
) -> Tensor:
    """Return activation(x G^T + gate_bias) * (x U^T + up_bias), a gated linear unit with block-sparse weights.

    Args:
        x: `[..., in_features]`, any strides.
        gate, up: `[nnz, block_out, block_in]`, the values of G and of U on their layouts.
        gate_layout, up_layout: of one shape and block; they may store different blocks.
        gate_bias, up_bias: `[out_features]` or None.
        activation: None, "relu", "gelu" (the exact one) or "silu".

    Dtypes, devices, autocast and gradients are those of `linear`. On a GPU, in inference, one kernel computes both
    products: inputs that both need are loaded once, and neither product is written. Otherwise this is two calls of
    `linear`, and differentiable.

    Returns:
        `[..., out_features]`.

    Raises:
        BlockSparseError: the layouts have different shapes or blocks, or as `linear`.

    Example:
        >>> import torch, blocksparse as bs
        >>> g, u = (bs.patterns.random((128, 64), block_size=32, density=0.5, seed=seed) for seed in (0, 1))
        >>> gated_linear(torch.randn(5, 64), torch.randn(g.values_shape), g, torch.randn(u.values_shape), u).shape
        torch.Size([5, 128])

    Source: Shazeer, GLU Variants Improve Transformer (2020); fused for block-sparse weights as in BLaST (2025).
    """
    for layout in (gate_layout, up_layout):
        check_layout(layout)
    if (gate_layout.shape, gate_layout.block_shape) != (up_layout.shape, up_layout.block_shape):
        raise BlockSparseError.expected("up_layout", f"one of the shape and block of {gate_layout!r}", repr(up_layout))
    check_activation(activation, ACTIVATIONS)
    tensors = x, gate, up, gate_bias, up_bias
    if not can_bypass_dispatcher(*tensors) or in_autocast(x) or needs_grad(*tensors):
        return linear(x, gate, gate_layout, gate_bias, activation) * linear(x, up, up_layout, up_bias)
    out_features, in_features = gate_layout.shape
    for values, layout, bias in ((gate, gate_layout, gate_bias), (up, up_layout, up_bias)):
        check_shapes(x, values, layout, bias, out_features, in_features)
    flat = x if x.dim() == 2 else x.reshape(-1, in_features)
    backend = GATED_LINEAR.on(x.device, x.dtype)
    y: Tensor = backend.gated_linear(flat, gate, gate_layout, up, up_layout, gate_bias, up_bias, activation)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], out_features)
