"""The block-sparse linear product in 8 bits: weights rounded beforehand, inputs token by token."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..activations import ACTIVATIONS
from ..checks import check_activation, check_kinds, check_tangents
from ..registry import LIBRARY, Op, each_entry, is_eager, layout_of
from . import cpu, reference

__all__ = ["INT8_LINEAR", "check_inference", "int8_linear", "quantized"]

# The definition serves other devices.
INT8_LINEAR = Op("int8_linear", cpu, reference, elsewhere=reference)
# Sums of 8-bit products of this many inputs fit int32.
MAX_INPUTS = 1 << 16
NEGLIGIBLE = reference.NEGLIGIBLE
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds values `[nnz, block_out, block_in, *kernel]` to int8, with a scale for each output of a block.

    Returns:
        int8 values of the same shape, of -127 to 127, and float32 scales `[nnz, block_out]`: their product is within
        half a scale of the values; 0 where no number of an output is above 1e-36.

    Raises:
        BlockSparseError: values that are not finite.

    >>> import torch
    >>> quantized(torch.tensor([[[1.0, -0.5], [0.0, 0.0]]]))[0]
    tensor([[[127, -64],
             [  0,   0]]], dtype=torch.int8)
    """
    if values.is_meta or not values.isfinite().all():
        raise BlockSparseError.expected("values", "finite numbers", "others, or none on the meta device")
    values = values.detach().float()
    largest = values.flatten(2).abs().amax(-1)[(..., *[None] * (values.dim() - 2))]
    factor = torch.where(largest > NEGLIGIBLE, 127 / largest, 0)
    scales = torch.where(largest > NEGLIGIBLE, largest / 127, 0)
    return (values * factor).round_().clamp_(-127, 127).to(torch.int8), scales.flatten(1)


def int8_linear(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    layout: BlockLayout,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """activation(x W^T + bias) with W and x in 8 bits, for inference.

    Each token of x is rounded to 255 steps between plus and minus its largest number ("dynamic" quantization; tokens
    without a number above 1e-36 count as 0); products of a block are summed up exactly, then scaled and summed up in
    float32.

    Args:
        x: `[..., in_features]`, float32, bfloat16 or float16, any strides.
        values, scales: as `quantized` gives them, for the blocks of `layout`.
        layout: which blocks of the `[out_features, in_features]` weight these are; blocks of up to 65,536 inputs.
        bias: `[out_features]` of x's dtype, or None.
        activation: None, "relu", "gelu" (the exact one) or "silu".

    Returns:
        `[..., out_features]`, of x's dtype, without gradients. Tokens with a number that is not finite give NaN.

    Raises:
        BlockSparseError: other dtypes, devices or sizes; x that wants a gradient.

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.random((64, 128), block_size=32, density=0.5, seed=0)
        >>> x, values = torch.randn(10, 128), torch.randn(layout.values_shape)
        >>> y, rounded = bs.linear(x, values, layout), int8_linear(x, *quantized(values), layout)
        >>> ((y - rounded).norm() / y.norm()).item() < 0.02
        True
    """
    check_kinds(layout, x=x, values=values, scales=scales, bias=bias)
    check_activation(activation, ACTIVATIONS)
    out_features, in_features = layout.shape
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise BlockSparseError.expected("x", f"[..., {in_features}] for {layout!r}", list(x.shape))
    check_operands(x, values, scales, layout, bias, layout.values_shape)
    flat = (x if x.dim() == 2 else x.reshape(-1, in_features)).resolve_neg()
    if is_eager(flat, values, scales, bias):
        y: Tensor = INT8_LINEAR.on(x.device, x.dtype).int8_linear(flat, values, scales, layout, bias, activation)
    else:
        crow, col = layout.indices_on(x.device)
        y = _op(flat, values, scales, bias, crow, col, layout.grid[1], activation)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], out_features)


def check_operands(
    x: Tensor, values: Tensor, scales: Tensor, layout: BlockLayout, bias: Tensor | None, shape: tuple[int, ...]
) -> None:
    """Raises a BlockSparseError unless these are operands of a product in 8 bits, with values of this shape."""
    if x.dtype not in DTYPES:
        raise BlockSparseError.expected("x", f"one of {', '.join(map(str, DTYPES))}", x.dtype)
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
    """Raises a BlockSparseError for a tensor that wants a gradient."""
    check_tangents(**tensors)  # in transforms too
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors.values()):
        names = " and ".join(tensors)
        expected = "tensors without gradients (int8 is for inference): use torch.no_grad()"
        raise BlockSparseError.expected(names, expected, "requires_grad")


def _run(
    x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, crow: Tensor, col: Tensor, in_blocks: int,
    activation: str | None,
) -> Tensor:  # fmt: skip
    layout = layout_of((crow, col), in_blocks, (values.shape[1], values.shape[2]))
    y: Tensor = INT8_LINEAR.on(x.device, x.dtype).int8_linear(x, values, scales, layout, bias, activation)
    return y


def _meta(x: Tensor, values: Tensor, scales: Tensor, bias: Any, crow: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape[0], (crow.shape[0] - 1) * values.shape[1])


# PyTorch's op, for what traces, compiles or transforms.
LIBRARY.define(
    "int8_linear(Tensor x, Tensor values, Tensor scales, Tensor? bias, Tensor crow, Tensor col, int in_blocks, "
    "str? activation) -> Tensor"
)
_op = torch.ops.blocksparse.int8_linear.default
LIBRARY.impl("int8_linear", _run, "CompositeExplicitAutograd")
torch.library.register_fake("blocksparse::int8_linear", _meta, lib=LIBRARY)
torch.library.register_vmap(_op, each_entry(_op, rows=True), lib=LIBRARY)
