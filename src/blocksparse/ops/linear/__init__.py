"""The block-sparse linear product, y = x W^T, and its transpose, y = x W."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ...errors import BlockSparseError
from ...layout import BlockLayout
from .op import linear_op
from .reference import ACTIVATIONS


def linear(
    x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """`torch.nn.functional.linear` with a block-sparse weight: activation(x W^T + bias).

    Args:
        x: `[..., in_features]`, any strides.
        values: `[nnz, block_out, block_in]`, the blocks of W in the order of `layout`.
        layout: which blocks of the `[out_features, in_features]` weight these are.
        bias: `[out_features]` or None.
        activation: None, "relu", "gelu" (the exact one) or "silu"; fused into the kernel in inference.

    All tensors have one device and one dtype out of float32, float64, bfloat16 and float16 (16 bits accumulate in
    float32); under `torch.autocast` they are cast to its dtype first. Differentiable in x, values and bias as often
    as one likes; the gradient of `values` exists on the layout only. Time and memory grow with `nnz`.

    Returns:
        `[..., out_features]`. The outputs of empty rows are activation(bias), or exactly 0.

    Raises:
        BlockSparseError: sizes that do not fit the layout, mixed dtypes or devices, an unknown activation.

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.random((64, 128), block_size=32, density=0.5, seed=0)
        >>> values = torch.randn(layout.values_shape, requires_grad=True)
        >>> y = bs.linear(torch.randn(10, 7, 128), values, layout, activation="relu")
        >>> y.shape
        torch.Size([10, 7, 64])
        >>> y.sum().backward()
        >>> values.grad.shape
        torch.Size([4, 32, 32])

    Source: the block-sparse product of Gray, Radford, Kingma, GPU Kernels for Block-Sparse Weights (2017).
    """
    return _product(x, values, layout, bias, activation, transpose=False)


def linear_transposed(x: Tensor, values: Tensor, layout: BlockLayout) -> Tensor:
    """x W: the product with the transposed weight, from the very same `values` and `layout`, without a copy of either.

    Args:
        x: `[..., out_features]`, any strides.
        values: `[nnz, block_out, block_in]`, the blocks of W in the order of `layout`.
        layout: which blocks of the `[out_features, in_features]` weight these are.

    Dtypes, devices, autocast and gradients are those of `linear`.

    Returns:
        `[..., in_features]`. The outputs of empty columns are exactly 0.

    Raises:
        BlockSparseError: as `linear`.

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.dense((64, 128), block_size=32)  # its 64 outputs are the inputs here
        >>> linear_transposed(torch.randn(10, 64), torch.randn(layout.values_shape), layout).shape
        torch.Size([10, 128])
    """
    return _product(x, values, layout, None, None, transpose=True)


def _product(
    x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None, activation: str | None, transpose: bool
) -> Tensor:
    _check_kinds(x, values, layout, bias)
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):  # not on "meta", say
        x, values, bias = _autocast(x, values, bias)
    out_features, in_features = layout.shape[::-1] if transpose else layout.shape
    _check(x, values, layout, bias, activation, out_features, in_features)
    training = torch.is_grad_enabled() and (
        x.requires_grad or values.requires_grad or (bias is not None and bias.requires_grad)
    )
    # The gradient of gelu and silu needs what came before them: unfused they keep it, fused it is computed twice.
    fused = activation if activation == "relu" or not training else None
    crow, col = layout.crow_indices(x.device), layout.col_indices(x.device)
    flat = x.reshape(-1, in_features)
    y = linear_op(flat, values, bias, crow, col, layout.grid[1], transpose, fused)
    if fused != activation:
        y = ACTIVATIONS[activation](y)
    return y.reshape(*x.shape[:-1], out_features)


def _autocast(x: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return cast(x), cast(values), None if bias is None else cast(bias)


def _check_kinds(x: Any, values: Any, layout: Any, bias: Any) -> None:
    if not isinstance(layout, BlockLayout):
        raise BlockSparseError.expected("layout", "a BlockLayout", type(layout).__name__)
    tensors = {"x": x, "values": values} if bias is None else {"x": x, "values": values, "bias": bias}
    compiling = torch.compiler.is_compiling()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise BlockSparseError.expected(name, "a torch.Tensor", type(tensor).__name__)
        if tensor.layout != torch.strided or tensor.is_nested:
            raise BlockSparseError.expected(name, "a plain dense tensor", f"layout {tensor.layout}")
        # PyTorch would take the tangent of an op that has no forward-mode rule for zero.
        if not compiling and unpack_dual(tensor).tangent is not None:
            raise BlockSparseError.expected(name, "reverse-mode differentiation", "a forward-mode tangent")


def _check(
    x: Tensor,
    values: Tensor,
    layout: BlockLayout,
    bias: Tensor | None,
    activation: str | None,
    out_features: int,
    in_features: int,
) -> None:
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise BlockSparseError.expected("x", f"[..., {in_features}] for {layout!r}", list(x.shape))
    if tuple(values.shape) != layout.values_shape:
        raise BlockSparseError.expected("values", f"{list(layout.values_shape)} for {layout!r}", list(values.shape))
    if bias is not None and tuple(bias.shape) != (out_features,):
        raise BlockSparseError.expected("bias", f"[{out_features}] for {layout!r}", list(bias.shape))
    for name, tensor in (("values", values), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise BlockSparseError.expected(name, f"the dtype of x, {x.dtype}", tensor.dtype)
        if tensor.device != x.device:
            raise BlockSparseError.expected(name, f"the device of x, {x.device}", tensor.device)
    if not isinstance(activation, str | None) or activation not in ACTIVATIONS:
        raise BlockSparseError.expected("activation", f"one of {list(ACTIVATIONS)}", repr(activation))
