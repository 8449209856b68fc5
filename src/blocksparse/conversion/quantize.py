"""Puts the block-sparse layers of a trained model into 8 bits."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import BlockSparseError
from ..nn.linear import Linear
from ..nn.quantized import QuantizedLinear
from ..ops.int8_linear import DTYPES, MAX_INPUTS
from ..surgery.copies import copied
from ..surgery.prunable import Skip, skipped
from ..surgery.replace import like, replace_modules


@torch.inference_mode(False)
@torch.no_grad()
def quantize(model: nn.Module, *, skip: Skip = (), inplace: bool = False) -> nn.Module:
    """Replaces block-sparse linear layers by `QuantizedLinear`: int8 weights, inputs rounded in each call.

    On CPUs with VNNI the products of a layer take about half of the time of float32; elsewhere they are right, and
    slower. They have no gradients. Other modules stay as they are: convolutions, recurrent layers, attention and dense
    layers (for these there is `torch.ao.quantization.quantize_dynamic`).

    Args:
        model: trained, with layers of `blocksparse.nn.Linear` of float32, bfloat16 or float16.
        skip: layers that stay, as in `sparsify`.
        inplace: whether the model itself is changed, instead of a copy.

    Returns:
        The model; in place another object only where the model itself is one such layer.

    Raises:
        BlockSparseError: no module, weights that are not finite, or no layer to quantize.

    >>> import torch, blocksparse as bs
    >>> model = torch.nn.Sequential(bs.nn.Linear(64, 128, density=0.5), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    >>> small, x = bs.quantize(model), torch.randn(5, 64)
    >>> type(small[0]).__name__, type(small[2]).__name__, (small(x) - model(x)).abs().max().item() < 0.05
    ('QuantizedLinear', 'Linear', True)
    """
    if not isinstance(model, nn.Module):
        raise BlockSparseError.expected("model", "a torch.nn.Module", type(model).__name__)
    left, _ = skipped(model, skip)
    chosen = {
        name: QuantizedLinear.of(layer)
        for name, layer in model.named_modules()
        if type(layer) is Linear
        and layer not in left
        and layer.values.dtype in DTYPES
        and layer.layout.block_shape[1] <= MAX_INPUTS
    }
    if not chosen:
        raise BlockSparseError.expected("model", "a blocksparse.nn.Linear to quantize", "none")
    model = model if inplace else copied(model, otherwise="inplace=True")
    old = dict(model.named_modules())
    return replace_modules(model, {old[name]: like(old[name], layer) for name, layer in chosen.items()})
