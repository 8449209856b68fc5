"""Shift-equivariant downsampling of images, and its inverse."""

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
    """Adaptive polyphase sampling: for each image, the one of x[i::2, j::2], i and j in 0, 1, with the largest l2 norm.

    A shift of the image permutes and shifts the four candidates, so the selection follows it. In a network of
    convolutions with circular padding and a final mean over space, a circular shift does not change the output.

    Args:
        blur: the size of a binomial low-pass filter before sampling; 1, the default, for none. The candidate is
            selected on the input, not on the blurred image.

    Shapes: `forward(x, index=None)` maps `[n, channels, height, width]`, with even height and width, to
    `[n, channels, height / 2, width / 2]` and the selected index 2 i + j, int64 `[n]`. With an `index`, it uses that
    one, for example on the shortcut around a layer.

    Raises:
        BlockSparseError: the height or width is odd, x has other than 4 axes, the blur is not an int of 1 or more, or
            the index has another length.

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
        """Return (the image at half the size, the index of each image's phase).

        Without `index`, an image keeps the phase with the largest energy.
        """
        x = input
        _check_images(x)
        if x.shape[2] % STEP or x.shape[3] % STEP:
            raise BlockSparseError.expected("x", "an even height and width", list(x.shape))
        if index is None:
            # In float64, because the order of summation, which depends on the shift, must not change the selection.
            energy = torch.linalg.vector_norm(x.detach(), dim=1, keepdim=True, dtype=torch.float64).square()
            index = torch.stack([energy[phase].sum((1, 2, 3)) for phase in _PHASES], 1).argmax(1)
        _check_index(index, x)
        return _SelectPhase.apply(_blurred(x, self.blur), index), index  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return f"blur={self.blur}"


class AdaptivePolyphaseUpsample(nn.Module):
    """The inverse of `AdaptivePolyphaseDownsample`: pixels return to their positions, with zeros between them.

    Args:
        blur: the size of a binomial filter that fills the zeros; 1, the default, for none.

    Shapes: `forward(input, index)` maps `[n, channels, height, width]` and the index of the downsampling, int64 `[n]`,
    to `[n, channels, 2 height, 2 width]`.

    Raises:
        BlockSparseError: the input has other than 4 axes, the blur is not an int of 1 or more, or the index has another
            length.

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
        """Return the image at twice the size, with each pixel at its phase `index` and zeros between, then blurred."""
        _check_images(input)
        _check_index(index, input)
        x = _PlacePhase.apply(input, index)  # type: ignore[no-untyped-call]
        # The filter's weights sum to 1, but only a quarter of the pixels is not 0.
        return x if self.blur == 1 else STEP * STEP * _blurred(x, self.blur)

    def extra_repr(self) -> str:
        return f"blur={self.blur}"


# The slices of the four candidates (::2, ::2), (::2, 1::2), ...
_PHASES = [(..., slice(i, None, STEP), slice(j, None, STEP)) for i in range(STEP) for j in range(STEP)]


class _SelectPhase(torch.autograd.Function):
    """The selection of one of four candidates of each image, the adjoint of `_PlacePhase`.

    Autograd's gradient would lose the channels-last memory format, which would slow down all layers before this one.
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
        return _PlacePhase.apply(grads[0], *ctx.saved_tensors), None  # type: ignore[no-untyped-call]


class _PlacePhase(torch.autograd.Function):
    """The placement of each image at the pixels of its candidate in an image of twice the size, 0 at other pixels."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, index: Tensor) -> Tensor:
        n, channels, height, width = y.shape
        if not torch.compiler.is_compiling() and (_is_batched(y) or _is_batched(index)):
            # Batched tensors hide their memory format, and cannot be written to a tensor that is not batched.
            phases = [torch.where((index == number).view(-1, 1, 1, 1), y, 0) for number in range(len(_PHASES))]
            lines = [torch.stack(phases[at : at + STEP], -1) for at in range(0, len(phases), STEP)]
            return torch.stack(lines, 3).reshape(n, channels, STEP * height, STEP * width)
        is_last = y.is_contiguous(memory_format=torch.channels_last)
        format = torch.channels_last if is_last else torch.contiguous_format
        x = torch.empty(n, channels, STEP * height, STEP * width, dtype=y.dtype, device=y.device, memory_format=format)
        for number, phase in enumerate(_PHASES):
            x[phase] = torch.where((index == number).view(-1, 1, 1, 1), y, 0)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _SelectPhase.apply(grads[0], *ctx.saved_tensors), None  # type: ignore[no-untyped-call]


def _is_batched(tensor: Tensor) -> bool:
    """Return whether vmap, or the older one of `is_grads_batched`, has batched the tensor."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


def _blurred(x: Tensor, size: int) -> Tensor:
    """Return x after a binomial filter with circular padding."""
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
    """Raise a BlockSparseError unless x has the shape of images."""
    if not isinstance(x, Tensor) or x.dim() != 4:
        raise BlockSparseError.expected("x", "a tensor [n, channels, height, width]", shape_of(x))


def _check_index(index: Tensor, x: Tensor) -> None:
    """Raise a BlockSparseError unless there is an int64 index for each image."""
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or list(index.shape) != [len(x)]:
        got = f"{index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        raise BlockSparseError.expected("index", f"int64 [{len(x)}], one for each image", got)
