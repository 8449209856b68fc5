"""The block-sparse linear product in 8 bits: weights are rounded beforehand, inputs token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from ...convert import block_coordinates
from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..activations import ACTIVATIONS
from ..checks import check_activation, check_kinds
from .cpu import MAX_INPUTS
from .op import DTYPES, INT8_LINEAR, Int8Op, check_inference, check_operands
from .reference import NEGLIGIBLE

__all__ = [
    "DTYPES",
    "INT8_LINEAR",
    "MAX_INPUTS",
    "Int8Op",
    "check_inference",
    "check_operands",
    "int8_linear",
    "quantized",
]


def quantized(values: Tensor, layout: BlockLayout | None = None) -> tuple[Tensor, Tensor]:
    """Round values `[nnz, block_out, block_in, *kernel]` to int8, with a scale for each output of a block.

    With their layout, an output has the same scale in all blocks.

    Returns:
        int8 values of the same shape, -127 to 127, and float32 scales `[nnz, block_out]`. Their product is within half
        a scale of the values; it is 0 for an output without a number above 1e-36.

    Raises:
        BlockSparseError: values are not finite.

    >>> import torch
    >>> quantized(torch.tensor([[[1.0, -0.5], [0.0, 0.0]]]))[0]
    tensor([[[127, -64],
             [  0,   0]]], dtype=torch.int8)
    """
    if values.is_meta or not values.isfinite().all():
        raise BlockSparseError.expected("values", "finite numbers", "NaN, infinity, or a meta tensor")
    values = values.detach().float()
    largest = values.flatten(2).abs().amax(-1)
    if layout is not None:
        rows = block_coordinates(layout, values.device)[0]
        of_rows = largest.new_zeros(layout.grid[0], largest.shape[1])
        largest = of_rows.scatter_reduce(0, rows[:, None].expand_as(largest), largest, "amax")[rows]
    largest = largest[(..., *[None] * (values.dim() - 2))]
    factor = torch.where(largest > NEGLIGIBLE, 127 / largest, 0)
    scales = torch.where(largest > NEGLIGIBLE, largest / 127, 0)
    return (values * factor).round_().clamp_(-127, 127).to(torch.int8), scales.flatten(1)


def int8_linear(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    layout: BlockLayout,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Return activation(x W^T + bias) with W and x in 8 bits, for inference.

    Each token of x is rounded to 255 steps between plus and minus its largest number (dynamic quantization; tokens
    without a number above 1e-36 count as 0). Products of a block are summed exactly, then scaled and summed in float32.

    Args:
        x: `[..., in_features]`, float32, bfloat16 or float16, any strides.
        values, scales: from `quantized`, for the blocks of `layout`.
        layout: which blocks of the `[out_features, in_features]` weight these are; blocks of up to 65,536 inputs.
        bias: `[out_features]` of x's dtype, or None.
        activation: None, "relu", "gelu" (the exact one) or "silu".

    Returns:
        `[..., out_features]`, of x's dtype, without gradients; NaN for tokens with a number that is not finite.

    Raises:
        BlockSparseError: wrong dtypes, devices or sizes, or x requires a gradient.

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.random((64, 128), block_size=32, density=0.5, seed=0)
        >>> x, values = torch.randn(10, 128), torch.randn(layout.values_shape)
        >>> y, rounded = bs.linear(x, values, layout), int8_linear(x, *quantized(values), layout)
        >>> ((y - rounded).norm() / y.norm()).item() < 0.02
        True
    """
    check_kinds(layout, x=x, values=values, scales=scales, bias=bias)
    check_activation(activation, ACTIVATIONS)
    out_features, in_features = layout.shape
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise BlockSparseError.expected("x", f"[..., {in_features}] for {layout!r}", list(x.shape))
    check_operands(x, values, scales, layout, bias, layout.values_shape)
    flat = (x if x.dim() == 2 else x.reshape(-1, in_features)).resolve_neg()
    y = INT8_LINEAR((flat, values, scales, bias), layout, (activation,))
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], out_features)
