"""Replaces dense weights of a model by block-sparse ones, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..nn.experts import Experts
from ..nn.linear import Linear
from ..nn.module import BlockSparseModule, Weight
from ..nn.multihead_attention import MultiheadAttention
from .blocks import pad, values_of
from .carry import carry_over, carry_parameter, hand_over_hooks, own_forward
from .mixtures import is_experts
from .optimizer import check_optimizer, replace_parameter, trained_names, trainers_of
from .prunable import (
    CONV1D,
    CONVOLUTIONS,
    RECURRENT,
    TRANSPOSED,
    Prunable,
    Skip,
    has_several_weights,
    held_by,
    is_dense_recurrent,
    prunable,
    qualified,
    survey,
    weights_of,
)
from .references import held_elsewhere, replace_held
from .sharding import is_dtensor, may_be_sharded, sharding

__all__ = [
    "Prunable",
    "Skip",
    "after_replacing",
    "prunable",
    "replace_modules",
    "replace_with_sparse",
    "sparse_module",
    "survey",
]

# Called with a model of which modules were replaced, so that other libraries can be told; see `integrations`.
after_replacing: list[Callable[[nn.Module], None]] = []


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
    """
    weights = weights_of(model, layouts)
    of_module: dict[nn.Module, list[tuple[Prunable, BlockLayout]]] = {}
    for name, weight in weights.items():
        of_module.setdefault(weight.module, []).append((weight, layouts[name]))
    # PyTorch's attention reads the weight of its output's projection itself.
    of_module |= {
        module: []
        for module in model.modules()
        if type(module) is nn.MultiheadAttention and module.out_proj in of_module and module not in of_module
    }
    changes: list[_Change] = []
    new = {module: _sparse_module(module, chosen, changes) for module, chosen in of_module.items()}
    _check_optimizer(optimizer, changes)
    model = replace_modules(model, new)
    for change in changes:
        change.apply(optimizer)
    taken: dict[Tensor, nn.Parameter] = {change.old: change.new for change in changes}
    for old, replacement in new.items():
        if may_be_sharded(old):
            sharding().hand_over(old, replacement, taken)
    _avoid_fused_encoders(model)
    return model


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Puts modules in the places of others, in plain attributes and containers of the model's modules too.

    Undoes it where a module of the user's refuses one, with any error.
    """
    replaced: list[tuple[nn.Module, str, Any]] = []
    try:
        for name, module in list(model.named_modules(remove_duplicate=False)):
            taking = new.get(module)
            if not name or taking is None:
                continue
            parent, _, key = name.rpartition(".")
            holder = new.get(model, model).get_submodule(parent)
            if getattr(holder, key, None) is module:  # what took the parent's place may have others in it
                setattr(holder, key, taking)
                replaced.append((holder, key, module))
    except BaseException:
        for holder, key, module in reversed(replaced):
            setattr(holder, key, module)
        raise
    model = new.get(model, model)
    replace_held(model, new)
    for old, taking in new.items():
        hand_over_hooks(old, taking)
    for call in after_replacing:
        call(model)
    return model


def check_replaceable(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Raises a BlockSparseError where another module cannot take the place of one of these, whichever it is."""
    names = {module: name or "the model" for name, module in model.named_modules()}
    parts: dict[Any, nn.Module] = {}
    for module in modules:
        if why := own_forward(module):
            raise BlockSparseError(f"{names[module]} cannot be replaced: {why}")
        parts |= {each.values: module for each in module.modules() if isinstance(each, BlockSparseModule)}
        parts[module] = module
    for part, where in held_elsewhere(model, list(parts)).items():
        raise BlockSparseError(f"{names[parts[part]]} cannot be replaced: {held_by(where)}")


