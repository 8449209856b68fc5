"""Replaces the block-sparse modules of a model by dense ones that compute the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..checked import check_model
from ..errors import BlockSparseError
from ..nn.layout_module import LayoutModule
from ..nn.linear import Linear
from ..nn.lstm import LSTM
from ..nn.module import Weight, check_parameters
from ..nn.multi_weight import MultiWeightModule
from ..nn.multihead_attention import MultiheadAttention
from ..nn.quantized import QuantizedLayer
from ..nn.quantized_lstm import QuantizedWeight
from ..nn.weight_norm import WeightNorm
from ..surgery.carry import carry_over, carry_parameter, own_names
from ..surgery.model_tools import copy_model
from ..surgery.optimizer import check_optimizer_is_inplace
from ..surgery.prunable import CONVOLUTIONS, RECURRENT, TRANSPOSED
from ..surgery.replace import ParameterChange, check_changes, check_replaceable, constructor_arguments, replace_modules

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
DENSE: dict[Any, Any] = {Linear: nn.Linear}
# LSTMs stay ours, which train faster than PyTorch's and run as fast.
SEVERAL: dict[Any, Any] = {ours: theirs for theirs, ours in RECURRENT.items() if ours is not LSTM}
SEVERAL |= {MultiheadAttention: nn.MultiheadAttention}
DENSE |= {ours: theirs for theirs, ours in (*CONVOLUTIONS.items(), *TRANSPOSED.items())}
Convert = Callable[[Tensor], Tensor]


@torch.no_grad()
def densify(model: nn.Module, inplace: bool = False, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Replace block-sparse modules by dense ones that compute the same, with zeros for absent blocks.

    Linear layers, convolutions, attention, GRUs, RNNs and cells become those of torch.nn; a fused activation becomes a
    module of its own. Other recurrent layers stay those of `blocksparse.nn`, with dense weights; the parameters of an
    LSTM then have the names of torch.nn.LSTM. Biases stay the same objects, and tied weights stay tied. Hooks,
    attributes, buffers and modules that a user added to a layer move to the new one, and so do hooks and attributes of
    its values.

    Args:
        model: a model with block-sparse modules, from `sparsify` or built by hand.
        inplace: whether to change the model itself instead of a copy.
        optimizer: with `inplace`, the optimizer that trains the model. It continues with the new parameters, and keeps
            its state.

    Returns:
        The model. In place this is another object only if the model itself is one such module.

    Raises:
        BlockSparseError: not a module; a model on the meta device; a block-sparse layer of a user's class with a
            forward of its own, or with values computed from other parameters; a layer that the model also uses outside
            of its tree of modules, in a closure say; tied values that would become different weights; an optimizer
            without `inplace` or without the values. Nothing is changed then.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.Linear(100, 60, density=0.25)
    >>> dense = bs.densify(layer)
    >>> x = torch.randn(5, 100)
    >>> dense, torch.allclose(dense(x), layer(x), atol=1e-5)
    (Linear(in_features=100, out_features=60, bias=True), True)
    """
    check_model(model)
    check_optimizer_is_inplace(optimizer, inplace)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise BlockSparseError.expected("model", "parameters with values", f"{name} on the meta device")
    for name, module in model.named_modules():
        if isinstance(module, LayoutModule):
            check_parameters(module, name or "model")
            if not isinstance(module, Weight | QuantizedWeight) and not _is_sparse(module):
                kind = type(module).__name__
                raise BlockSparseError.expected(name or "model", "a layer of a class of blocksparse.nn itself", kind)
    check_replaceable(model, [module for module in model.modules() if _is_sparse(module)])
    model = model if inplace else copy_model(model, otherwise="inplace=True")
    densifier = _Densifier(model)
    new = {module: densifier.dense(module) for module in model.modules() if _is_sparse(module)}
    densifier.check_ties(new)
    check_changes(optimizer, densifier.changes)
    model = replace_modules(model, new)
    for change in densifier.changes:
        change.apply(optimizer)
    return model


def _is_sparse(module: nn.Module) -> bool:
    """Return whether a module has a dense counterpart."""
    if isinstance(module, WeightNorm):
        return _is_sparse(module.module)
    if isinstance(module, MultiWeightModule):
        return type(module) in SEVERAL or any(isinstance(child, LayoutModule) for child in module.children())
    return type(module) in DENSE or isinstance(module, QuantizedLayer)


