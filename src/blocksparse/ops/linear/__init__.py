"""The block-sparse linear product, y = x W^T, and its transpose, y = x W."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..activations import ACTIVATIONS
from ..block_gate import apply_gate
from ..checks import autocast, check_activation, check_kinds, check_same
from ..registry import can_bypass_dispatcher
from . import reference as definition
from .op import LINEAR, LINEAR_WGRAD

__all__ = ["ACTIVATIONS", "LINEAR", "LINEAR_WGRAD", "check_shapes", "definition", "linear", "linear_transposed"]


def linear(
    x: Tensor,
    values: Tensor,
    layout: BlockLayout,
    bias: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.linear` with a block-sparse weight: activation(x W^T + bias).

    Args:
        x: `[..., in_features]`, any strides.
        values: `[nnz, block_out, block_in]`, the blocks of W in the order of `layout`.
        layout: which blocks of the `[out_features, in_features]` weight these are.
        bias: `[out_features]` or None.
        activation: None, "relu", "gelu" (the exact one) or "silu"; fused into the kernel in inference.
        gate: `[nnz]`, a factor for each block, or None.

    All tensors have one device and one dtype out of float32, float64, bfloat16 and float16 (sums of 16-bit numbers are
    float32); under `torch.autocast` they are cast to its dtype first. The result can be differentiated any number of
    times in x, values, bias and gate; the gradient of `values` exists on the layout only. Time and memory grow with
    `nnz`.

    On the CPU, bfloat16 numbers below 2^-126 in size count as 0, in inputs and in results, whatever
    `torch.set_flush_denormal` is set to: the CPU's bfloat16 instructions always do this.

    If neither values nor gate need a gradient, the CPU skips blocks with gate 0: the product runs on
    `layout.select(gate != 0)`, planned once for the same gates, and on a copy of the remaining values, made in each
    call. Other devices and traced graphs multiply all blocks, so that the host does not wait for the gate. To remove
    blocks permanently, and avoid the copy, use `select`, or `bs.sparsity.prune_gated_blocks` for a module and its
    optimizer.

    Returns:
        `[..., out_features]`. The outputs of empty rows are activation(bias), or exactly 0.

    Raises:
        BlockSparseError: sizes do not fit the layout, dtypes or devices are mixed, the activation is unknown, or the
            gate is not finite (checked on the CPU only).

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
        >>> gate = torch.tensor([1.0, 0.0, 0.5, 0.0], requires_grad=True)
        >>> bs.linear(torch.randn(10, 128), values, layout, gate=gate).sum().backward()
        >>> gate.grad.shape
        torch.Size([4])

    Source: the block-sparse product of Gray, Radford, Kingma, GPU Kernels for Block-Sparse Weights (2017).
    """
    return _product(x, values, layout, bias, activation, gate, transpose=False)


def linear_transposed(x: Tensor, values: Tensor, layout: BlockLayout, gate: Tensor | None = None) -> Tensor:
    """Return x W, the product with the transposed weight, from the same `values` and `layout` without a copy.

    Args:
        x: `[..., out_features]`, any strides.
        values: `[nnz, block_out, block_in]`, the blocks of W in the order of `layout`.
        layout: which blocks of the `[out_features, in_features]` weight these are.
        gate: `[nnz]`, a factor for each block, or None.

    Dtypes, devices, autocast, gradients and gates are those of `linear`.

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
    return _product(x, values, layout, None, None, gate, transpose=True)


def _product(
    x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None, activation: str | None,
    gate: Tensor | None, transpose: bool,
) -> Tensor:  # fmt: skip
    """Compute the product of x and the weight, or its transpose, by the fastest path that supports the arguments."""
    usual = gate is None and isinstance(layout, BlockLayout) and x is not None and values is not None
    direct = usual and can_bypass_dispatcher(x, values, bias, plain_call=True)
    if not direct:
        check_kinds(layout, x=x, values=values, bias=bias, gate=gate)
        if gate is not None:
            values, layout = apply_gate(values, layout, gate)
        x, values, bias = autocast(x, values, bias)
    if activation is not None:
        check_activation(activation, ACTIVATIONS)
    # This is `needs_grad` without the time of a call.
    recorded = torch.is_grad_enabled() and (
        x.requires_grad or values.requires_grad or (bias is not None and bias.requires_grad)
    )
    if direct and not recorded:
        backend = LINEAR.backends["cpu" if x.is_cpu else "triton"]  # `on` takes longer than a small product
        y: Tensor | None = backend.linear_fast(x, values, bias, layout, transpose, activation)
        if y is not None:
            return y
    fused = activation
    if activation is not None:
        # The gradient of gelu and silu needs their input: unfused it is saved, fused it would be computed again.
        fused = None if activation != "relu" and recorded else activation
    out_features, in_features = layout.shape[::-1] if transpose else layout.shape
    check_shapes(x, values, layout, bias, out_features, in_features)
    flat = x if x.dim() == 2 else x.reshape(-1, in_features)
    y = (LINEAR.direct if direct else LINEAR)((flat, values, bias), layout, (transpose, fused))
    if fused != activation:
        y = ACTIVATIONS[activation](y)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], out_features)


def check_shapes(
    x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None, out_features: int, in_features: int
) -> None:
    """Check that sizes fit the layout, and that dtypes and devices are equal."""
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise BlockSparseError.expected("x", f"[..., {in_features}] for {layout!r}", list(x.shape))
    if tuple(values.shape) != layout.values_shape:
        raise BlockSparseError.expected("values", f"{list(layout.values_shape)} for {layout!r}", list(values.shape))
    if bias is not None and tuple(bias.shape) != (out_features,):
        raise BlockSparseError.expected("bias", f"[{out_features}] for {layout!r}", list(bias.shape))
    for tensor in (values, bias):
        if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device):
            check_same(x, values, bias)
