"""Convolutions and transposed convolutions over 1 to 3 axes, block-sparse in their channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..checked import is_int, shape_of
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops.checks import check_activation
from ..ops.conv import ACTIVATIONS, per_axis
from .layout_module import LayoutModule
from .module import BlockSparseModule, layout_for
from .research.circular import circular_pad

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
Ints = int | Sequence[int]
Margins = Sequence[tuple[int, int]]


class ConvolutionModule(LayoutModule):
    """The forward pass of a convolution or transposed one, padded to whole blocks; subclasses define the product."""

    axes: int  # the number of axes of space
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
        """(out_channels, in_channels) of the weight, without padding."""
        return self.out_channels, self.in_channels

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `model.to(memory_format=torch.channels_last)` treats every tensor of 4 or 5 axes as images. Values are none.
        def apply_flat(tensor: Tensor) -> Tensor:
            return fn(tensor) if tensor.dim() < 4 else fn(tensor.flatten(2)).reshape(tensor.shape)

        return super()._apply(apply_flat, recurse)

    def _convolve(self, x: Tensor, bias: Tensor | None, activation: str | None, **steps: Any) -> Tensor:
        """Return the convolution, with x and bias padded to the layout's channels, without the outputs of padding."""
        layout = self.layout
        out_channels, in_channels = layout.shape
        if in_channels != self.in_channels:
            x = F.pad(x, [0, 0] * self.axes + [0, in_channels - self.in_channels])
        if bias is not None and out_channels != self.out_channels:
            bias = F.pad(bias, (0, out_channels - self.out_channels))
        steps |= {"stride": self.stride, "dilation": self.dilation, "activation": activation}
        y: Tensor = self.function(x, self.values, layout, bias, **steps)
        return y if out_channels == self.out_channels else y.narrow(-self.axes - 1, 0, self.out_channels)

    def _check(self, x: Any) -> None:
        """Check that x is a tensor of this convolution's axes and channels."""
        has_axes = isinstance(x, Tensor) and x.dim() in (self.axes + 1, self.axes + 2)
        if not has_axes or x.shape[-self.axes - 1] != self.in_channels:
            space = ", ".join(("length",) if self.axes == 1 else ("depth", "height", "width")[-self.axes :])
            raise BlockSparseError.expected(
                "x", f"a tensor [n, {self.in_channels}, {space}], with or without n", shape_of(x)
            )

    def extra_repr(self) -> str:
        usual = {"stride": 1, "dilation": 1, "padding": 0, "padding_mode": "zeros", "output_padding": 0}
        own = {name: getattr(self, name) for name in usual if hasattr(self, name)}
        settings = "".join(f", {k}={v!r}" for k, v in own.items() if v not in (usual[k], (usual[k],) * self.axes))
        activation = f", activation={self.activation!r}" if self.activation else ""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}{settings}, "
            f"{self._layout_repr}, bias={self.bias is not None}{activation}"
        )


class PaddedConvolutionModule(ConvolutionModule):
    """The forward pass of a convolution, with its padding."""

    padding: Any
    padding_mode: str

    def compute(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        gate: Tensor | None = None,
        *,
        margins: Margins | None = None,
    ) -> Tensor:
        """Return activation(W * x + bias) for any bias and activation; see `forward` for `margins`."""
        self._check(x)
        padding: Any = self.padding if margins is None else margins
        are_pairs = isinstance(margins, tuple | list) and all(isinstance(pair, tuple | list) for pair in margins)
        if margins is not None and not are_pairs:
            raise BlockSparseError.expected("margins", "a pair (before, behind) for each axis", repr(margins))
        if margins is None and self.padding_mode != "zeros" and self.padding != "valid":
            x, padding = self.padded(x), 0
        return self._convolve(x, bias, activation, padding=padding, gate=gate)

    def padded(self, x: Tensor, around: Margins | None = None) -> Tensor:
        """Return the image with its padding on all sides, in the padding mode; `around` is `margins` of `forward`."""
        if around is not None:
            return F.pad(x, [size for axis in reversed(around) for size in axis])
        if self.padding == "valid":
            return x
        if self.padding_mode == "circular":
            return circular_pad(x, margins(self))
        return F.pad(x, margins(self), mode="constant" if self.padding_mode == "zeros" else self.padding_mode)


class Convolution(ConvolutionModule, BlockSparseModule):
    """The base of convolutions and transposed ones: parameters and their initialisation."""

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
        """Draw new weights and biases."""
        self.draw_parameters(self.bias)


class _Conv(PaddedConvolutionModule, Convolution):
    accepts_margins = True  # in a call, see `forward`

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
        named = isinstance(padding, str) and padding in ("same", "valid")
        if named and padding == "same" and any(step != 1 for step in self.stride):
            raise BlockSparseError.expected("stride", '1 for each axis with padding "same"', self.stride)
        self.padding = padding if named else tuple(per_axis("padding", padding, self.axes, least=0, names=True))
        self.padding_mode = padding_mode

    def forward(self, input: Tensor, gate: Tensor | None = None, *, margins: Margins | None = None) -> Tensor:
        """Compute the convolution; `margins`, (before, behind) for each axis, replace `padding` by zeros if given."""
        return self.compute(input, self.bias, self.activation, gate, margins=margins)


