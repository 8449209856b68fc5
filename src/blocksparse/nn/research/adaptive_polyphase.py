"""Down-sampling that follows an image when it is shifted, and its inverse."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...checked import integer, shape_of
from ...errors import BlockSparseError
from .circular import circular_pad

STEP = 2


class AdaptivePolyphaseDownsample(nn.Module):
    """Adaptive polyphase sampling: of the four images x[i::2, j::2] the one with the largest l2 norm, for each sample.

    A shift of the image permutes the four and shifts them, so that the choice goes along with it: between convolutions
    with circular padding, and before a mean over space, nothing of a circular shift is left in the output.

    Args:
        blur: the size of a binomial low-pass filter that is applied before; 1 for none. The choice is made on what
            comes in, not on what is blurred.

    Shapes: `[n, channels, height, width]`, both even, to `[n, channels, height / 2, width / 2]`. `forward(x, index)`
    returns that and the index, int64 `[n]`, 2 i + j; given one, as to the shortcut around a layer that has chosen, it
    takes that.

    Raises:
        BlockSparseError: an odd height or width, another number of axes, a blur that is no int from 1 on, an index of
            another length.

    Example:
        >>> import torch, blocksparse as bs
        >>> down = bs.nn.AdaptivePolyphaseDownsample()
        >>> x = torch.randn(4, 3, 8, 8)
        >>> y, index = down(x)
        >>> shifted, _ = down(x.roll((1, 1), dims=(2, 3)))
        >>> torch.equal(shifted.sum((2, 3)).argmax(1), y.sum((2, 3)).argmax(1)), y.shape
        (True, torch.Size([4, 3, 4, 4]))
        >>> shortcut, _ = down(x.square(), index)

    Source: Chaman, Dokmanic, Truly shift-invariant convolutional neural networks (2021).
    """

    def __init__(self, blur: int = 1):
        super().__init__()
        self.blur = integer("blur", blur, 1)

    def forward(self, input: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = input
        _check_images(x)
        if x.shape[2] % STEP or x.shape[3] % STEP:
            raise BlockSparseError.expected("x", "an even height and width", list(x.shape))
        if index is None:
            # In double, so that the order of summation, which changes with the shift, does not decide between the four.
            energy = torch.linalg.vector_norm(x.detach(), dim=1, keepdim=True, dtype=torch.float64).square()
            index = torch.stack([energy[phase].sum((1, 2, 3)) for phase in _PHASES], 1).argmax(1)
        _check_index(index, x)
        return _Take.apply(_blurred(x, self.blur), index), index  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return f"blur={self.blur}"


class AdaptivePolyphaseUpsample(nn.Module):
    """The inverse of `AdaptivePolyphaseDownsample`: an image goes back to the places that it was taken from.

    Args:
        blur: the size of a binomial filter that fills the zeros between; 1 for none.

    Shapes: `forward(input, index)` takes `[n, channels, height, width]` and the index, int64 `[n]`, of the
    down-sampling; returns `[n, channels, 2 height, 2 width]`.

    Raises:
        BlockSparseError: another number of axes, a blur that is no int from 1 on, an index of another length.

    Example:
        >>> import torch, blocksparse as bs
        >>> down, up = bs.nn.AdaptivePolyphaseDownsample(), bs.nn.AdaptivePolyphaseUpsample()
        >>> y, index = down(torch.randn(2, 1, 6, 6))
        >>> again, _ = down(up(y, index), index)
        >>> torch.equal(again, y)
        True

    Source: Chaman, Dokmanic, Truly shift-equivariant convolutional neural networks with adaptive polyphase upsampling
    (2021).
    """

    def __init__(self, blur: int = 1):
        super().__init__()
        self.blur = integer("blur", blur, 1)

    def forward(self, input: Tensor, index: Tensor) -> Tensor:
        _check_images(input)
        _check_index(index, input)
        x = _Place.apply(input, index)  # type: ignore[no-untyped-call]
        # The filter's weights sum to 1, a quarter of which meets pixels that are not 0.
        return x if self.blur == 1 else STEP * STEP * _blurred(x, self.blur)

    def extra_repr(self) -> str:
        return f"blur={self.blur}"


# The slices of the four images (::2, ::2), (::2, 1::2), ...
_PHASES = [(..., slice(i, None, STEP), slice(j, None, STEP)) for i in range(STEP) for j in range(STEP)]


class _Take(torch.autograd.Function):
    """Of each image that of its four which the index says: the adjoint of `_Place`.

    By autograd, a gradient would not lie as the image does, channels last: all that follows would take longer.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        first, *others = (x[phase] for phase in _PHASES)
        for number, image in enumerate(others, start=1):
            first = torch.where((index == number).view(-1, 1, 1, 1), image, first)
        return first

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Place.apply(grads[0], *ctx.saved_tensors), None  # type: ignore[no-untyped-call]


class _Place(torch.autograd.Function):
    """An image of twice the height and width with each pixel where `_Take` takes it from, and 0 elsewhere."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, index: Tensor) -> Tensor:
        n, channels, height, width = y.shape
        if not torch.compiler.is_compiling() and (_is_batched(y) or _is_batched(index)):
            # These say nothing of their memory format, and cannot be written into a tensor that is not batched.
            four = [torch.where((index == number).view(-1, 1, 1, 1), y, 0) for number in range(len(_PHASES))]
            lines = [torch.stack(four[at : at + STEP], -1) for at in range(0, len(four), STEP)]
            return torch.stack(lines, 3).reshape(n, channels, STEP * height, STEP * width)
        last = y.is_contiguous(memory_format=torch.channels_last)
        lies = torch.channels_last if last else torch.contiguous_format
        x = torch.empty(n, channels, STEP * height, STEP * width, dtype=y.dtype, device=y.device, memory_format=lies)
        for number, phase in enumerate(_PHASES):
            x[phase] = torch.where((index == number).view(-1, 1, 1, 1), y, 0)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Take.apply(grads[0], *ctx.saved_tensors), None  # type: ignore[no-untyped-call]


def _is_batched(tensor: Tensor) -> bool:
    """By vmap, or by the older one of `is_grads_batched`."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


def _blurred(x: Tensor, size: int) -> Tensor:
    """x under a binomial filter, as if it were repeated all around."""
    if size == 1:
        return x
    line = torch.ones(1, dtype=x.dtype, device=x.device)
    for _ in range(size - 1):
        line = (F.pad(line, (1, 0)) + F.pad(line, (0, 1))) / 2
    before, after = (size - 1) // 2, size // 2
    for axis in (2, 3):
        margin = [before, after, 0, 0] if axis == 3 else [0, 0, before, after]
        kernel = line.view(1, 1, -1, 1) if axis == 2 else line.view(1, 1, 1, -1)
        kernel = kernel.expand(x.shape[1], -1, -1, -1)
        x = F.conv2d(circular_pad(x, margin), kernel, groups=x.shape[1])
    return x


def _check_images(x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dim() != 4:
        raise BlockSparseError.expected("x", "a tensor [n, channels, height, width]", shape_of(x))


def _check_index(index: Tensor, x: Tensor) -> None:
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or list(index.shape) != [len(x)]:
        got = f"{index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        raise BlockSparseError.expected("index", f"int64 [{len(x)}], one for each image", got)
