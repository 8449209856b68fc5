"""Replaces the block-sparse modules of a model by dense ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BlockSparseError
from ..nn.layout_module import LayoutModule
from ..nn.linear import Linear
from ..nn.lstm import LSTM
from ..nn.module import Weight, check_parameters
from ..nn.multi_weight import MultiWeightModule
from ..nn.multihead_attention import MultiheadAttention
from ..nn.quantized import QuantizedLinear
from ..nn.quantized_conv import QuantizedConv
from ..nn.quantized_lstm import QuantizedWeight
from ..nn.weight_norm import WeightNorm
from ..surgery.carry import carry_over, carry_parameter, own_names
from ..surgery.model_tools import copy_model
from ..surgery.prunable import CONVOLUTIONS, RECURRENT, TRANSPOSED
from ..surgery.replace import _Change, _check_optimizer, check_replaceable, replace_modules, settings_of

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
DENSE: dict[Any, Any] = {Linear: nn.Linear}
# With several weights; LSTMs stay ours, which are as fast, or faster where they are trained.
SEVERAL: dict[Any, Any] = {ours: theirs for theirs, ours in RECURRENT.items() if ours is not LSTM}
SEVERAL |= {MultiheadAttention: nn.MultiheadAttention}
DENSE |= {ours: theirs for theirs, ours in (*CONVOLUTIONS.items(), *TRANSPOSED.items())}
QUANTIZED = QuantizedLinear, QuantizedConv
Take = Callable[[Tensor], Tensor]


@torch.no_grad()
def densify(model: nn.Module, inplace: bool = False, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Replaces block-sparse modules by dense ones that compute the same, with zeros where no block was stored.

    Linear layers, convolutions, attention, GRUs, RNNs and cells become those of torch.nn, with an activation that was
    fused behind a layer as a module of its own. Other recurrent layers stay those of `blocksparse.nn`, dense: there the
    parameters of an LSTM and their names are those of torch.nn.LSTM. Biases stay the same objects, and tied weights
    stay tied. Hooks, attributes, buffers and modules that a user put on a layer go along, and so do hooks and
    attributes of its values.

    Args:
        model: with block-sparse modules, from `sparsify` or built by hand.
        inplace: whether the model itself is changed, instead of a copy.
        optimizer: in place, the one that trains the model: it resumes with the new parameters, and with what it keeps
            for each weight.

    Returns:
        The model; in place another object only where the model itself is one such module.

    Raises:
        BlockSparseError: no module, one on the meta device, or with a block-sparse layer that has no dense counterpart:
            one of a class of the user's, with a forward of its own, or whose values are computed from other parameters;
            a layer that the model also uses by other ways than its modules, a closure for example; tied values that
            make different weights; an optimizer without `inplace` or without the values. Nothing is changed then.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.Linear(100, 60, density=0.25)
    >>> dense = bs.densify(layer)
    >>> x = torch.randn(5, 100)
    >>> dense, torch.allclose(dense(x), layer(x), atol=1e-5)
    (Linear(in_features=100, out_features=60, bias=True), True)
    """
    if not isinstance(model, nn.Module):
        raise BlockSparseError.expected("model", "a torch.nn.Module", type(model).__name__)
    if optimizer is not None and not inplace:
        raise BlockSparseError(
            "optimizer= requires inplace=True; without it, a copy is returned that the optimizer does not train."
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise BlockSparseError.expected("model", "parameters with values", f"{name} on the meta device")
    for name, module in model.named_modules():
        if isinstance(module, LayoutModule):
            check_parameters(module, name or "model")
            if not isinstance(module, Weight | QuantizedWeight) and not _is_sparse(module):
                kind = type(module).__name__
                raise BlockSparseError.expected(name or "model", "a layer of one of blocksparse.nn's own classes", kind)
    check_replaceable(model, [module for module in model.modules() if _is_sparse(module)])
    model = model if inplace else copy_model(model, otherwise="inplace=True")
    densifier = _Densifier(model)
    new = {module: densifier.dense(module) for module in model.modules() if _is_sparse(module)}
    densifier.check_ties(new)
    _check_optimizer(optimizer, densifier.changes)
    model = replace_modules(model, new)
    for change in densifier.changes:
        change.apply(optimizer)
    return model


def _is_sparse(module: nn.Module) -> bool:
    if isinstance(module, WeightNorm):
        return _is_sparse(module.module)
    if isinstance(module, MultiWeightModule):
        return type(module) in SEVERAL or any(isinstance(child, LayoutModule) for child in module.children())
    return type(module) in DENSE or isinstance(module, QUANTIZED)


class _Densifier:
    """Makes the dense counterparts of a model's modules, and notes which parameters take the places of others.

    The modules are left as they are.
    """

    def __init__(self, model: nn.Module):
        self._names = {module: name for name, module in model.named_modules()}
        self._changes: dict[Tensor, tuple[_Change, Any]] = {}

    @property
    def changes(self) -> list[_Change]:
        """The parameters that others take the places of."""
        return [change for change, _ in self._changes.values()]

    def dense(self, module: Any) -> nn.Module:
        """The dense counterpart of a module."""
        name = self._names.get(module, "")
        if isinstance(module, MultiWeightModule):
            return self._with_several_weights(module, name)
        if isinstance(module, QUANTIZED):
            return self.dense(carry_over(module, module.dequantized(), name))
        layer: Any = module.module if isinstance(module, WeightNorm) else module
        new = self._layer(layer) if layer is module else self._normed(module)
        if not layer.activation:
            return carry_over(module, new, name)
        if others := module._modules.keys() - own_names(type(module)):
            expected = "layers with an activation without modules of a user, which nn.Sequential would call"
            raise BlockSparseError.expected(f"{name}.{min(others)}".lstrip("."), expected, "one")
        # What is called with the outputs gets them behind the activation, as before.
        return carry_over(module, nn.Sequential(new, ACTIVATIONS[layer.activation]()).train(module.training), name)

    def check_ties(self, new: Mapping[nn.Module, nn.Module]) -> None:
        """Raises a BlockSparseError where a module that stays has one of the parameters that are replaced."""
        replaced = {part for module in new for part in module.modules()}
        for module, name in self._names.items():
            for key, parameter in module.named_parameters(recurse=False) if module not in replaced else ():
                if parameter in self._changes:
                    other = self._changes[parameter][0].name
                    expected = f"a parameter of its own: {other}, to which it is tied, becomes dense (untie them first)"
                    raise BlockSparseError.expected(f"{name}.{key}".lstrip("."), expected, "one with blocks")

    def _parameter(self, name: str, old: nn.Parameter, new: Tensor, take: Take, key: Any) -> nn.Parameter:
        """The dense parameter in the place of another one: for tied ones the same.

        Args:
            name: of the old one in the model.
            new: what it becomes.
            take: makes that of it.
            key: what says how; tied ones need the same.
        """
        if old not in self._changes:
            made = carry_parameter(old, nn.Parameter(new.detach(), requires_grad=old.requires_grad), take)
            self._changes[old] = _Change(name, old, made, take, grows=True), key
        change, known = self._changes[old]
        if known != key:
            expected = f"the same layout and sizes as {change.name}, to which it is tied (or untie them first)"
            raise BlockSparseError.expected(name, expected, "others")
        return change.new

    def _layer(self, module: Any) -> Any:
        """The dense layer, without the activation behind it."""
        kind, name = DENSE[type(module)], self._names.get(module, "")
        options: dict[str, Any] = {"bias": module.bias is not None, "device": "meta"}
        in_first = kind is nn.Linear and module.dense_kind is not None and not module.activation
        if in_first:
            new: Any = module.dense_kind(module.out_features, module.in_features)
        elif kind is nn.Linear:
            new = nn.Linear(module.in_features, module.out_features, **options)
        else:
            names = {"stride", "padding", "dilation", "output_padding", "padding_mode"} & module.__dict__.keys()
            settings = {name: getattr(module, name) for name in names}
            new = kind(module.in_channels, module.out_channels, module.kernel_size, **settings, **options)
        take = partial(_dense_weight, module, in_first)
        weight = take(module.values.detach())
        key = module.layout, kind, in_first, weight.shape
        new.weight = self._parameter(f"{name}.values".lstrip("."), module.values, weight, take, key)
        new.bias = module.bias
        return new.train(module.training)

    def _normed(self, module: WeightNorm) -> nn.Module:
        """A `WeightNorm` of the dense layer, with the gains of what is no padding."""
        layer = module.module
        new = WeightNorm(carry_over(layer, self._layer(layer), self._names.get(layer, "")), module.scale)
        gain, outputs = module.gain, len(new.gain)
        if len(gain) != outputs:
            name = f"{self._names.get(module, '')}.gain".lstrip(".")
            gain = self._parameter(name, gain, gain[:outputs].clone(), lambda old: old[:outputs].clone(), outputs)
        new.gain = gain
        return new

    def _with_several_weights(self, module: Any, name: str) -> nn.Module:
        """The module with dense weights, or PyTorch's in its place."""
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
        made = kind(**settings_of(dense, type(dense)), device="meta")
        for key, parameter in dense.named_parameters(recurse=False):
            if key in made._parameters:
                setattr(made, key, parameter)
        if kind is nn.MultiheadAttention:
            projection = self.dense(dense.out_proj) if _is_sparse(dense.out_proj) else dense.out_proj
            for key, parameter in projection.named_parameters(recurse=False):
                if key in made.out_proj._parameters:
                    setattr(made.out_proj, key, parameter)
            carry_over(dense.out_proj, made.out_proj, f"{name}.out_proj".lstrip("."))
        return carry_over(dense, made, name)


def _dense_weight(module: Any, in_first: bool, values: Tensor) -> Tensor:
    """Values of a layer as the dense layer's weight."""
    weight: Tensor = module.dense_of(values)
    return weight.T.contiguous() if in_first else weight


def _dense_part(module: MultiWeightModule, key: str, tensor: Tensor) -> Tensor:
    """A tensor like the values, or the parameter, of this name of a module with several weights, as the dense one's."""
    part: Any = nn.Parameter(tensor, requires_grad=False)
    if isinstance(weight := module._modules.get(key), Weight):
        values, part = part, copy.copy(weight)
        part._parameters = {"values": values}
    dense: nn.Parameter = getattr(module.with_weights({key: part}).densified(), key)
    return dense.detach()
