"""Convolutions over 1 to 3 axes that are block-sparse in their channels, and their transposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..checked import shape_of
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops.checks import check_activation
from ..ops.conv import ACTIVATIONS, per_axis
from .layout_module import LayoutModule
from .module import BlockSparseModule, layout_for
from .research.circular import circular_pad

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
Ints = int | Sequence[int]


class ConvolutionCall(LayoutModule):
    """The call of a convolution or a transposed one, padded to whole blocks; subclasses have the product."""

    axes: int  # of space
    function: Any
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    activation: str | None
    bias: Tensor | None

    @property
    def weight_shape(self) -> tuple[int, int]:
        """(out, in) of the weight, without padding."""
        return self.out_channels, self.in_channels

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `model.to(memory_format=torch.channels_last)` treats any tensor of 4 or 5 axes as images, but values are not.
        def apart(tensor: Tensor) -> Tensor:
            return fn(tensor) if tensor.dim() < 4 else fn(tensor.flatten(2)).reshape(tensor.shape)

        return super()._apply(apart, recurse)

    def _convolve(self, x: Tensor, bias: Tensor | None, activation: str | None, **steps: Any) -> Tensor:
        out_channels, in_channels = self.layout.shape
        if in_channels != self.in_channels:
            x = F.pad(x, [0, 0] * self.axes + [0, in_channels - self.in_channels])
        if bias is not None and out_channels != self.out_channels:
            bias = F.pad(bias, (0, out_channels - self.out_channels))
        steps |= {"stride": self.stride, "dilation": self.dilation, "activation": activation}
        y: Tensor = self.function(x, self.values, self.layout, bias, **steps)
        return y if out_channels == self.out_channels else y.narrow(-self.axes - 1, 0, self.out_channels)

    def _check(self, x: Any) -> None:
        if not isinstance(x, Tensor) or x.dim() not in (self.axes + 1, self.axes + 2):
            raise BlockSparseError.expected("x", f"a tensor [n, {self.in_channels}, *{self.axes} sizes]", shape_of(x))
        if x.shape[-self.axes - 1] != self.in_channels:
            raise BlockSparseError.expected("x", f"[n, {self.in_channels}, *{self.axes} sizes]", list(x.shape))

    def extra_repr(self) -> str:
        usual = {"stride": 1, "dilation": 1, "padding": 0, "padding_mode": "zeros", "output_padding": 0}
        given = {name: getattr(self, name) for name in usual if hasattr(self, name)}
        settings = "".join(f", {k}={v!r}" for k, v in given.items() if v not in (usual[k], (usual[k],) * self.axes))
        activation = f", activation={self.activation!r}" if self.activation else ""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}{settings}, "
            f"{self._layout_repr}, bias={self.bias is not None}{activation}"
        )


class ConvCall(ConvolutionCall):
    """The call of a convolution, with its padding."""

    padding: Any
    padding_mode: str

    def compute(self, x: Tensor, bias: Tensor | None, activation: str | None, gate: Tensor | None = None) -> Tensor:
        """activation(W * x + bias), whatever the module's own bias and activation are."""
        self._check(x)
        if self.padding_mode == "zeros" or self.padding == "valid":
            return self._convolve(x, bias, activation, padding=self.padding, gate=gate)
        return self._convolve(self.padded(x), bias, activation, padding=0, gate=gate)

    def padded(self, x: Tensor) -> Tensor:
        """Return the image with the margins that the padding gives it."""
        if self.padding == "valid":
            return x
        if self.padding_mode == "circular":
            return circular_pad(x, margins(self))
        return F.pad(x, margins(self), mode="constant" if self.padding_mode == "zeros" else self.padding_mode)


