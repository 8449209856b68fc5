"""A gain and a bias for the border of a convolution's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checked import shape_of
from ..errors import BlockSparseError
from ..ops.conv import per_axis
from ..ops.conv.plan import Axis, runs

Ints = int | Sequence[int]


class EdgeBias(nn.Module):
    """A gain and a bias per channel for each border pattern of a convolution: y * gain + bias.

    At the border, where some taps of the kernel are outside the image, outputs are sums of fewer terms. Positions
    without the same taps share a pattern: a 3x3 kernel with padding 1 has eight, four sides and four corners. Each
    pattern has a gain, initially 1, and a bias, initially 0. Positions with all taps are unchanged.

    Args:
        channels: the number of channels of y.
        size: the size of the convolution's input, one int for each of its 1 to 3 axes of space.
        kernel_size, stride, padding, dilation: of the convolution.
        device, dtype: of the parameters.

    Shapes: `[n, channels, *output size]` to the same; gain and bias are `[patterns, channels]`.

    Raises:
        BlockSparseError: the kernel is larger than the padded image; in the call, y has another size.

    Example:
        >>> import torch, blocksparse as bs
        >>> conv = bs.nn.Conv2d(32, 64, 3, padding=1, density=0.5)
        >>> edge = bs.nn.EdgeBias(64, (14, 14), kernel_size=3, padding=1)
        >>> edge(conv(torch.randn(2, 32, 14, 14))).shape, edge.gain.shape
        (torch.Size([2, 64, 14, 14]), torch.Size([8, 64]))

    Source: ConvEdgeBias of openai/blocksparse (2017).
    """

    pattern: Tensor

    def __init__(
        self,
        channels: int,
        size: Sequence[int],
        kernel_size: Ints,
        stride: Ints = 1,
        padding: Ints = 0,
        dilation: Ints = 1,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not isinstance(size, tuple | list) or not 1 <= len(size) <= 3:
            raise BlockSparseError.expected("size", "the sizes of 1 to 3 axes of space", repr(size))
        (channels,) = per_axis("channels", channels, 1, least=1)
        self.channels, self.size = channels, tuple(per_axis("size", size, len(size), least=1))
        steps = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
        per_axes = [per_axis(name, value, len(size), least=int(name != "padding")) for name, value in steps.items()]
        kinds = [_missing_taps(*axis) for axis in zip(self.size, *per_axes, strict=True)]
        # Combine the numbers along all axes to one number per position; it is 0 if no tap is missing.
        code = np.zeros((), dtype=np.int64)
        for kind in kinds:
            code = code[..., None] * (kind.max() + 1) + kind
        codes, pattern = np.unique(np.append(code, 0), return_inverse=True)
        self.register_buffer("pattern", torch.from_numpy(pattern[:-1].reshape(code.shape)).to(device), persistent=False)
        options = {"device": device, "dtype": dtype}
        self.gain = nn.Parameter(torch.ones(len(codes) - 1, channels, **options))
        self.bias = nn.Parameter(torch.zeros(len(codes) - 1, channels, **options))

    def forward(self, input: Tensor) -> Tensor:
        """Return input * gain + bias, with a gain and bias for each pattern of positions at the edges."""
        y, expected = input, (self.channels, *self.pattern.shape)
        axes = len(expected)
        if not isinstance(y, Tensor) or y.dim() not in (axes, axes + 1) or tuple(y.shape[-axes:]) != expected:
            sizes = ", ".join(map(str, expected))
            raise BlockSparseError.expected("input", f"[n, {sizes}] or [{sizes}]", shape_of(y))
        gain = torch.cat([self.gain.new_ones(1, self.channels), self.gain])[self.pattern].movedim(-1, 0)
        bias = torch.cat([self.bias.new_zeros(1, self.channels), self.bias])[self.pattern].movedim(-1, 0)
        return y * gain.to(y.dtype) + bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{self.channels}, size={self.size}, patterns={self.gain.shape[0]}"


def _missing_taps(size: int, kernel: int, stride: int, padding: int, dilation: int) -> np.ndarray:
    """Return for each output along an axis a number of its set of missing taps, 0 if none is missing."""
    reach = dilation * (kernel - 1) + 1
    if size + 2 * padding < reach:
        raise BlockSparseError.expected("size", f"{reach - 2 * padding} or more for the kernel's reach {reach}", size)
    output = (size + 2 * padding - reach) // stride + 1
    plan = runs(Axis(size, output, kernel, stride, padding, dilation), transposed=False, cut=True)
    kinds = {frozenset(range(kernel)): 0}
    kind = np.zeros(output, dtype=np.int64)
    for i, (first, count) in enumerate(zip(plan.first, plan.count, strict=True)):
        taps = frozenset(plan.tap[plan.tap_start[i] : plan.tap_start[i + 1]].tolist())
        kind[first : first + count] = kinds.setdefault(taps, len(kinds))
    return kind
