"""Convolutions in 8 bits: each output is the linear product of its patch of inputs, which are rounded together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..activations import ACTIVATIONS
from ..checks import check_activation, check_kinds
from ..conv import check_shapes, is_channels_last, output_size, per_axis
from ..int8_linear import check_operands
from .op import INT8_CONV

__all__ = ["INT8_CONV", "int8_conv"]

Ints = int | Sequence[int]


def int8_conv(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    layout: BlockLayout,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    activation: str | None = None,
) -> Tensor:
    """Return activation(W * x + bias) over 1 to 3 axes with W and x in 8 bits, for inference.

    The patch of an output, all channels of all taps, is rounded as `int8_linear` rounds a token. So the result at a
    position is the linear product of its patch, and does not depend on the rest of the image or the batch. Products of
    a block, over all of its taps, are summed exactly, then scaled and summed in float32.

    Args:
        x: `[n, in_channels, *space]`, or without n; float32, bfloat16 or float16.
        values, scales: int8 `[nnz, block_out, block_in, *kernel]` and float32 `[nnz, block_out]`, from `quantized`; a
            block has up to 65,536 inputs, counting all taps.
        layout: which blocks of the `[out_channels, in_channels]` weight these are.
        bias: `[out_channels]` of x's dtype, or None.
        stride, padding, dilation: as in `blocksparse.conv2d`.
        activation: None, "relu", "gelu" (the exact one) or "silu".

    Returns:
        `[n, out_channels, *space]`, of x's dtype, channels-last if x is, without gradients. Outputs whose patch has a
        number that is not finite are NaN.

    Raises:
        BlockSparseError: wrong dtypes, devices or sizes, or x requires a gradient.

    Example:
        >>> import torch, blocksparse as bs
        >>> from blocksparse.ops.int8_linear import quantized
        >>> layout = bs.patterns.random((64, 128), block_size=32, density=0.5, seed=0)
        >>> x, values = torch.randn(2, 128, 9, 9), torch.randn(*layout.values_shape, 3, 3)
        >>> y, rounded = bs.conv2d(x, values, layout), int8_conv(x, *quantized(values), layout)
        >>> ((y - rounded).norm() / y.norm()).item() < 0.02
        True
    """
    check_kinds(layout, x=x, values=values, scales=scales, bias=bias)
    check_activation(activation, ACTIVATIONS)
    axes = values.dim() - 3
    if not 1 <= axes <= 3:
        shape = ", ".join(map(str, layout.values_shape))
        raise BlockSparseError.expected("values", f"[{shape}, *kernel], a kernel of 1 to 3 axes", list(values.shape))
    check_shapes(axes, x, values, layout, bias)
    check_operands(x, values, scales, layout, bias, (*layout.values_shape, *values.shape[3:]))
    steps = per_axis("stride", stride, axes, least=1), per_axis("dilation", dilation, axes, least=1)
    batch = (x if x.dim() == axes + 2 else x.unsqueeze(0)).resolve_neg()
    before, size = output_size(batch.shape[2:], values.shape[3:], *steps, padding)
    options = size, steps[0], before, steps[1], activation
    y = INT8_CONV((batch.movedim(1, -1), values, scales, bias), layout, options).movedim(-1, 1)
    if not is_channels_last(batch):
        y = y.contiguous()
    return y if batch.dim() == x.dim() else y.squeeze(0)