class Convolution(ConvolutionCall, BlockSparseModule):
    """The base of convolutions and transposed ones: channels padded to whole blocks, parameters, initialisation."""

    def __init__(
        self,
        channels: tuple[int, int],
        kernel_size: Ints,
        stride: Ints,
        dilation: Ints,
        layout: BlockLayout,
        bias: bool,
        activation: str | None,
        device: Any,
        dtype: torch.dtype | None,
    ):
        kernel = tuple(per_axis("kernel_size", kernel_size, self.axes, least=1))
        super().__init__(layout, kernel, device, dtype)
        check_activation(activation, ACTIVATIONS)
        self.out_channels, self.in_channels = map(int, channels)
        self.kernel_size = kernel
        self.stride = tuple(per_axis("stride", stride, self.axes, least=1))
        self.dilation = tuple(per_axis("dilation", dilation, self.axes, least=1))
        self.activation = activation
        self.bias = nn.Parameter(torch.empty(self.out_channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights and biases again."""
        self.draw_parameters(self.bias)


class _Conv(ConvCall, Convolution):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        *,
        padding_mode: str = "zeros",
        layout: BlockLayout | None = None,
        density: float | None = None,
        block_size: int | tuple[int, int] = 32,
        bias: bool = True,
        activation: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        channels = out_channels, in_channels
        layout = layout_for(channels, layout, density, block_size, "channels")
        super().__init__(channels, kernel_size, stride, dilation, layout, bias, activation, device, dtype)
        if padding_mode not in PADDING_MODES:
            raise BlockSparseError.expected("padding_mode", f"one of {', '.join(PADDING_MODES)}", repr(padding_mode))
        if padding == "same" and any(step != 1 for step in self.stride):
            raise BlockSparseError.expected("stride", 'only ones with padding "same"', self.stride)
        named = padding in ("same", "valid") if isinstance(padding, str) else False
        self.padding = padding if named else tuple(per_axis("padding", padding, self.axes, least=0, names=True))
        self.padding_mode = padding_mode

    def forward(self, input: Tensor, gate: Tensor | None = None) -> Tensor:
        return self.compute(input, self.bias, self.activation, gate)


class Conv2d(_Conv):
    """`torch.nn.Conv2d` with a weight that is block-sparse in its channels: y = activation(W * x + b).

    Args:
        in_channels, out_channels: any positive sizes; what is no multiple of the block is padded inside.
        kernel_size, stride, padding, dilation: as in torch; padding may be "same" or "valid".
        layout: which blocks of the (padded) `[out_channels, in_channels]` exist. Instead of `groups`,
            `patterns.block_diagonal`.
        density: instead of a layout, the fraction of its numbers that a random pattern stores; None for all.
        block_size: an int or (rows, columns), where no layout is given; (32, 4), say, for the colours of an image.
        bias: whether there is a bias `[out_channels]`.
        activation: None, "relu", "gelu" or "silu".
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        device, dtype: of the parameters.

    Weights and biases are drawn as torch.nn.Conv2d draws them, uniform within 1 / sqrt(fan_in), with the fan-in that
    each output really has in the layout.

    Shapes: `[n, in_channels, height, width] -> [n, out_channels, height, width]`, or both without n. Images in
    `torch.channels_last` are used as they lie in memory. The call takes a `gate` `[nnz]` too, as `blocksparse.conv2d`.

    Raises:
        BlockSparseError: a layout of another shape, a density outside of 0..1, sizes and steps that are not positive,
            an unknown activation or padding; in the call, inputs that `blocksparse.conv2d` refuses.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Conv2d(64, 128, 3, padding=1, density=0.25, block_size=32)
        >>> layer
        Conv2d(64, 128, kernel_size=(3, 3), padding=(1, 1), block_size=(32, 32), nnz=2, density=0.25, bias=True)
        >>> layer(torch.randn(5, 64, 14, 14)).shape
        torch.Size([5, 128, 14, 14])
    """

    axes = 2
    function = staticmethod(ops.conv2d)


class Conv1d(_Conv):
    """`Conv2d` over one axis, for torch.nn.Conv1d: `[n, in_channels, length] -> [n, out_channels, length]`.

    >>> import torch, blocksparse as bs
    >>> bs.nn.Conv1d(64, 96, 5, padding="same", density=0.5)(torch.randn(2, 64, 100)).shape
    torch.Size([2, 96, 100])
    """

    axes = 1
    function = staticmethod(ops.conv1d)


class Conv3d(_Conv):
    """`Conv2d` over three axes, for torch.nn.Conv3d: images are `[n, channels, depth, height, width]`.

    >>> import torch, blocksparse as bs
    >>> bs.nn.Conv3d(32, 64, 3, stride=2, padding=1, density=0.5)(torch.randn(2, 32, 4, 8, 8)).shape
    torch.Size([2, 64, 2, 4, 4])
    """

    axes = 3
    function = staticmethod(ops.conv3d)


class _ConvTranspose(Convolution):
    _transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        dilation: Ints = 1,
        *,
        layout: BlockLayout | None = None,
        density: float | None = None,
        block_size: int | tuple[int, int] = 32,
        bias: bool = True,
        activation: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        channels = out_channels, in_channels
        layout = layout_for(channels, layout, density, block_size, "channels")
        super().__init__(channels, kernel_size, stride, dilation, layout, bias, activation, device, dtype)
        self.padding = tuple(per_axis("padding", padding, self.axes, least=0))
        self.output_padding = tuple(per_axis("output_padding", output_padding, self.axes, least=0))

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None, gate: Tensor | None = None) -> Tensor:
        """`output_size`, of the axes of space, takes the place of `output_padding`: what it has to be follows."""
        return self.compute(input, self.bias, self.activation, output_size, gate)

    def compute(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        output_size: Sequence[int] | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """activation(W * x + bias), whatever the module's own bias and activation are."""
        self._check(x)
        more = self.output_padding if output_size is None else self._output_padding(x, output_size)
        return self._convolve(x, bias, activation, padding=self.padding, output_padding=more, gate=gate)

    def _output_padding(self, x: Tensor, output_size: Sequence[int]) -> tuple[int, ...]:
        expected = tuple(output_size)[-self.axes :]
        axes = zip(x.shape[-self.axes :], self.stride, self.padding, self.dilation, self.kernel_size, strict=True)
        least = tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 for n, s, p, d, k in axes)
        most = tuple(n + max(s, d) - 1 for n, s, d in zip(least, self.stride, self.dilation, strict=True))
        if len(expected) != self.axes or not all(a <= b <= c for a, b, c in zip(least, expected, most, strict=True)):
            raise BlockSparseError.expected("output_size", f"sizes from {least} to {most}", tuple(output_size))
        return tuple(b - a for a, b in zip(least, expected, strict=True))


class ConvTranspose2d(_ConvTranspose):
    """`torch.nn.ConvTranspose2d` with a weight that is block-sparse in its channels.

    Args:
        in_channels, out_channels, kernel_size: of this operation; any channels, padded inside to whole blocks.
        stride, padding, output_padding, dilation: as in torch, though dilation comes before the options.
        layout: which blocks of the (padded) `[out_channels, in_channels]` exist.
        density, block_size, bias, activation, device, dtype: as for `Conv2d`, as is how weights are drawn.

    Shapes: `[n, in_channels, height, width] -> [n, out_channels, height, width]`, or both without n.

    Raises:
        BlockSparseError: as `Conv2d`; in the call, an output_size that cannot be.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1, density=0.5)
        >>> layer(torch.randn(5, 64, 7, 7)).shape
        torch.Size([5, 32, 14, 14])
        >>> layer(torch.randn(5, 64, 7, 7), output_size=(15, 14)).shape
        torch.Size([5, 32, 15, 14])
    """

    axes = 2
    function = staticmethod(ops.conv_transpose2d)


class ConvTranspose1d(_ConvTranspose):
    """`ConvTranspose2d` over one axis, for torch.nn.ConvTranspose1d.

    >>> import torch, blocksparse as bs
    >>> bs.nn.ConvTranspose1d(64, 96, 2, stride=2, density=0.5)(torch.randn(2, 64, 50)).shape
    torch.Size([2, 96, 100])
    """

    axes = 1
    function = staticmethod(ops.conv_transpose1d)


class ConvTranspose3d(_ConvTranspose):
    """`ConvTranspose2d` over three axes, for torch.nn.ConvTranspose3d.

    >>> import torch, blocksparse as bs
    >>> bs.nn.ConvTranspose3d(32, 64, 2, stride=2, density=0.5)(torch.randn(2, 32, 2, 4, 4)).shape
    torch.Size([2, 64, 4, 8, 8])
    """

    axes = 3
    function = staticmethod(ops.conv_transpose3d)


def margins(layer: Any) -> list[int]:
    """Return the padding of a convolution, torch.nn's or ours, as F.pad takes it: the last axis first, before and after."""
    around: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            around += [total // 2, total - total // 2]
        else:
            around += [0 if layer.padding == "valid" else layer.padding[axis]] * 2
    return around
