"""Replaces dense weights of a model by block-sparse ones, in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..convert import from_dense
from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout
from ..nn.linear import Linear
from ..nn.lstm import LSTM
from ..nn.module import BlockSparseModule, Weight
from ..nn.recurrent import Recurrent
from .optimizer import check_state, has_parameter
from .prunable import (
    CONVOLUTIONS,
    TRANSPOSED,
    Prunable,
    Skip,
    as_matrix,
    is_dense_lstm,
    pad,
    parts_of,
    prunable,
    survey,
)

__all__ = ["Prunable", "Skip", "prunable", "replace_with_sparse", "survey"]


@torch.no_grad()
def replace_with_sparse(
    model: nn.Module, layouts: Mapping[str, BlockLayout], optimizer: torch.optim.Optimizer | None = None
) -> nn.Module:
    """Replaces dense modules by block-sparse ones with these layouts and the weights' values, in place.

    Other parameters, biases say, stay the same objects, but for those of an LSTM that has to be padded. A module that
    has two parents is exchanged in both. A new parameter takes the place of the old one in the optimizer's groups, with
    what the optimizer keeps for each weight.

    Args:
        model: any module.
        layouts: by the name of the weight, as `prunable` gives it; of its padded shape.
        optimizer: one that trains these weights, or some of them, or None.

    Returns:
        The model; another object only where the model itself is the module that is exchanged.

    Raises:
        BlockSparseError: a name without a weight that can become block-sparse, a layout of another shape, an
            optimizer that has none of the weights or keeps what cannot follow. Nothing is changed then.

    >>> import torch, blocksparse as bs
    >>> from blocksparse.surgery.replace import replace_with_sparse
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU())
    >>> replace_with_sparse(model, {"0.weight": bs.BlockLayout([[True, False]], block_size=32)})
    Sequential(
      (0): Linear(in_features=64, out_features=32, block_size=(32, 32), nnz=1, density=0.5, bias=True)
      (1): ReLU()
    )
    """
    weights = _weights_of(model, layouts)
    modules = dict.fromkeys(weight.module for weight in weights.values())
    changes: list[_Change] = []
    new = {
        module: _exchanged(
            module, {w.parameter: (w, layouts[n]) for n, w in weights.items() if w.module is module}, changes
        )
        for module in modules
    }
    _check_optimizer(optimizer, changes)
    for change in changes:
        change.apply(optimizer)
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child in new:
                parent._modules[key] = new[child]
    _avoid_fused_encoders(model)
    return new.get(model, model)


# -- one module --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    """A parameter and its replacement; `take` converts the state of the old one to that of the new one."""

    name: str
    old: nn.Parameter
    new: nn.Parameter
    take: Callable[[Tensor], Tensor]

    def apply(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None and has_parameter(optimizer, self.old):
            for group in optimizer.param_groups:
                group["params"] = [self.new if given is self.old else given for given in group["params"]]
            if self.old in optimizer.state:
                kept = optimizer.state.pop(self.old)
                optimizer.state[self.new] = {
                    key: self.take(each) if isinstance(each, Tensor) and each.shape == self.old.shape else each
                    for key, each in kept.items()
                }


Weights = Mapping[str, tuple[Prunable, BlockLayout]]


def _exchanged(module: nn.Module, weights: Weights, changes: list[_Change]) -> nn.Module:
    """The module with block-sparse weights, sharing its other parameters; what changes with them is listed."""
    if is_dense_lstm(module):
        return _lstm(module, weights, changes)
    if isinstance(module, Recurrent):
        new = copy.copy(module)
        new._parameters, new._modules = dict(module._parameters), dict(module._modules)
        for key, (weight, layout) in weights.items():
            del new._parameters[key]
            new._modules[key] = _filled(Weight(layout, "meta"), weight, layout, changes)
        return new
    ((weight, layout),) = weights.values()
    out, in_ = weight.matrix().shape[:2]
    options: dict[str, Any] = {"layout": layout, "bias": module.bias is not None, "device": "meta"}
    if type(module) in CONVOLUTIONS:
        names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
        settings = {name: getattr(module, name) for name in names}
        layer = CONVOLUTIONS[type(module)](in_, out, **settings, **options)
    elif type(module) in TRANSPOSED:
        names = ("kernel_size", "stride", "padding", "output_padding", "dilation")
        settings = {name: getattr(module, name) for name in names}
        layer = TRANSPOSED[type(module)](in_, out, **settings, **options)
    else:
        layer = Linear(in_, out, **options)
    layer.bias = module.bias
    return like(module, _filled(layer, weight, layout, changes))


def _lstm(module: nn.Module, weights: Weights, changes: list[_Change]) -> LSTM:
    names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size")
    settings = {name: getattr(module, name) for name in names}
    new = LSTM(**settings, layouts={key: layout for key, (_, layout) in weights.items()}, device="meta")
    for key, old in module.named_parameters(recurse=False):
        if key in weights:
            _filled(getattr(new, key), *weights[key], changes)
            continue
        shape = tuple(getattr(new, key).shape)
        if shape == tuple(old.shape):
            setattr(new, key, old)
        else:  # padded
            take = partial(pad, shape=shape, parts=parts_of(module, key))
            setattr(new, key, nn.Parameter(take(old.detach()), requires_grad=old.requires_grad))
            changes.append(_Change(key, old, getattr(new, key), take))
    return like(module, new)


def _filled(new: BlockSparseModule, weight: Prunable, layout: BlockLayout, changes: list[_Change]) -> BlockSparseModule:
    """A module on the meta device with the values that the weight has on the layout."""
    old = getattr(weight.module, weight.parameter)

    def take(tensor: Tensor) -> Tensor:
        return from_dense(pad(as_matrix(weight.module, tensor), weight.shape, weight._parts), layout)

    new.values = nn.Parameter(take(old.detach()), requires_grad=old.requires_grad)
    new.crow_indices = torch.empty(0, device=old.device)
    new.col_indices = torch.empty(0, device=old.device)
    new.reset_layout_buffers()
    changes.append(_Change(weight.name, old, new.values, take))
    return new


def like(module: nn.Module, new: Any) -> Any:
    """The new module, in the mode of the old one and with its hooks."""
    new.training = module.training
    for name in nn.Module().__dict__:
        if "hooks" in name and "state_dict" not in name:
            setattr(new, name, getattr(module, name))
    return new


def _weights_of(model: nn.Module, layouts: Mapping[str, BlockLayout]) -> dict[str, Prunable]:
    surveys: dict[tuple[int, int], dict[str, tuple[Prunable, str | None]]] = {}
    found = {}
    for name, layout in layouts.items():
        check_layout(layout)
        if layout.block_shape not in surveys:
            found_now = survey(model, layout.block_shape, empty=True)
            surveys[layout.block_shape] = {w.name: (w, reason) for w, reason in found_now}
        weight, reason = surveys[layout.block_shape].get(name, (None, "the model has none of this name"))
        if weight is None or reason is not None:
            raise BlockSparseError.expected("layouts", f"weights that can be block-sparse, not {name}", reason)
        if weight.shape != layout.shape:
            raise BlockSparseError.expected(f"the layout of {name}", f"shape {weight.shape}", repr(layout))
        found[name] = weight
    return found


def _check_optimizer(optimizer: torch.optim.Optimizer | None, changes: Sequence[_Change]) -> None:
    if optimizer is None or not changes:
        return
    trained = [change for change in changes if has_parameter(optimizer, change.old)]
    if not trained:
        what = f"one that has parameters of the model, {changes[0].name} say"
        raise BlockSparseError.expected("optimizer", what, type(optimizer).__name__)
    for change in trained:
        check_state(optimizer, change.old, change.name)


def _avoid_fused_encoders(model: nn.Module) -> None:
    """Turns off the fused inference of PyTorch's encoder layers, which reads the weights of their linear layers."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if isinstance(module.linear1, Linear) or isinstance(module.linear2, Linear):
                module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
