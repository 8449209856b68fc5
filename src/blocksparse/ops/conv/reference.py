"""The definition of the convolutions in plain PyTorch: one linear product per tap."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...layout import BlockLayout
from ..activations import ACTIVATIONS
from ..checks import accumulator
from ..linear import definition as linear
from .plan import Axis

unsupported_reason = linear.unsupported_reason
Slices = tuple[slice, ...]


def conv(
    x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, layout: BlockLayout, transpose: bool,
    transposed: bool, axes: Sequence[Axis], activation: str | None,
) -> torch.Tensor:  # fmt: skip
    """Return activation(W * x + bias), `[n, *space, in] -> [n, *space, out]`.

    With `transposed` this is the transposed convolution. With `transpose`, inputs and outputs of W are exchanged.
    """
    dtype, wide = x.dtype, accumulator(x.dtype)
    x, values = x.to(wide), values.to(wide)
    out_channels = layout.shape[1 if transpose else 0]
    y = x.new_zeros(x.shape[0], *(axis.input if transposed else axis.output for axis in axes), out_channels)
    for tap, output, input in taps_of(axes):
        outputs, inputs = (input, output) if transposed else (output, input)
        part = x[inputs]
        product = linear.linear(part.reshape(-1, part.shape[-1]), values[tap], None, layout, transpose, None)
        y[outputs] += product.reshape(*part.shape[:-1], out_channels)
    if bias is not None:
        y = y + bias.to(wide)
    return ACTIVATIONS[activation](y).to(dtype)


def conv_wgrad(
    grad: torch.Tensor, x: torch.Tensor, layout: BlockLayout, transposed: bool, axes: Sequence[Axis]
) -> torch.Tensor:
    """Return the gradient of the stored blocks, `[nnz, block_out, block_in, *kernel]`.

    grad is `[n, *space, out]`, x `[n, *space, in]`. The input of the convolution is x, or with `transposed` grad.
    """
    wide = accumulator(x.dtype)
    kernel = [axis.kernel for axis in axes]
    values = torch.zeros(*layout.values_shape, *kernel, dtype=wide, device=x.device)
    for tap, output, input in taps_of(axes):
        left, right = (grad[input], x[output]) if transposed else (grad[output], x[input])
        left, right = left.reshape(-1, grad.shape[-1]), right.reshape(-1, x.shape[-1])
        values[tap] = linear.linear_wgrad(left.to(wide), right.to(wide), layout)
    return values.to(x.dtype)


def taps_of(axes: Sequence[Axis]) -> Iterator[tuple[tuple[Any, ...], Slices, Slices]]:
    """Yield for each tap that meets the image its index into the values, and slices of the output and the input."""
    for tap in itertools.product(*(range(axis.kernel) for axis in axes)):
        output, input = [slice(None)], [slice(None)]
        for axis, t in zip(axes, tap, strict=True):
            count, first_output, first_input = axis.tap(t)
            output.append(slice(first_output, first_output + count))
            input.append(
                slice(first_input, first_input + (count - 1) * axis.stride + 1, axis.stride) if count else slice(0)
            )
        if all(place.start is None or place.start < place.stop for place in output):
            yield (..., *tap), tuple(output), tuple(input)