class _Densifier:
    """Builds the dense counterparts of a model's modules and collects the parameters that they replace.

    The modules are left as they are.
    """

    def __init__(self, model: nn.Module):
        self._names = {module: name for name, module in model.named_modules()}
        self._changes: dict[Tensor, tuple[ParameterChange, Any]] = {}

    @property
    def changes(self) -> list[ParameterChange]:
        """The parameters with their replacements."""
        return [change for change, _ in self._changes.values()]

    def dense(self, module: Any) -> nn.Module:
        """Return the dense counterpart of a module."""
        name = self._names.get(module, "")
        if isinstance(module, MultiWeightModule):
            return self._with_several_weights(module, name)
        if isinstance(module, QuantizedLayer):
            return self.dense(carry_over(module, module.dequantized(), name))
        layer: Any = module.module if isinstance(module, WeightNorm) else module
        new = self._layer(layer) if layer is module else self._normed(module)
        if not layer.activation:
            return carry_over(module, new, name)
        if others := module._modules.keys() - own_names(type(module)):
            raise BlockSparseError(
                f"{f'{name}.{min(others)}'.lstrip('.')}: a layer with an activation becomes nn.Sequential, which would "
                "call modules that were added to it: remove this module first"
            )
        # Forward hooks get the outputs behind the activation, as before.
        return carry_over(module, nn.Sequential(new, ACTIVATIONS[layer.activation]()).train(module.training), name)

    def check_ties(self, new: Mapping[nn.Module, nn.Module]) -> None:
        """Raise a BlockSparseError if a module that stays uses a parameter that is replaced."""
        replaced = {part for module in new for part in module.modules()}
        for module, name in self._names.items():
            for key, parameter in module.named_parameters(recurse=False) if module not in replaced else ():
                if parameter in self._changes:
                    other = self._changes[parameter][0].name
                    raise BlockSparseError(
                        f"{f'{name}.{key}'.lstrip('.')} is tied to {other}, which becomes dense: untie them first"
                    )

    def _parameter(self, name: str, old: nn.Parameter, new: Tensor, convert: Convert, key: Any) -> nn.Parameter:
        """Return the dense parameter that replaces another; tied parameters get the same one.

        Args:
            name: the old parameter's name in the model.
            old: the old parameter.
            new: the dense values.
            convert: maps tensors of the old shape to the new shape.
            key: what determines `convert`; tied parameters must agree in it.
        """
        if old not in self._changes:
            dense = carry_parameter(old, nn.Parameter(new.detach(), requires_grad=old.requires_grad), convert)
            self._changes[old] = ParameterChange(name, old, dense, convert, grows=True), key
        change, known = self._changes[old]
        if known != key:
            raise BlockSparseError(
                f"{name} is tied to {change.name}, but their layouts or sizes differ: untie them first"
            )
        return change.new

    def _layer(self, module: Any) -> Any:
        """Return the dense layer without its activation."""
        kind, name = DENSE[type(module)], self._names.get(module, "")
        options: dict[str, Any] = {"bias": module.bias is not None, "device": "meta"}
        is_transposed = kind is nn.Linear and module.dense_kind is not None and not module.activation
        if is_transposed:
            new: Any = module.dense_kind(module.out_features, module.in_features)
        elif kind is nn.Linear:
            new = nn.Linear(module.in_features, module.out_features, **options)
        else:
            names = {"stride", "padding", "dilation", "output_padding", "padding_mode"} & module.__dict__.keys()
            settings = {name: getattr(module, name) for name in names}
            new = kind(module.in_channels, module.out_channels, module.kernel_size, **settings, **options)
        convert = partial(_dense_weight, module, is_transposed)
        weight = convert(module.values.detach())
        key = module.layout, kind, is_transposed, weight.shape
        new.weight = self._parameter(f"{name}.values".lstrip("."), module.values, weight, convert, key)
        new.bias = module.bias
        return new.train(module.training)

    def _normed(self, module: WeightNorm) -> nn.Module:
        """Return a `WeightNorm` of the dense layer, without gains of padding."""
        layer = module.module
        new = WeightNorm(carry_over(layer, self._layer(layer), self._names.get(layer, "")), module.scale)
        gain, outputs = module.gain, len(new.gain)
        if len(gain) != outputs:
            name = f"{self._names.get(module, '')}.gain".lstrip(".")
            gain = self._parameter(name, gain, gain[:outputs].clone(), lambda old: old[:outputs].clone(), outputs)
        new.gain = gain
        return new

    def _with_several_weights(self, module: Any, name: str) -> nn.Module:
        """Return PyTorch's module with dense weights, or ours if PyTorch has none."""
        dense = module.densified()
        for key, new in dense.named_parameters(recurse=False):
            weight = module._modules.get(key)
            old = module._parameters.get(key) if weight is None else weight._parameters.get("values")
            if old is not None and old is not new:
                path = ".".join(filter(None, (name, key, "" if weight is None else "values")))
                settings = (weight and weight.layout, type(module), new.shape)
                setattr(dense, key, self._parameter(path, old, new, partial(_dense_part, module, key), settings))
        kind = SEVERAL.get(type(module))
        if kind is None:
            return dense
        new_module = kind(**constructor_arguments(dense, type(dense)), device="meta")
        for key, parameter in dense.named_parameters(recurse=False):
            if key in new_module._parameters:
                setattr(new_module, key, parameter)
        if kind is nn.MultiheadAttention:
            projection = self.dense(dense.out_proj) if _is_sparse(dense.out_proj) else dense.out_proj
            for key, parameter in projection.named_parameters(recurse=False):
                if key in new_module.out_proj._parameters:
                    setattr(new_module.out_proj, key, parameter)
            carry_over(dense.out_proj, new_module.out_proj, f"{name}.out_proj".lstrip("."))
        return carry_over(dense, new_module, name)


def _dense_weight(module: Any, is_transposed: bool, values: Tensor) -> Tensor:
    """Return values of a layer as the dense layer's weight."""
    weight: Tensor = module.dense_of(values)
    return weight.T.contiguous() if is_transposed else weight


def _dense_part(module: MultiWeightModule, key: str, tensor: Tensor) -> Tensor:
    """Return a tensor like the values (or the parameter) `key` of a module with several weights, in dense shape."""
    weight: Any = nn.Parameter(tensor, requires_grad=False)
    if isinstance(sparse := module._modules.get(key), Weight):
        values, weight = weight, copy.copy(sparse)
        weight._parameters = {"values": values}
    dense: nn.Parameter = getattr(module.with_weights({key: weight}).densified(), key)
    return dense.detach()
