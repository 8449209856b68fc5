"""The convolutions in 8 bits as an operation, for inference."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...layout import BlockLayout
from ..conv.plan import axes_of
from ..int8_linear import Int8Op
from ..registry import Geometry, Options, features_of, image_block
from . import cpu, reference


class Int8Conv(Int8Op):
    """activation(W * x + bias) of images `[n, *space, channels]`. It has no gradient.

    Its tensors are x, values, scales and bias, its options size, stride, padding, dilation and activation.
    """

    def geometry(self, tensors: Any, nnz: int, grid: tuple[int, int], options: Options) -> Geometry:
        (x, values, *_), (size, *_, activation) = tensors, options
        block = image_block(x, values, size, activation)
        out, in_ = features_of(grid, block)
        shapes = [(*x.shape[:-1], in_), (nnz, *block, *values.shape[3:]), (nnz, block[0]), (out,)]
        return Geometry(block, shapes, (x.shape[0], *size, out))

    def compute(self, tensors: Any, layout: BlockLayout, options: Options) -> Tensor:
        (x, values, *_), (size, *steps, activation) = tensors, options
        axes = axes_of(x.shape[1:-1], size, values.shape[3:], *steps)
        result: Tensor = self.on(x.device, x.dtype).int8_conv(*tensors, layout, axes, activation)
        return result


INT8_CONV = Int8Conv(
    "int8_conv",
    "Tensor x, Tensor values, Tensor scales, Tensor? bias",
    "SymInt[] size, SymInt[] stride, SymInt[] padding, SymInt[] dilation, str? activation",
    cpu,
    reference,
    fallback=reference,
)
