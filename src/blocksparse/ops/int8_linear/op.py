"""The linear product in 8 bits as an operation, for inference."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..checks import check_tangents
from ..registry import Geometry, LayoutOp, Options, Tensors, features_of, matrix_block
from . import cpu, reference
from .cpu import MAX_INPUTS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Int8Op(LayoutOp):
    """An operation on int8 values with float32 scales. It has no gradient."""

    dtypes = MappingProxyType({"values": torch.int8, "scales": torch.float32})

    def direct(self, tensors: Tensors, layout: BlockLayout, options: Options = ()) -> Tensor:
        return self.compute(tensors, layout, options)  # the public function has refused tensors that need a gradient


class Int8Linear(Int8Op):
    """activation(x W^T + bias) with tensors x, values, scales, bias and option activation. It has no gradient."""

    def geometry(self, tensors: Any, nnz: int, grid: tuple[int, int], options: Options) -> Geometry:
        (x, values, *_), (activation,) = tensors, options
        block = matrix_block(x, values, activation)
        out, in_ = features_of(grid, block)
        return Geometry(block, [(x.shape[0], in_), (nnz, *block), (nnz, block[0]), (out,)], (x.shape[0], out))


# The definition serves other devices than the CPU.
INT8_LINEAR = Int8Linear(
    "int8_linear",
    "Tensor x, Tensor values, Tensor scales, Tensor? bias",
    "str? activation",
    cpu,
    reference,
    fallback=reference,
)


def check_operands(
    x: Tensor, values: Tensor, scales: Tensor, layout: BlockLayout, bias: Tensor | None, shape: tuple[int, ...]
) -> None:
    """Check the tensors of a product in 8 bits, whose values have this shape."""
    if x.dtype not in DTYPES:
        raise BlockSparseError.expected("x", f"one of {', '.join(map(str, DTYPES))}", x.dtype)
    if bias is not None and bias.dtype in DTYPES and bias.dtype != x.dtype:
        raise BlockSparseError.expected("x", f"{bias.dtype}, as the bias (or cast the model)", x.dtype)
    check_inference(x=x, bias=bias)
    if math.prod(shape[2:]) > MAX_INPUTS:
        raise BlockSparseError.expected("layout", f"blocks of at most {MAX_INPUTS} inputs", repr(layout))
    for name, tensor, size, dtype in (
        ("values", values, shape, torch.int8),
        ("scales", scales, shape[:2], torch.float32),
        ("bias", bias, (layout.shape[0],), x.dtype),
    ):
        if tensor is not None and (tensor.shape != size or tensor.dtype != dtype or tensor.device != x.device):
            expected, got = f"{list(size)}, {dtype}, on {x.device}", f"{list(tensor.shape)}, {tensor.dtype}"
            raise BlockSparseError.expected(name, expected, f"{got}, on {tensor.device}")


def check_inference(**tensors: Tensor | None) -> None:
    """Refuse tensors that require a gradient."""
    check_tangents(**tensors)  # also inside transforms
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors.values()):
        names = " and ".join(tensors)
        expected = "tensors without gradients (int8 is for inference): use torch.no_grad()"
        raise BlockSparseError.expected(names, expected, "requires_grad")
