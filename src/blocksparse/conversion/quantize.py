"""Puts the block-sparse layers of a trained model into 8 bits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..errors import BlockSparseError
from ..nn.layout_module import LayoutModule
from ..nn.linear import Linear
from ..nn.lstm import LSTM
from ..nn.module import BlockSparseModule
from ..nn.multi_weight import MultiWeightModule
from ..nn.quantized import QuantizedLinear
from ..nn.quantized_conv import QuantizedConv1d, QuantizedConv2d, QuantizedConv3d
from ..nn.quantized_lstm import QuantizedLSTM
from ..nn.weight_norm import WeightNorm
from ..ops.int8_linear import DTYPES, MAX_INPUTS
from ..surgery.carry import carry_over
from ..surgery.model_tools import copy_model
from ..surgery.prunable import Skip, skipped
from ..surgery.replace import check_replaceable, replace_modules

QUANTIZED: dict[type[nn.Module], Any] = {
    Linear: QuantizedLinear,
    **{kind.kind: kind for kind in (QuantizedConv1d, QuantizedConv2d, QuantizedConv3d)},
    LSTM: QuantizedLSTM,
}


@torch.inference_mode(False)
@torch.no_grad()
def quantize(model: nn.Module, *, skip: Skip = (), inplace: bool = False) -> nn.Module:
    """Replaces block-sparse layers by ones in 8 bits: int8 weights, inputs rounded in each call.

    Linear layers become `QuantizedLinear`, convolutions `QuantizedConv1d` to `QuantizedConv3d`, LSTMs `QuantizedLSTM`.
    On CPUs with VNNI the products of a linear layer take about half of the time of float32; elsewhere they are right,
    and about as fast or slower. They have no gradients. Other modules stay as they are: transposed convolutions, other
    recurrent layers, attention and dense layers (for these there is `torch.ao.quantization.quantize_dynamic`).
    What a model loses its validation data say: `examples/eight_bits.py` compares accuracies.

    Args:
        model: trained, with block-sparse layers of `blocksparse.nn` of float32, bfloat16 or float16.
        skip: layers that stay, as in `sparsify`.
        inplace: whether the model itself is changed, instead of a copy.

    Returns:
        The model; in place another object only where the model itself is one such layer.

    Raises:
        BlockSparseError: no module, weights that are not finite, a `WeightNorm` of such a layer (`blocksparse.nn.fold`
            ends it), a layer whose forward was set on the instance or that the model also uses by other ways than its
            modules, or no layer to quantize. Nothing is changed then.

    >>> import torch, blocksparse as bs
    >>> model = torch.nn.Sequential(bs.nn.Linear(64, 128, density=0.5), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    >>> small, x = bs.quantize(model), torch.randn(5, 64)
    >>> type(small[0]).__name__, type(small[2]).__name__, (small(x) - model(x)).abs().max().item() < 0.05
    ('QuantizedLinear', 'Linear', True)
    """
    if not isinstance(model, nn.Module):
        raise BlockSparseError.expected("model", "a torch.nn.Module", type(model).__name__)
    left, _ = skipped(model, skip)
    layers = {name: layer for name, layer in model.named_modules() if type(layer) in QUANTIZED and layer not in left}
    chosen = {name: QUANTIZED[type(layer)].of(layer) for name, layer in layers.items() if _refusal(layer) is None}
    if not chosen:
        kinds = ", ".join(kind.__name__ for kind in QUANTIZED)
        there = {
            type(module).__name__ + (f": {_refusal(module)}" if module in layers.values() else "")
            for module in model.modules()
            if isinstance(module, LayoutModule | MultiWeightModule)
        }
        got = f"none ({', '.join(sorted(there))})" if there else "none"
        raise BlockSparseError.expected("model", f"a block-sparse layer of blocksparse.nn to quantize ({kinds})", got)
    for name, module in model.named_modules():
        if isinstance(module, WeightNorm) and type(module.module) in QUANTIZED:
            given = f"{name or 'the model'}, a WeightNorm of one"
            wanted = "layers with weights of their own: blocksparse.nn.fold first"
            raise BlockSparseError.expected("model", wanted, given)
    check_replaceable(model, [layers[name] for name in chosen])
    model = model if inplace else copy_model(model, otherwise="inplace=True")
    old = dict(model.named_modules())
    return replace_modules(model, {old[name]: carry_over(old[name], layer, name) for name, layer in chosen.items()})


def _refusal(layer: nn.Module) -> str | None:
    """Why such a layer cannot be in 8 bits, or None."""
    weights = [each.values for each in layer.modules() if isinstance(each, BlockSparseModule)]
    for values in weights:
        inputs = math.prod(values.shape[2:])
        if values.dtype not in DTYPES:
            return f"{values.dtype} is not supported"
        if inputs > MAX_INPUTS:
            return f"its blocks have {inputs} inputs, more than {MAX_INPUTS}"
    return None if weights else "its weights are dense"