# -- one module --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    """A parameter and its replacement; `take` converts the state of the old one to that of the new one."""

    name: str
    old: nn.Parameter
    new: nn.Parameter
    take: Callable[[Tensor], Tensor]
    grows: bool = False
    """Whether the new parameter has weights that did not exist before."""

    def apply(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None or trainers_of(self.old):
            absent = self.take(torch.ones_like(self.old)) == 0 if self.grows else None
            replace_parameter(optimizer, self.old, self.new, self.take, absent)


Chosen = Sequence[tuple[Prunable, BlockLayout]]


def sparse_module(chosen: Chosen) -> nn.Module:
    """Makes the block-sparse counterpart of a module, which shares its other parameters."""
    return _sparse_module(chosen[0][0].module, chosen, [])


def _sparse_module(module: Any, chosen: Chosen, changes: list[_Change]) -> nn.Module:
    layouts = {weight.parameter: layout for weight, layout in chosen}
    if is_dense_recurrent(module):
        return _filled_several(module, _unfilled_recurrent(module, chosen), chosen, changes)
    if type(module) is nn.MultiheadAttention:
        attention = MultiheadAttention(**settings_of(module, MultiheadAttention), layouts=layouts, device="meta")
        attention.out_proj = module.out_proj
        return _filled_several(module, attention, chosen, changes)
    if is_experts(module):
        count, hidden, intermediate = module.down_proj.shape
        experts = Experts(count, hidden, intermediate, module.act_fn, layouts=layouts, device="meta")
        return _filled_several(module, experts, chosen, changes)
    if has_several_weights(module):  # ours, of which some more become block-sparse: a copy, with all else
        return module.with_weights(
            {weight.parameter: _filled(Weight(layout, "meta"), weight, layout, changes) for weight, layout in chosen}
        )
    ((weight, layout),) = chosen
    rows, columns = weight.blocks.size_of_matrix
    options: dict[str, Any] = {"layout": layout, "bias": module.bias is not None, "device": "meta"}
    kind: Any = CONVOLUTIONS.get(type(module)) or TRANSPOSED.get(type(module)) or Linear
    if kind is not Linear:
        last = "output_padding" if type(module) in TRANSPOSED else "padding_mode"
        options |= {name: getattr(module, name) for name in ("kernel_size", "stride", "padding", "dilation", last)}
    new = kind(columns, rows, **options)
    new.bias = module.bias
    if qualified(type(module)) == CONV1D:
        new.dense_kind = type(module)
    return carry_over(module, _filled(new, weight, layout, changes), _name_of(chosen))


def _filled_several(module: Any, new: Any, chosen: Chosen, changes: list[_Change]) -> nn.Module:
    """A counterpart with several weights, on the meta device, with the chosen ones' values and the other parameters."""
    weights = {weight.parameter: (weight, layout) for weight, layout in chosen}
    for key, old in module.named_parameters(recurse=False):
        if key in weights:
            _filled(getattr(new, key), *weights[key], changes)
            continue
        if key not in new._parameters:  # one of the user's
            continue
        shape = tuple(getattr(new, key).shape)
        if shape == tuple(old.shape):
            setattr(new, key, old)
        else:  # padded, of a recurrent layer
            take = partial(pad, shape=shape, parts=1 if key.startswith("weight_hr") else new.gates)
            padded = nn.Parameter(take(old.detach()), requires_grad=old.requires_grad)
            setattr(new, key, carry_parameter(old, padded, take))
            changes.append(_Change(key, old, padded, take))
    return carry_over(module, new, _name_of(chosen))


def _name_of(chosen: Chosen) -> str:
    """The name of the module that has these weights, if any."""
    return chosen[0][0].name.removesuffix(chosen[0][0].parameter).rstrip(".") if chosen else ""


def _unfilled_recurrent(module: Any, chosen: Chosen) -> Any:
    kind = RECURRENT.get(type(module), type(module))
    layouts = {weight.parameter: layout for weight, layout in chosen}
    new = kind(**settings_of(module, kind), layouts=layouts, device="meta")
    for key, old in module.named_parameters(recurse=False):
        made = new._parameters.get(key)  # None where it is one of the user's
        if key not in layouts and made is not None and made.shape != old.shape and is_dtensor(old):
            name = f"{_name_of(chosen)}.{key}".lstrip(".")
            expected = f"{list(made.shape)}, whole blocks, as FSDP2 has sharded it (by blocks that divide hidden_size)"
            raise BlockSparseError.expected(name, expected, list(old.shape))
    return new


def check_padding(weights: Iterable[Prunable]) -> None:
    """Raises a BlockSparseError where replacing all these weights would pad another that FSDP2 has sharded."""
    recurrent: dict[nn.Module, list[tuple[Prunable, BlockLayout]]] = {}
    for weight in weights:
        if is_dense_recurrent(weight.module):
            any_layout = BlockLayout.from_indices([0], [0], weight.grid, weight.block_shape)
            recurrent.setdefault(weight.module, []).append((weight, any_layout))
    for module, chosen in recurrent.items():
        _unfilled_recurrent(module, chosen)


def settings_of(module: nn.Module, kind: Callable[..., nn.Module]) -> dict[str, Any]:
    """The arguments of a class of ours with several weights for one that is as the module, PyTorch's or ours."""
    names = signature(kind).parameters
    settings = {name: value for name, value in vars(module).items() if name in names}
    if isinstance(module, nn.MultiheadAttention | MultiheadAttention):
        settings |= {"bias": module.in_proj_bias is not None, "add_bias_kv": module.bias_k is not None}
    return settings


def _filled(new: Any, weight: Prunable, layout: BlockLayout, changes: list[_Change]) -> Any:
    """A module on the meta device with the values that the weight has on the layout."""
    old, take = weight.tensor, partial(values_of, weight.blocks, layout)
    values = nn.Parameter(take(old.detach()), requires_grad=old.requires_grad)
    new.values = carry_parameter(old, values, lambda tensor: values_of(weight.blocks, new.layout, tensor))
    new.reset_layout_buffers(old.device)
    changes.append(_Change(weight.name, old, new.values, take))
    return new


def _check_optimizer(optimizer: torch.optim.Optimizer | None, changes: Sequence[_Change]) -> None:
    if optimizer is None or not changes:
        return
    names = {change.name: change.old for change in changes}
    trained = trained_names(optimizer, names)
    for change in changes:
        if change.name in trained:
            check_optimizer(optimizer, change.old, change.name, replaced=True)


def _avoid_fused_encoders(model: nn.Module) -> None:
    """Turns off the fused inference of PyTorch's encoder layers, which reads the weights of their linear layers."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if isinstance(module.linear1, Linear) or isinstance(module.linear2, Linear):
                module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