class Conv2d(_Conv):
    """`torch.nn.Conv2d` with a weight that is block-sparse in its channels: y = activation(W * x + b).

    Args:
        in_channels, out_channels: positive sizes; the module pads them to multiples of the block.
        kernel_size, stride, padding, dilation: as in torch.nn.Conv2d; padding can be "same" or "valid".
        layout: the stored blocks of the padded `[out_channels, in_channels]`. In place of `groups`, use
            `patterns.block_diagonal`.
        density: fraction of the weights that a random layout stores if no layout is given; None stores all.
        block_size: an int or (rows, columns), used if no layout is given; for images of 3 colours, for example (32, 4).
        bias: whether the layer has a bias `[out_channels]`.
        activation: None, "relu", "gelu" or "silu".
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        device, dtype: of the parameters.

    Weights and biases are drawn as in torch.nn.Conv2d, uniform within 1 / sqrt(fan_in), where fan_in counts the stored
    inputs of each output.

    Shapes: `[n, in_channels, height, width] -> [n, out_channels, height, width]`, or both without n. Images in
    `torch.channels_last` are not copied. `forward` also accepts a `gate` `[nnz]`, as `blocksparse.conv2d`.

    Raises:
        BlockSparseError: the layout has another shape, the density is not in 0..1, a size or step is not positive, or
            the activation or padding is unknown; in the call, for inputs that `blocksparse.conv2d` refuses.

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
    """`torch.nn.Conv1d` with the options of `Conv2d`: `[n, in_channels, length] -> [n, out_channels, length]`.

    >>> import torch, blocksparse as bs
    >>> bs.nn.Conv1d(64, 96, 5, padding="same", density=0.5)(torch.randn(2, 64, 100)).shape
    torch.Size([2, 96, 100])
    """

    axes = 1
    function = staticmethod(ops.conv1d)


class Conv3d(_Conv):
    """`torch.nn.Conv3d` with the options of `Conv2d`: images are `[n, channels, depth, height, width]`.

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
        *,
        dilation: Ints = 1,
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
        """Compute the convolution. `output_size`, for the axes of space, determines `output_padding` if given."""
        return self.compute(input, self.bias, self.activation, output_size, gate)

    def compute(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: str | None,
        output_size: Sequence[int] | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Return activation(W * x + bias) for any bias and activation."""
        self._check(x)
        more = self.output_padding if output_size is None else self.output_padding_for(x, output_size)
        return self._convolve(x, bias, activation, padding=self.padding, output_padding=more, gate=gate)

    def output_padding_for(self, x: Tensor, output_size: Sequence[int]) -> tuple[int, ...]:
        """Return the padding that gives outputs of this size, as torch.nn.ConvTranspose2d does."""
        if not isinstance(output_size, Sequence) or not all(
            is_int(n) or isinstance(n, torch.SymInt) for n in output_size
        ):
            raise BlockSparseError.expected("output_size", f"an int for each of {self.axes} axes", repr(output_size))
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
        in_channels, out_channels, kernel_size: sizes; the module pads channels to multiples of the block.
        stride, padding, output_padding, dilation: as in torch.nn.ConvTranspose2d; dilation is given by name.
        layout: the stored blocks of the padded `[out_channels, in_channels]`.
        density, block_size, bias, activation, device, dtype: as for `Conv2d`, as is the initialisation.

    Shapes: `[n, in_channels, height, width] -> [n, out_channels, height, width]`, or both without n.

    Raises:
        BlockSparseError: as `Conv2d`; in the call, also for an impossible output_size.

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
    """`torch.nn.ConvTranspose1d` with the options of `ConvTranspose2d`.

    >>> import torch, blocksparse as bs
    >>> bs.nn.ConvTranspose1d(64, 96, 2, stride=2, density=0.5)(torch.randn(2, 64, 50)).shape
    torch.Size([2, 96, 100])
    """

    axes = 1
    function = staticmethod(ops.conv_transpose1d)


class ConvTranspose3d(_ConvTranspose):
    """`torch.nn.ConvTranspose3d` with the options of `ConvTranspose2d`.

    >>> import torch, blocksparse as bs
    >>> bs.nn.ConvTranspose3d(32, 64, 2, stride=2, density=0.5)(torch.randn(2, 32, 2, 4, 4)).shape
    torch.Size([2, 64, 4, 8, 8])
    """

    axes = 3
    function = staticmethod(ops.conv_transpose3d)


def margins(layer: Any) -> list[int]:
    """Return the margins for F.pad of a convolution, torch.nn's or ours: last axis first, before and after."""
    around: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            around += [total // 2, total - total // 2]
        else:
            around += [0 if layer.padding == "valid" else layer.padding[axis]] * 2
    return around
