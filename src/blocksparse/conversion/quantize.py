"""Quantizes the block-sparse layers of a trained model to 8 bits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..checked import check_model
from ..errors import BlockSparseError
from ..nn.layout_module import LayoutModule
from ..nn.linear import Linear
from ..nn.lstm import LSTM
from ..nn.module import BlockSparseModule
from ..nn.multi_weight import MultiWeightModule
from ..nn.quantized import QuantizedLinear, check_scale
from ..nn.quantized_conv import QuantizedConv1d, QuantizedConv2d, QuantizedConv3d
from ..nn.quantized_lstm import QuantizedLSTM
from ..nn.weight_norm import WeightNorm
from ..ops.int8_linear import DTYPES, MAX_INPUTS
from ..surgery.carry import carry_over
from ..surgery.model_tools import copy_model
from ..surgery.prunable import Skip, find_skipped
from ..surgery.replace import check_replaceable, replace_modules

QUANTIZED: dict[type[nn.Module], Any] = {
    Linear: QuantizedLinear,
    **{kind.kind: kind for kind in (QuantizedConv1d, QuantizedConv2d, QuantizedConv3d)},
    LSTM: QuantizedLSTM,
}


@torch.inference_mode(False)
@torch.no_grad()
def quantize(model: nn.Module, *, skip: Skip = (), inplace: bool = False, scale: str = "block") -> nn.Module:
    """Replace block-sparse layers by ones with int8 weights, which round their inputs in each call.

    Linear layers become `QuantizedLinear`, convolutions `QuantizedConv1d` to `QuantizedConv3d`, LSTMs `QuantizedLSTM`.
    On CPUs with VNNI a linear layer takes about half the time of float32; on others it is about as fast or slower.
    Quantized layers have no gradients. Other modules stay as they are: transposed convolutions, other recurrent layers,
    attention and dense layers (use `torch.ao.quantization.quantize_dynamic` for these). Measure the loss of accuracy on
    validation data, as `examples/eight_bits.py` does.

    Args:
        model: a trained model with block-sparse layers of `blocksparse.nn` in float32, bfloat16 or float16.
        skip: layers that stay, as in `sparsify`.
        inplace: whether to change the model itself instead of a copy.
        scale: "block" for a scale for each output of a block, the more accurate choice; "row" for one for each output,
            which lets CPUs with AMX sum whole rows in 8 bits.

    Returns:
        The model. In place this is another object only if the model itself is one such layer.

    Raises:
        BlockSparseError: not a module; no layer to quantize; weights that are not finite; a `WeightNorm` of such a
            layer (call `blocksparse.nn.fold` first); a layer whose forward was replaced, or that the model also uses
            outside of its tree of modules; a wrong `scale`. Nothing is changed then.

    >>> import torch, blocksparse as bs
    >>> model = torch.nn.Sequential(bs.nn.Linear(64, 128, density=0.5), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    >>> small, x = bs.quantize(model), torch.randn(5, 64)
    >>> type(small[0]).__name__, type(small[2]).__name__, (small(x) - model(x)).abs().max().item() < 0.05
    ('QuantizedLinear', 'Linear', True)
    """
    check_model(model)
    check_scale(scale)
    skipped_modules, _ = find_skipped(model, skip)
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) in QUANTIZED and layer not in skipped_modules
    }
    chosen = {
        name: QUANTIZED[type(layer)].of(layer, scale) for name, layer in layers.items() if _refusal(layer) is None
    }
    if not chosen:
        kinds = ", ".join(kind.__name__ for kind in QUANTIZED)
        others = {
            type(module).__name__ + (f": {_refusal(module)}" if module in layers.values() else "")
            for module in model.modules()
            if isinstance(module, LayoutModule | MultiWeightModule)
        }
        got = f"none ({', '.join(sorted(others))})" if others else "none"
        raise BlockSparseError.expected("model", f"a block-sparse layer of blocksparse.nn to quantize ({kinds})", got)
    for name, module in model.named_modules():
        is_norm = isinstance(module, WeightNorm) and module.module not in skipped_modules
        if is_norm and type(module.module) in QUANTIZED:
            raise BlockSparseError(
                f"model: {name or 'it'} is a WeightNorm of a layer to quantize: call blocksparse.nn.fold first, or "
                "skip it"
            )
    check_replaceable(model, [layers[name] for name in chosen])
    model = model if inplace else copy_model(model, otherwise="inplace=True")
    old = dict(model.named_modules())
    return replace_modules(model, {old[name]: carry_over(old[name], layer, name) for name, layer in chosen.items()})


def _refusal(layer: nn.Module) -> str | None:
    """Return why a layer cannot be quantized, or None."""
    weights = [each.values for each in layer.modules() if isinstance(each, BlockSparseModule)]
    for values in weights:
        inputs = math.prod(values.shape[2:])
        if values.dtype not in DTYPES:
            return f"{values.dtype} is not supported"
        if inputs > MAX_INPUTS:
            return f"its blocks have {inputs} inputs, more than {MAX_INPUTS}"
    return None if weights else "its weights are dense"
