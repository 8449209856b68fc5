"""Block-sparse convolutions in int8, for inference."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..layout import BlockLayout
from ..ops.int8_conv import int8_conv
from .conv import Conv1d, Conv2d, Conv3d, PaddedConvolutionModule
from .quantized import QuantizedLayer


class QuantizedConv(QuantizedLayer, PaddedConvolutionModule):
    """The base of int8 convolutions."""

    def function(
        self, x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None, *, gate: None, **steps: Any
    ) -> Tensor:
        """Compute the int8 product."""
        return int8_conv(x, values, self.scales, layout, self.cast_bias(bias, x), **steps)


class QuantizedConv2d(QuantizedConv):
    """A `Conv2d` with an int8 weight and a float32 scale for each output of a block; for inference.

    `blocksparse.quantize` and `of` make it. Each call quantizes the inputs of one output position, all channels of all
    taps, together: the result does not depend on other images or the rest of the image.

    Attributes:
        values: int8 `[nnz, block_out, block_in, kernel_height, kernel_width]`.
        scales: float32 `[nnz, block_out]`.
        crow_indices, col_indices: the layout's indices, as in the state dicts of other modules.
        bias: `[out_channels]` or None.
        in_channels, out_channels, kernel_size, stride, padding, dilation, padding_mode, activation: as in `Conv2d`.

    Shapes: `[n, in_channels, height, width] -> [n, out_channels, height, width]`, or both without n; float32, bfloat16
    or float16, as the bias.

    Raises:
        BlockSparseError: in the call, the input has another shape or dtype, or requires a gradient.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.QuantizedConv2d.of(bs.nn.Conv2d(64, 128, 3, padding=1, density=0.25))
    >>> layer
    QuantizedConv2d(64, 128, kernel_size=(3, 3), padding=(1, 1), block_size=(32, 32), nnz=2, density=0.25, bias=True)
    >>> layer(torch.randn(5, 64, 14, 14)).shape
    torch.Size([5, 128, 14, 14])

    Source: as `QuantizedLinear`; torch.ao.nn.quantized.dynamic.Conv2d quantizes all images together.
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
