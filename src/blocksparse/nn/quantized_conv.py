"""Block-sparse convolutions in 8 bits, for inference."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..layout import BlockLayout
from ..ops.int8_conv import int8_conv
from .conv import Conv1d, Conv2d, Conv3d, ConvCall
from .quantized import QuantizedModule, exchanged, refuse_gate, rounded_values


class QuantizedConv(QuantizedModule, ConvCall):
    """The base of convolutions in 8 bits."""

    kind: ClassVar[Any]
    """The layer that is not in 8 bits."""

    @classmethod
    def of(cls, layer: Any) -> Self:
        """Return the layer in 8 bits.

        Raises:
            BlockSparseError: no such convolution, or one of float64, or with numbers that are not finite.
        """
        values, scales = rounded_values(layer, cls.kind)
        new: Self = exchanged(layer, cls)
        new.hold(values, scales, None if layer.bias is None else layer.bias.detach().clone())
        return new

    def dequantized(self) -> Any:
        """Return the convolution of the rounded weight, of the bias's dtype."""
        layer: Any = exchanged(self, self.kind)
        layer.values = nn.Parameter(self.numbers(torch.float32 if self.bias is None else self.bias.dtype))
        layer.bias = None if self.bias is None else nn.Parameter(self.bias.clone())
        layer.reset_layout_buffers(self.values.device)
        return layer

    def forward(self, input: Tensor, gate: None = None) -> Tensor:
        refuse_gate(gate)
        return self.compute(input, self.bias, self.activation)

    def function(
        self, x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None, *, gate: None, **steps: Any
    ) -> Tensor:
        """Return the product."""
        return int8_conv(x, values, self.scales, layout, self.cast_bias(bias, x), **steps)


class QuantizedConv2d(QuantizedConv):
    """A `Conv2d` whose weight is int8, with a float32 scale for each output of a block.

    What one output sees, all channels of all taps, is rounded in each call, as `QuantizedLinear` rounds a token: other
    images and the rest of the image have no part in it. Made by `blocksparse.quantize`, or by `of`; without gradients.

    Attributes:
        values: int8 `[nnz, block_out, block_in, kernel_height, kernel_width]`.
        scales: float32 `[nnz, block_out]`.
        crow_indices, col_indices: of the layout, as in the state dicts of the other modules.
        bias: `[out_channels]` or None.
        in_channels, out_channels, kernel_size, stride, padding, dilation, padding_mode, activation: as of `Conv2d`.

    Shapes: `[n, in_channels, height, width] -> [n, out_channels, height, width]`, or both without n; float32, bfloat16
    or float16, as the bias is.

    Raises:
        BlockSparseError: in the call, inputs of another shape or dtype, or that want a gradient.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.QuantizedConv2d.of(bs.nn.Conv2d(64, 128, 3, padding=1, density=0.25))
    >>> layer
    QuantizedConv2d(64, 128, kernel_size=(3, 3), padding=(1, 1), block_size=(32, 32), nnz=2, density=0.25, bias=True)
    >>> layer(torch.randn(5, 64, 14, 14)).shape
    torch.Size([5, 128, 14, 14])

    Source: as of `QuantizedLinear`; torch.ao.nn.quantized.dynamic.Conv2d rounds all images together.
    """

    kind = Conv2d
    axes = 2


class QuantizedConv1d(QuantizedConv):
    """`QuantizedConv2d` over one axis: `[n, in_channels, length] -> [n, out_channels, length]`.

    >>> import torch, blocksparse as bs
    >>> bs.nn.QuantizedConv1d.of(bs.nn.Conv1d(64, 96, 5, padding="same", density=0.5))(torch.randn(2, 64, 100)).shape
    torch.Size([2, 96, 100])
    """

    kind = Conv1d
    axes = 1


class QuantizedConv3d(QuantizedConv):
    """`QuantizedConv2d` over three axes: images are `[n, channels, depth, height, width]`.

    >>> import torch, blocksparse as bs
    >>> bs.nn.QuantizedConv3d.of(bs.nn.Conv3d(32, 64, 3, stride=2, density=0.5))(torch.randn(2, 32, 5, 9, 9)).shape
    torch.Size([2, 64, 2, 4, 4])
    """

    kind = Conv3d
    axes = 3
