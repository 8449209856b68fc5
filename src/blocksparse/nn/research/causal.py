"""Causal convolutions over images, whose outputs depend on no later pixel in reading order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import BlockSparseError
from ..layout_module import LayoutModule
from ..weight_norm import WeightNorm

SHIFTS = ("down", "down_right")


class _Banded(nn.Module):
    """A layer that needs `rows` rows above its image: zeros, or the last rows of the previous band (see `bands`)."""

    def __init__(self, rows: int):
        super().__init__()
        self.rows = rows
        self.in_bands = False
        self.above: Tensor | None = None
        self.seen: Tensor | None = None

    def _extended(self, x: Tensor, left: int = 0, right: int = 0) -> Tensor:
        """Pad x with `rows` rows above and with columns of zeros at its sides.

        The rows are zeros, or in bands the last rows of the previous band. In bands, record the last rows of this one.
        """
        if self.in_bands and self.rows:
            # A band can have fewer rows than the next band needs.
            x = F.pad(x, (0, 0, self.rows, 0)) if self.above is None else torch.cat([self.above, x], 2)
            self.seen = x[:, :, x.shape[2] - self.rows :]
            return F.pad(x, (left, right))
        # F.pad with no margins would copy.
        return F.pad(x, (left, right, self.rows, 0)) if left or right or self.rows else x


class Causal2d(_Banded):
    """A 2-d convolution whose outputs depend on no pixel after their own position.

    Args:
        module: a Conv2d without padding, block-sparse or of torch.nn, or a `WeightNorm` of one.
        shift: "down": an output depends on its row and rows above, equally far to the left and right, so the kernel's
            width must be odd. "down_right": an output depends on its row and rows above, on its column and columns to
            the left.

    Shapes: `[n, channels, height, width]`; the output has the same size at stride 1, half of it at stride 2.

    Raises:
        BlockSparseError: the module or the shift is of another kind, or the width is even with "down".

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Causal2d(bs.nn.Conv2d(8, 8, (2, 2), block_size=4, density=0.5), "down_right")
        >>> x = torch.randn(1, 8, 5, 5, requires_grad=True)
        >>> layer(x)[0, :, 2, 2].sum().backward()
        >>> x.grad[0].abs().amax(0).gt(0).nonzero().tolist()
        [[1, 1], [1, 2], [2, 1], [2, 2]]

    Source: van den Oord, Kalchbrenner, Kavukcuoglu, Pixel recurrent neural networks (2016); Salimans et al.,
    PixelCNN++ (2017).
    """

    def __init__(self, module: nn.Module, shift: str):
        if shift not in SHIFTS:
            raise BlockSparseError.expected("shift", f"one of {', '.join(SHIFTS)}", repr(shift))
        conv: Any = module.module if isinstance(module, WeightNorm) else module
        kernel: tuple[int, ...]
        kernel, padding = getattr(conv, "kernel_size", ()), getattr(conv, "padding", None)
        is_convolution = isinstance(conv, nn.Conv2d | LayoutModule) and not getattr(conv, "_transposed", False)
        if not is_convolution or len(kernel) != 2 or padding not in ((0, 0), "valid"):
            raise BlockSparseError.expected("module", "a Conv2d without padding", repr(module))
        if shift == "down" and kernel[1] % 2 == 0:
            raise BlockSparseError.expected("module", 'a kernel of odd width with "down"', repr(module))
        above, beside = (step * (size - 1) for step, size in zip(conv.dilation, kernel, strict=True))
        super().__init__(above)
        self.module, self.shift = module, shift
        self.sides = (beside // 2, beside // 2) if shift == "down" else (beside, 0)

    @property
    def _fuses_padding(self) -> bool:
        """Whether the module accepts margins; functions such as `densify` replace the module."""
        conv = self.module.module if isinstance(self.module, WeightNorm) else self.module
        return getattr(conv, "accepts_margins", False)

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor
        if self._fuses_padding and not self.in_bands:
            y = self.module(input, margins=((self.rows, 0), self.sides))
        else:
            y = self.module(self._extended(input, *self.sides))
        return y

    def extra_repr(self) -> str:
        return self.shift


class Shift2d(_Banded):
    """A shift of images by one pixel, down or to the right, with zeros at the border.

    Args:
        direction: "down" or "right".

    Raises:
        BlockSparseError: the direction is another one.

    >>> import torch, blocksparse as bs
    >>> bs.nn.Shift2d("down")(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]))
    tensor([[[[0., 0.],
              [1., 2.]]]])
    """

    def __init__(self, direction: str):
        if direction not in ("down", "right"):
            raise BlockSparseError.expected("direction", "down or right", repr(direction))
        super().__init__(int(direction == "down"))
        self.direction = direction

    def forward(self, input: Tensor) -> Tensor:
        height, width = input.shape[2:]
        return self._extended(input, left=int(self.direction == "right"))[:, :, :height, :width]

    def extra_repr(self) -> str:
        return self.direction


class Bands:
    """The handle that `bands` yields, to mark the end of each band."""

    def __init__(self, layers: list[_Banded]):
        self._layers = layers

    def next(self) -> None:
        """Complete the last band: the next call is for the rows below."""
        for layer in self._layers:
            # A copy, so that the band's memory can be freed.
            layer.above = None if layer.seen is None else layer.seen.clone()


@contextmanager
def bands(model: nn.Module) -> Iterator[Bands]:
    """Compute a model of causal convolutions on bands of rows, with the results of the whole image.

    Call the model on a band, repeatedly if its pixels change; then call `next` and go to the band below. Each layer
    stores the last rows of the previous band, so the cost of a call is that of its rows. The height of a band must be
    divisible by all strides.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.Causal2d(torch.nn.Conv2d(1, 1, (2, 3)), "down")
    >>> x = torch.randn(1, 1, 6, 5)
    >>> with torch.no_grad(), bs.nn.bands(layer) as below:
    ...     first = layer(x[:, :, :2])
    ...     below.next()
    ...     rest = layer(x[:, :, 2:])
    >>> torch.allclose(torch.cat([first, rest], 2), layer(x), atol=1e-6)
    True
    """
    layers = [module for module in model.modules() if isinstance(module, _Banded)]
    try:
        for layer in layers:
            layer.in_bands = True
        yield Bands(layers)
    finally:
        for layer in layers:
            layer.in_bands, layer.above, layer.seen = False, None, None
