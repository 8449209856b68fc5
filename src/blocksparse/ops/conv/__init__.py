"""Convolutions over 1 to 3 axes that are block-sparse in their channels and dense over space, and their transposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...checked import is_int
from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..activations import ACTIVATIONS
from ..block_gate import apply_gate
from ..checks import autocast, check_activation, check_kinds, check_same, refuse_jit_trace
from ..linear import linear
from ..registry import can_bypass_dispatcher, needs_grad
from .op import CONV

__all__ = [
    "ACTIVATIONS",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "per_axis",
]

Ints = int | Sequence[int]
# How to move the channels of `[n, channels, *space]` to the end, and back.
_MOVES = {1: ((0, 2, 1), (0, 2, 1)), 2: ((0, 2, 3, 1), (0, 3, 1, 2)), 3: ((0, 2, 3, 4, 1), (0, 4, 1, 2, 3))}
_AXES = {1: "length", 2: "height, width", 3: "depth, height, width"}


def conv2d(
    x: Tensor,
    values: Tensor,
    layout: BlockLayout,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    activation: str | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.conv2d` with a weight that is block-sparse in its channels: activation(W * x + bias).

    Args:
        x: `[n, in_channels, height, width]`, or without n. Memory in `torch.channels_last` needs no copy; other
            memory is copied once, but not by a CPU with blocks of up to 8 channels and stride 1 in float32 or float64.
        values: `[nnz, block_out, block_in, kernel_height, kernel_width]`, the blocks of W in the order of `layout`. A
            GPU copies them in each call, unless the kernel axes come before the block axes in memory, as in
            `values.movedim((3, 4), (1, 2)).contiguous().movedim((1, 2), (3, 4))`.
        layout: which blocks of the `[out_channels, in_channels]` weight these are.
        bias: `[out_channels]` or None.
        stride, dilation: a positive int, or one per axis.
        padding: zeros around the image: an int of 0 or more, one per axis, a pair (before, behind) per axis, "valid"
            (none), or "same" (the output has the size of x, with stride 1; of an odd total, one more is behind the
            image than before it).
        activation: None, "relu", "gelu" (the exact one) or "silu"; fused into the kernel in inference.
        gate: `[nnz]`, a factor for each block, or None; blocks with gate 0 are skipped as in `linear`.

    All tensors have one device and one dtype out of float32, float64, bfloat16 and float16 (sums of 16-bit numbers are
    float32); under `torch.autocast` they are cast to its dtype first. The result can be differentiated any number of
    times in x, values, bias and gate; the gradient of `values` exists on the layout only. Time and memory grow with
    `nnz`: the image is never unfolded. On the CPU, bfloat16 numbers below 2^-126 in size count as 0, as in `linear`.

    Returns:
        `[n, out_channels, height, width]`, channels-last if x is. Outputs that no block reaches are activation(bias),
        or exactly 0.

    Raises:
        BlockSparseError: sizes do not fit the layout or each other, the kernel is larger than the padded image, dtypes
            or devices are mixed, the activation is unknown, or the gate is not finite (checked on the CPU only).

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.random((64, 128), block_size=32, density=0.5, seed=0)
        >>> values = torch.randn(*layout.values_shape, 3, 3, requires_grad=True)
        >>> y = bs.conv2d(torch.randn(2, 128, 28, 28), values, layout, stride=2, padding=1, activation="relu")
        >>> y.shape
        torch.Size([2, 64, 14, 14])
        >>> y.sum().backward()
        >>> values.grad.shape
        torch.Size([4, 32, 32, 3, 3])

    Source: the block-sparse convolution of Gray, Radford, Kingma, GPU Kernels for Block-Sparse Weights (2017).
    """
    return _conv(2, x, values, layout, bias, stride, padding, dilation, activation, gate)


