"""Replaces the block-sparse modules of a model by dense ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import BlockSparseError
from ..nn.layout_module import LayoutModule
from ..nn.linear import Linear
from ..nn.lstm import LSTM
from ..nn.module import Weight, check_parameters
from ..nn.multihead_attention import MultiheadAttention
from ..nn.parts import Parts
from ..nn.quantized import QuantizedLinear
from ..nn.quantized_conv import QuantizedConv
from ..nn.quantized_lstm import QuantizedWeight
from ..nn.weight_norm import WeightNorm
from ..surgery.copies import copied
from ..surgery.prunable import CONVOLUTIONS, RECURRENT, TRANSPOSED
from ..surgery.replace import like, replace_modules, settings_of

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
DENSE: dict[Any, Any] = {Linear: nn.Linear}
# With several weights; LSTMs stay ours, which are as fast, or faster where they are trained.
SEVERAL: dict[Any, Any] = {ours: theirs for theirs, ours in RECURRENT.items() if ours is not LSTM}
SEVERAL |= {MultiheadAttention: nn.MultiheadAttention}
DENSE |= {ours: theirs for theirs, ours in (*CONVOLUTIONS.items(), *TRANSPOSED.items())}
QUANTIZED = QuantizedLinear, QuantizedConv


@torch.no_grad()
def densify(model: nn.Module, inplace: bool = False) -> nn.Module:
    """Replaces block-sparse modules by dense ones that compute the same, with zeros where no block was stored.

    Linear layers, convolutions, attention, GRUs, RNNs and cells become those of torch.nn, with an activation that was
    fused behind a layer as a module of its own. Other recurrent layers stay those of `blocksparse.nn`, dense: there the
    parameters of an LSTM and their names are those of torch.nn.LSTM. Biases stay the same objects.

    Args:
        model: with block-sparse modules, from `sparsify` or built by hand.
        inplace: whether the model itself is changed, instead of a copy.

    Returns:
        The model; in place another object only where the model itself is one such module.

    Raises:
        BlockSparseError: no module, one on the meta device, or with a block-sparse layer that has no dense counterpart:
            one of a class of the user's, or whose values are computed from other parameters. Nothing is changed then.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.Linear(100, 60, density=0.25)
    >>> dense = bs.densify(layer)
    >>> x = torch.randn(5, 100)
    >>> dense, torch.allclose(dense(x), layer(x), atol=1e-5)
    (Linear(in_features=100, out_features=60, bias=True), True)
    """
    if not isinstance(model, nn.Module):
        raise BlockSparseError.expected("model", "a torch.nn.Module", type(model).__name__)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise BlockSparseError.expected("model", "parameters with values", f"{name} on the meta device")
    for name, module in model.named_modules():
        if isinstance(module, LayoutModule):
            check_parameters(module, name or "model")
            if not isinstance(module, Weight | QuantizedWeight) and not _is_sparse(module):
                kind = type(module).__name__
                raise BlockSparseError.expected(name or "model", "a layer of one of blocksparse.nn's own classes", kind)
    model = model if inplace else copied(model, otherwise="inplace=True")
    return replace_modules(model, {module: _dense(module) for module in model.modules() if _is_sparse(module)})


def _is_sparse(module: nn.Module) -> bool:
    if isinstance(module, WeightNorm):
        return _is_sparse(module.module)
    if isinstance(module, Parts):
        return type(module) in SEVERAL or any(isinstance(child, LayoutModule) for child in module.children())
    return type(module) in DENSE or isinstance(module, QUANTIZED)


def _dense(module: Any) -> nn.Module:
    if isinstance(module, Parts):
        return _with_several_weights(module.densified())
    if isinstance(module, QUANTIZED):
        return _dense(like(module, module.dequantized()))
    layer: Any = module.module if isinstance(module, WeightNorm) else module
    new = _layer(layer) if layer is module else _normed(module)
    return nn.Sequential(new, ACTIVATIONS[layer.activation]()) if layer.activation else new


def _normed(module: WeightNorm) -> nn.Module:
    """A `WeightNorm` of the dense layer, with the gains of what is no padding."""
    new = WeightNorm(_layer(module.module), module.scale)
    gain, outputs = module.gain, len(new.gain)
    new.gain = gain if len(gain) == outputs else nn.Parameter(gain[:outputs].clone(), requires_grad=gain.requires_grad)
    return like(module, new)


def _layer(module: Any) -> Any:
    """The dense layer, without the activation behind it."""
    kind = DENSE[type(module)]
    weight = module.dense_of(module.values.detach())
    options: dict[str, Any] = {"bias": module.bias is not None, "device": "meta"}
    if kind is nn.Linear and module.dense_kind is not None and not module.activation:
        new: Any = module.dense_kind(module.out_features, module.in_features)
        weight = weight.T.contiguous()
    elif kind is nn.Linear:
        new = nn.Linear(module.in_features, module.out_features, **options)
    else:
        names = {"stride", "padding", "dilation", "output_padding", "padding_mode"} & module.__dict__.keys()
        settings = {name: getattr(module, name) for name in names}
        new = kind(module.in_channels, module.out_channels, module.kernel_size, **settings, **options)
    new.weight = nn.Parameter(weight, requires_grad=module.values.requires_grad)
    new.bias = module.bias
    return like(module, new)


def _with_several_weights(module: Any) -> nn.Module:
    """PyTorch's module in place of one of ours whose weights are dense already, with the same parameters."""
    kind = SEVERAL.get(type(module))
    if kind is None:
        return module
    new = kind(**settings_of(module, type(module)), device="meta")
    for name, parameter in module.named_parameters(recurse=False):
        setattr(new, name, parameter)
    if kind is nn.MultiheadAttention:
        projection = _dense(module.out_proj) if _is_sparse(module.out_proj) else module.out_proj
        for name, parameter in projection.named_parameters(recurse=False):
            setattr(new.out_proj, name, parameter)
    return like(module, new)
