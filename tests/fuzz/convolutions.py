"""Convolutions over one to three axes, transposed ones, and gradients of their values."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse import to_dense
from blocksparse.ops.conv import cpu, planes
from blocksparse.ops.conv.plan import Axis

from .calls import DTYPES, Calls, assert_within, exact_output, sum_bound
from .layouts import build_layout, draw_block, draw_layout, draw_options, normal, take_blocks, vary
from .memory import whole

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
SCATTER = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
WGRAD = {1: torch.nn.grad.conv1d_weight, 2: torch.nn.grad.conv2d_weight, 3: torch.nn.grad.conv3d_weight}


def draw(rng: Random) -> dict:
    dims = rng.choice((1, 2, 2, 3))
    block = draw_block(rng, (1, 2, 4, 8, 16, 32, 64), 100)
    return {
        "layout": draw_layout(rng, block, max(2000, block[0] * block[1]), 12),
        "images": rng.choice((0, 1, 1, 1, 2, 3)),
        "axes": [_draw_axis(rng, {1: 70, 2: 14, 3: 6}[dims]) for _ in range(dims)],
        "transpose": rng.random() < 0.5,
        **draw_options(rng),
    }


def _draw_axis(rng: Random, longest: int) -> list[int]:
    """Draw [input, output, kernel, stride, padding, dilation]; the input may end before or after the last position of
    the kernel.
    """
    kernel = rng.choice((1, 1, 2, 3, 3, 4, 5))
    stride, dilation = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 1, 2, 3))
    reach = dilation * (kernel - 1) + 1
    padding = rng.choice((0, 0, reach // 2, rng.randint(0, reach)))
    small = rng.choice((1, 2, rng.randint(1, longest)))
    exact = (small - 1) * stride + reach - 2 * padding
    more = rng.choice((0, 0, rng.randint(0, max(stride, dilation) - 1), rng.randint(-2, 2)))
    return [max(1, min(2 * longest, exact + more)), small, kernel, stride, padding, dilation]


def run(case: dict, numbers: np.random.Generator, calls: Calls) -> None:
    """Compare both directions of a convolution and its gradients with PyTorch's in float64."""
    layout, dtype, images = build_layout(case["layout"], numbers), DTYPES[case["dtype"]], case["images"]
    axes = [Axis(*axis) for axis in case["axes"]]
    big, small, kernel = ([getattr(axis, name) for axis in axes] for name in ("input", "output", "kernel"))
    transpose, kind, offset = case["transpose"], case["spread"], case["offset"]
    outs, ins = layout.shape[::-1] if transpose else layout.shape
    values = whole(vary(numbers, normal(numbers, *layout.values_shape, *kernel), kind), dtype, offset)
    bias = whole(normal(numbers, outs), dtype, offset) if case["bias"] else None
    threads, taps = case["threads"], int(np.prod(kernel))

    def image(space: list[int], channels: int) -> Tensor:
        return whole(vary(numbers, normal(numbers, images, *space, channels), kind), dtype, offset)

    weight = to_dense(values.double(), layout)
    weight = weight.transpose(0, 1) if transpose else weight
    for transposed in (False, True):
        x, size = image(small if transposed else big, ins), big if transposed else small
        # PyTorch's weight is [channels of the output image, channels of the input image].
        dense = weight.transpose(0, 1) if transposed else weight
        product = _convolve_transposed if transposed else _convolve
        exact = product(x.double(), dense, axes), product(x.double().abs(), dense.abs(), axes)
        expected, bound = exact_output(exact, bias, ins * taps, case["activation"], dtype)
        calls.on_each(
            f"conv {'transposed' if transposed else 'gather'}",
            dtype,
            lambda x=x, transposed=transposed: cpu.conv(
                x, values, bias, layout, transpose, transposed, axes, case["activation"]
            ),
            lambda y, expected=expected, bound=bound: assert_within(y, expected, bound),
            threads,
        )
        if planes.serves(in_planes(x), layout, axes) and values.isfinite().all():
            calls.on_each(
                f"conv planes {'transposed' if transposed else 'gather'}",
                dtype,
                lambda x=x, transposed=transposed: planes.conv(
                    in_planes(x), values, bias, layout, transpose, transposed, axes, case["activation"]
                ),
                lambda y, expected=expected, bound=bound: assert_within(y, expected, bound),
                threads,
            )
        grad, x = image(size, layout.shape[0]), image(small if transposed else big, layout.shape[1])
        small_one, big_one = (x, grad) if transposed else (grad, x)
        expected, terms = (
            take_blocks(_wgrad(a, b, axes).transpose(0, 1) if transposed else _wgrad(a, b, axes), layout)
            for a, b in ((small_one.double(), big_one.double()), (small_one.double().abs(), big_one.double().abs()))
        )
        bound = sum_bound(terms, images * int(np.prod(small)), dtype)
        calls.on_each(
            "conv wgrad",
            dtype,
            lambda x=x, grad=grad, transposed=transposed: cpu.conv_wgrad(grad, x, layout, transposed, axes),
            lambda got, expected=expected, bound=bound: assert_within(got, expected, bound),
            threads,
        )
        if planes.serves(in_planes(x), layout, axes):
            calls.on_each(
                "conv planes wgrad",
                dtype,
                lambda x=x, grad=grad, transposed=transposed: planes.conv_wgrad(
                    grad, in_planes(x), layout, transposed, axes
                ),
                lambda got, expected=expected, bound=bound: assert_within(got, expected, bound),
                threads,
            )


def in_planes(image: Tensor) -> Tensor:
    """Return an image `[n, *space, channels]` in memory where each channel is contiguous."""
    return whole(image.movedim(-1, 1).contiguous(), image.dtype, 0).movedim(1, -1)


def _covered_length(axis: Axis) -> int:
    """Return the number of input positions that the output covers, from -padding on."""
    return (axis.output - 1) * axis.stride + axis.dilation * (axis.kernel - 1) + 1


def _pad(image: Tensor, axes: list[Axis]) -> Tensor:
    """Return an input image, channels first, with exactly the covered positions."""
    pads = [pad for axis in reversed(axes) for pad in (axis.padding, _covered_length(axis) - axis.padding - axis.input)]
    return F.pad(image.movedim(-1, 1), pads)


def _stride_and_dilation(axes: list[Axis]) -> dict:
    return {name: [getattr(axis, name) for axis in axes] for name in ("stride", "dilation")}


def _convolve(x: Tensor, weight: Tensor, axes: list[Axis]) -> Tensor:
    if not x.numel():
        return x.new_zeros(0, *(axis.output for axis in axes), weight.shape[0])
    return CONV[len(axes)](_pad(x, axes), weight, **_stride_and_dilation(axes)).movedim(1, -1)


def _convolve_transposed(x: Tensor, weight: Tensor, axes: list[Axis]) -> Tensor:
    if not x.numel():
        return x.new_zeros(0, *(axis.input for axis in axes), weight.shape[1])
    y = SCATTER[len(axes)](x.movedim(-1, 1), weight, **_stride_and_dilation(axes))
    pads = [
        pad for axis in reversed(axes) for pad in (-axis.padding, axis.padding + axis.input - _covered_length(axis))
    ]
    return F.pad(y, pads).movedim(1, -1)


def _wgrad(small: Tensor, big: Tensor, axes: list[Axis]) -> Tensor:
    shape = small.shape[-1], big.shape[-1], *(axis.kernel for axis in axes)
    if not small.numel():
        return small.new_zeros(shape)
    return WGRAD[len(axes)](_pad(big, axes), shape, small.movedim(-1, 1), **_stride_and_dilation(axes))