def conv1d(
    x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None = None, stride: Ints = 1,
    padding: Ints | str = 0, dilation: Ints = 1, activation: str | None = None, gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`conv2d` over one axis: x is `[n, in_channels, length]`, values `[nnz, block_out, block_in, kernel]`.

    Arguments and errors are those of `conv2d`.

    >>> import torch, blocksparse as bs
    >>> layout = bs.patterns.dense((64, 128), block_size=32)
    >>> bs.conv1d(torch.randn(2, 128, 100), torch.randn(*layout.values_shape, 5), layout, padding="same").shape
    torch.Size([2, 64, 100])
    """
    return _conv(1, x, values, layout, bias, stride, padding, dilation, activation, gate)


def conv3d(
    x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None = None, stride: Ints = 1,
    padding: Ints | str = 0, dilation: Ints = 1, activation: str | None = None, gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`conv2d` over three axes: x is `[n, in_channels, depth, height, width]`.

    Arguments and errors are those of `conv2d`.

    >>> import torch, blocksparse as bs
    >>> layout = bs.patterns.dense((16, 32), block_size=16)
    >>> bs.conv3d(torch.randn(2, 32, 5, 6, 7), torch.randn(*layout.values_shape, 3, 3, 3), layout).shape
    torch.Size([2, 16, 3, 4, 5])
    """
    return _conv(3, x, values, layout, bias, stride, padding, dilation, activation, gate)


def conv_transpose2d(
    x: Tensor,
    values: Tensor,
    layout: BlockLayout,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    dilation: Ints = 1,
    activation: str | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.conv_transpose2d` with a weight that is block-sparse in its channels.

    Args:
        x: `[n, in_channels, height, width]`, or without n.
        values: `[nnz, block_out, block_in, kernel_height, kernel_width]`; out and in are those of this operation. (The
            weight of torch is `[in_channels, out_channels, ...]`: `to_dense(values, layout).transpose(0, 1)`.)
        layout: which blocks of the `[out_channels, in_channels]` weight these are.
        bias: `[out_channels]` or None.
        stride, padding, dilation: those of the convolution whose transpose this is.
        output_padding: additional rows and columns behind the image, fewer than the stride or the dilation.
        activation, gate: as in `conv2d`.

    Dtypes, devices, memory, autocast and gradients are those of `conv2d`.

    Returns:
        `[n, out_channels, height, width]` with height = (height of x - 1) * stride - 2 * padding
        + dilation * (kernel_height - 1) + output_padding + 1; the width likewise.

    Raises:
        BlockSparseError: as `conv2d`, or the output would be empty.

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.random((64, 128), block_size=32, density=0.5, seed=0)
        >>> values = torch.randn(*layout.values_shape, 4, 4)
        >>> bs.conv_transpose2d(torch.randn(2, 128, 14, 14), values, layout, stride=2, padding=1).shape
        torch.Size([2, 64, 28, 28])
    """
    return _conv(2, x, values, layout, bias, stride, padding, dilation, activation, gate, True, output_padding)


def conv_transpose1d(
    x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None = None, stride: Ints = 1,
    padding: Ints = 0, output_padding: Ints = 0, dilation: Ints = 1, activation: str | None = None,
    gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`conv_transpose2d` over one axis: x is `[n, in_channels, length]`.

    Arguments and errors are those of `conv_transpose2d`.

    >>> import torch, blocksparse as bs
    >>> layout = bs.patterns.dense((64, 128), block_size=32)
    >>> bs.conv_transpose1d(torch.randn(2, 128, 50), torch.randn(*layout.values_shape, 2), layout, stride=2).shape
    torch.Size([2, 64, 100])
    """
    return _conv(1, x, values, layout, bias, stride, padding, dilation, activation, gate, True, output_padding)


def conv_transpose3d(
    x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None = None, stride: Ints = 1,
    padding: Ints = 0, output_padding: Ints = 0, dilation: Ints = 1, activation: str | None = None,
    gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`conv_transpose2d` over three axes: x is `[n, in_channels, depth, height, width]`.

    Arguments and errors are those of `conv_transpose2d`.

    >>> import torch, blocksparse as bs
    >>> layout = bs.patterns.dense((16, 32), block_size=16)
    >>> bs.conv_transpose3d(torch.randn(2, 32, 3, 4, 5), torch.randn(*layout.values_shape, 3, 3, 3), layout).shape
    torch.Size([2, 16, 5, 6, 7])
    """
    return _conv(3, x, values, layout, bias, stride, padding, dilation, activation, gate, True, output_padding)


def _conv(
    dims: int, x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None, stride: Ints, padding: Ints | str,
    dilation: Ints, activation: str | None, gate: Tensor | None,
    transposed: bool = False, output_padding: Ints = 0,
) -> Tensor:  # fmt: skip
    """Check the arguments of every convolution and call the op on `[n, *space, channels]`."""
    direct = (
        gate is None
        and isinstance(layout, BlockLayout)
        and isinstance(x, Tensor)
        and isinstance(values, Tensor)
        and can_bypass_dispatcher(x, values, bias, plain_call=True)
    )
    if not direct:
        refuse_jit_trace("convolutions")
        check_kinds(layout, x=x, values=values, bias=bias, gate=gate)
        if gate is not None:
            values, layout = apply_gate(values, layout, gate)
        x, values, bias = autocast(x, values, bias)
    check_shapes(dims, x, values, layout, bias)
    check_same(x, values, bias)
    check_activation(activation, ACTIVATIONS)
    steps = per_axis("stride", stride, dims, least=1), per_axis("dilation", dilation, dims, least=1)
    batch = x if x.dim() == dims + 2 else x.unsqueeze(0)
    space, kernel = batch.shape[2:], values.shape[3:]
    if transposed:
        before = per_axis("padding", padding, dims, least=0)
        more = per_axis("output_padding", output_padding, dims, least=0)
        size = _transposed_size(space, kernel, *steps, before, more)
    else:
        before, size = output_size(space, kernel, *steps, padding)

    channels_last = is_channels_last(batch)
    last, first = _MOVES[dims]
    if direct and channels_last and x.is_cpu and _is_pointwise(space, size, kernel, steps[0], before):
        y = _pointwise(batch, values, layout, bias, activation)
    else:
        # The gradient of gelu and silu needs their input: unfused it is saved, fused it would be computed again.
        fused = activation if activation == "relu" or not needs_grad(x, values, bias) else None
        options = False, transposed, size, steps[0], before, steps[1], fused
        y = (CONV.direct if direct else CONV)((batch.permute(last), values, bias), layout, options)
        if fused != activation:
            y = ACTIVATIONS[activation](y)
        y = y.permute(first)
        if not channels_last:
            y = y.contiguous()
    return y if batch is x else y.squeeze(0)


def _is_pointwise(
    space: Sequence[int], size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], before: Sequence[int]
) -> bool:
    """Return whether each output is made of the one input at its position, which is a linear product."""
    return max(kernel) == max(stride) == 1 and max(before) == 0 and tuple(size) == tuple(space)


def _pointwise(x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None, activation: str | None) -> Tensor:
    """Return a convolution with one tap as a linear product. The op would do so too; its way takes longer."""
    rows = x.movedim(1, -1).reshape(-1, layout.shape[1])
    y = linear(rows, values.reshape(layout.values_shape), layout, bias, activation)
    return y.view(x.shape[0], *x.shape[2:], layout.shape[0]).movedim(-1, 1)


def is_channels_last(x: Tensor) -> bool:
    """Return whether the channels of `[n, channels, *space]` are contiguous."""
    # The memory of one-pixel images is both; as in torch, they count as not channels-last then.
    return x.stride(1) == 1 and not (x.shape[1] > 1 and x.is_contiguous())


def output_size(
    space: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], padding: Any
) -> tuple[list[int], list[int]]:
    """Return the padding before each axis and the size of the output; refuse kernels larger than the padded image."""
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    if isinstance(padding, str) and padding == "same":
        if any(s != 1 for s in stride):
            raise BlockSparseError.expected("stride", '1 for each axis with padding "same"', tuple(stride))
        return [(r - 1) // 2 for r in reach], list(space)
    if isinstance(padding, tuple | list) and padding and all(isinstance(pair, tuple | list) for pair in padding):
        if len(padding) != len(reach) or any(len(pair) != 2 for pair in padding):
            expected = f"a pair (before, behind) for each of {len(reach)} axes"
            raise BlockSparseError.expected("padding", expected, repr(padding))
        before, behind = (per_axis("padding", [pair[i] for pair in padding], len(reach), 0) for i in (0, 1))
    else:
        is_valid = isinstance(padding, str) and padding == "valid"
        before = [0] * len(reach) if is_valid else per_axis("padding", padding, len(reach), 0, names=True)
        behind = before
    size = []
    for n, r, s, p, q in zip(space, reach, stride, before, behind, strict=True):
        if n + p + q < r:
            kernels = f"kernel {tuple(kernel)} with dilation {tuple(dilation)}, padding {tuple(before)}"
            raise BlockSparseError.expected(
                "x", f"a padded image of at least the kernel's reach, {tuple(reach)} ({kernels})", tuple(space)
            )
        size.append((n + p + q - r) // s + 1)
    _check_size(size)
    return before, size


def _check_size(size: Sequence[int]) -> None:
    """Refuse an output of 2^31 positions or more along an axis; sizes that are open in a graph are not compared."""
    if any(isinstance(n, int) and n >= 2**31 for n in size):
        raise BlockSparseError.expected(
            "stride, padding, dilation", "an output of less than 2^31 positions per axis", list(size)
        )


def _transposed_size(
    space: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int],
    padding: Sequence[int], more: Sequence[int],
) -> list[int]:  # fmt: skip
    """Return the size of the output of a transposed convolution."""
    size = []
    for n, k, s, d, p, m in zip(space, kernel, stride, dilation, padding, more, strict=True):
        if m >= max(s, d):
            raise BlockSparseError.expected(
                "output_padding", f"less than the stride {tuple(stride)} or the dilation {tuple(dilation)}", tuple(more)
            )
        size.append((n - 1) * s - 2 * p + d * (k - 1) + m + 1)
        if size[-1] < 1:
            raise BlockSparseError.expected(
                "padding", f"a non-empty output from {tuple(space)} with kernel {tuple(kernel)}", tuple(padding)
            )
    _check_size(size)
    return size


def per_axis(name: str, value: Any, dims: int, least: int, names: bool = False) -> list[int]:
    """Return one int per axis from an int or a sequence; refuse ints below `least`."""
    ints = list(value) if isinstance(value, tuple | list) else [value]
    ints = ints * dims if len(ints) == 1 else ints
    if len(ints) == dims:
        for number in ints:
            if not (is_int(number) and least <= number < 2**31):
                break
        else:
            return [int(number) for number in ints]
    also = ', "same" or "valid"' if names else ""
    raise BlockSparseError.expected(
        name, f"an int, {least} or more and below 2^31, or {dims} of them{also}", repr(value)
    )


def check_shapes(dims: int, x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None) -> None:
    """Check that these are tensors of a convolution over `dims` axes on this layout."""
    out_channels, in_channels = layout.shape
    if x.dim() not in (dims + 1, dims + 2) or x.shape[-dims - 1] != in_channels:
        raise BlockSparseError.expected("x", f"[n, {in_channels}, {_AXES[dims]}] for {layout!r}", list(x.shape))
    if values.dim() != 3 + dims or tuple(values.shape[:3]) != layout.values_shape:
        shape = ", ".join(map(str, layout.values_shape))
        kernel = ", ".join(f"kernel {axis}" for axis in _AXES[dims].split(", "))
        raise BlockSparseError.expected("values", f"[{shape}, {kernel}] for {layout!r}", list(values.shape))
    if any(size == 0 for size in values.shape[3:]):
        raise BlockSparseError.expected("values", "a kernel with at least one tap per axis", list(values.shape))
    if any(size == 0 for size in x.shape[-dims:]):
        raise BlockSparseError.expected("x", "an image of at least one position per axis", list(x.shape))
    if bias is not None and tuple(bias.shape) != (out_channels,):
        raise BlockSparseError.expected("bias", f"[{out_channels}] for {layout!r}", list(bias.shape))
