"""Replaces modules of a model in place, above all dense ones by block-sparse ones."""

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
from ..nn.multi_weight import MultiWeightModule
from ..nn.multihead_attention import MultiheadAttention
from .blocks import pad, values_of
from .carry import carry_over, carry_parameter, hand_over_hooks
from .mixtures import is_experts
from .optimizer import check_optimizer, replace_parameter, trained_names, trainers_of
from .prunable import (
    CONV1D,
    CONVOLUTIONS,
    RECURRENT,
    TRANSPOSED,
    Prunable,
    find_weights,
    is_dense_recurrent,
    own_forward,
    qualified,
    reason_of_reference,
)
from .references import find_references, replace_references
from .sharding import is_dtensor, may_be_sharded, sharding

# Functions to call with a model after its modules were replaced; `integrations` adds one for transformers.
after_replacing: list[Callable[[nn.Module], None]] = []


@torch.no_grad()
def replace_with_sparse(
    model: nn.Module, layouts: Mapping[str, BlockLayout], optimizer: torch.optim.Optimizer | None = None
) -> nn.Module:
    """Replace dense weights of a model by block-sparse ones on these layouts, in place.

    Other parameters stay the same objects, except those of recurrent layers that need padding. A module with two
    parents is replaced in both. In the optimizer new parameters replace the old ones, and their state follows.

    Args:
        model: any module.
        layouts: the layouts, of the weights' padded shapes, by the names that `prunable` gives.
        optimizer: an optimizer that trains some of these weights, or None.

    Returns:
        The model. This is another object only if the model itself is the module that is replaced.
    """
    weights = find_weights(model, layouts)
    of_module: dict[nn.Module, list[tuple[Prunable, BlockLayout]]] = {}
    for name, weight in weights.items():
        of_module.setdefault(weight.module, []).append((weight, layouts[name]))
    # PyTorch's attention reads the weight of its output projection, so both are replaced together.
    of_module |= {
        module: []
        for module in model.modules()
        if type(module) is nn.MultiheadAttention and module.out_proj in of_module and module not in of_module
    }
    changes: list[ParameterChange] = []
    new = {module: _build_sparse_module(module, chosen, changes) for module, chosen in of_module.items()}
    check_changes(optimizer, changes)
    model = replace_modules(model, new)
    for change in changes:
        change.apply(optimizer)
    parameters: dict[Tensor, nn.Parameter] = {change.old: change.new for change in changes}
    for old, replacement in new.items():
        if may_be_sharded(old):
            sharding().hand_over(old, replacement, parameters)
    _avoid_fused_encoders(model)
    return model


def replace_modules(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules of a model, also in plain attributes and containers of its modules, and return the model.

    If a module of the user's raises an error, all is undone.
    """
    replaced: list[tuple[nn.Module, str, Any]] = []
    try:
        for name, module in list(model.named_modules(remove_duplicate=False)):
            replacement = new.get(module)
            if not name or replacement is None:
                continue
            parent, _, key = name.rpartition(".")
            holder = new.get(model, model).get_submodule(parent)
            if getattr(holder, key, None) is module:  # the parent's replacement may have other modules
                setattr(holder, key, replacement)
                replaced.append((holder, key, module))
    except BaseException:
        for holder, key, module in reversed(replaced):
            setattr(holder, key, module)
        raise
    model = new.get(model, model)
    replace_references(model, new)
    for old, replacement in new.items():
        hand_over_hooks(old, replacement)
    for call in after_replacing:
        call(model)
    return model


def check_replaceable(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Raise a BlockSparseError if one of these modules cannot be replaced by any other."""
    names = {module: name or "the model" for name, module in model.named_modules()}
    owners: dict[Any, nn.Module] = {}
    for module in modules:
        if why := own_forward(module):
            raise BlockSparseError(f"{names[module]} cannot be replaced: {why}")
        owners |= {each.values: module for each in module.modules() if isinstance(each, BlockSparseModule)}
        owners[module] = module
    for target, where in find_references(model, list(owners)).items():
        raise BlockSparseError(f"{names[owners[target]]} cannot be replaced: {reason_of_reference(where)}")


# -- one module --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterChange:
    """A parameter and its replacement.

    Args:
        name: the old parameter's name in the model.
        old, new: the parameters.
        convert: maps a tensor of the old shape, such as its optimizer state, to the new shape.
        grows: whether the new parameter has weights that did not exist before.
    """

    name: str
    old: nn.Parameter
    new: nn.Parameter
    convert: Callable[[Tensor], Tensor]
    grows: bool = False

    def apply(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Replace the parameter in its optimizers."""
        if optimizer is not None or trainers_of(self.old):
            absent = self.convert(torch.ones_like(self.old)) == 0 if self.grows else None
            replace_parameter(optimizer, self.old, self.new, self.convert, absent)


Chosen = Sequence[tuple[Prunable, BlockLayout]]


def sparse_module(chosen: Chosen) -> nn.Module:
    """Build the block-sparse counterpart of a module, which shares its other parameters."""
    return _build_sparse_module(chosen[0][0].module, chosen, [])


def _build_sparse_module(module: Any, chosen: Chosen, changes: list[ParameterChange]) -> nn.Module:
    """Build the counterpart of a module, and add the replaced parameters to `changes`."""
    layouts = {weight.parameter: layout for weight, layout in chosen}
    if is_dense_recurrent(module):
        return _fill_weights(module, _recurrent_without_values(module, chosen), chosen, changes)
    if type(module) is nn.MultiheadAttention:
        arguments = constructor_arguments(module, MultiheadAttention)
        attention = MultiheadAttention(**arguments, layouts=layouts, device="meta")
        attention.out_proj = module.out_proj
        return _fill_weights(module, attention, chosen, changes)
    if is_experts(module):
        count, hidden, intermediate = module.down_proj.shape
        experts = Experts(count, hidden, intermediate, module.act_fn, layouts=layouts, device="meta")
        return _fill_weights(module, experts, chosen, changes)
    if isinstance(module, MultiWeightModule):  # a copy in which these weights are block-sparse
        new = {w.parameter: _fill_weight(Weight(layout, "meta"), w, layout, changes) for w, layout in chosen}
        return module.with_weights(new)
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
    return carry_over(module, _fill_weight(new, weight, layout, changes), _name_of(chosen))


def _fill_weights(module: Any, new: Any, chosen: Chosen, changes: list[ParameterChange]) -> nn.Module:
    """Fill a counterpart on the meta device with the chosen weights' values and the module's other parameters."""
    weights = {weight.parameter: (weight, layout) for weight, layout in chosen}
    for key, old in module.named_parameters(recurse=False):
        if key in weights:
            _fill_weight(getattr(new, key), *weights[key], changes)
            continue
        if key not in new._parameters:  # a user added it
            continue
        shape = tuple(getattr(new, key).shape)
        if shape == tuple(old.shape):
            setattr(new, key, old)
        else:  # recurrent layers pad
            convert = partial(pad, shape=shape, parts=1 if key.startswith("weight_hr") else new.gates)
            padded = nn.Parameter(convert(old.detach()), requires_grad=old.requires_grad)
            setattr(new, key, carry_parameter(old, padded, convert))
            changes.append(ParameterChange(key, old, padded, convert))
    return carry_over(module, new, _name_of(chosen))


def _name_of(chosen: Chosen) -> str:
    """Return the name of the module with these weights; "" without weights."""
    return chosen[0][0].name.removesuffix(chosen[0][0].parameter).rstrip(".") if chosen else ""


def _recurrent_without_values(module: Any, chosen: Chosen) -> Any:
    """Build the counterpart of a recurrent layer on the meta device."""
    kind = RECURRENT.get(type(module), type(module))
    layouts = {weight.parameter: layout for weight, layout in chosen}
    new = kind(**constructor_arguments(module, kind), layouts=layouts, device="meta")
    for key, old in module.named_parameters(recurse=False):
        padded = new._parameters.get(key)  # None for a parameter that a user added
        if key not in layouts and padded is not None and padded.shape != old.shape and is_dtensor(old):
            name = f"{_name_of(chosen)}.{key}".lstrip(".")
            raise BlockSparseError(
                f"{name} would be padded from {list(old.shape)} to {list(padded.shape)}, but FSDP2 has sharded it: use "
                "blocks that divide hidden_size, or sparsify before fully_shard"
            )
    return new


def check_padding(weights: Iterable[Prunable]) -> None:
    """Raise a BlockSparseError if replacing these weights would pad another parameter that FSDP2 has sharded."""
    recurrent: dict[nn.Module, list[tuple[Prunable, BlockLayout]]] = {}
    for weight in weights:
        if is_dense_recurrent(weight.module):
            any_layout = BlockLayout.from_indices([0], [0], weight.grid, weight.block_shape)
            recurrent.setdefault(weight.module, []).append((weight, any_layout))
    for module, chosen in recurrent.items():
        _recurrent_without_values(module, chosen)


def constructor_arguments(module: nn.Module, kind: Callable[..., nn.Module]) -> dict[str, Any]:
    """Return the arguments with which a class of ours builds a module with the settings of this one."""
    names = signature(kind).parameters
    settings = {name: value for name, value in vars(module).items() if name in names}
    if isinstance(module, nn.MultiheadAttention | MultiheadAttention):
        settings |= {"bias": module.in_proj_bias is not None, "add_bias_kv": module.bias_k is not None}
    return settings


def _fill_weight(new: Any, weight: Prunable, layout: BlockLayout, changes: list[ParameterChange]) -> Any:
    """Fill a module on the meta device with the values of a dense weight on its layout, and return it.

    The replaced parameter is added to `changes`.
    """
    old, convert = weight.tensor, partial(values_of, weight.blocks, layout)
    values = nn.Parameter(convert(old.detach()), requires_grad=old.requires_grad)
    new.values = carry_parameter(old, values, lambda tensor: values_of(weight.blocks, new.layout, tensor))
    new.reset_layout_buffers(old.device)
    changes.append(ParameterChange(weight.name, old, new.values, convert))
    return new


def check_changes(optimizer: torch.optim.Optimizer | None, changes: Sequence[ParameterChange]) -> None:
    """Raise a BlockSparseError if the optimizer trains none of the parameters, or its state cannot follow."""
    if optimizer is None or not changes:
        return
    names = {change.name: change.old for change in changes}
    trained = trained_names(optimizer, names)
    for change in changes:
        if change.name in trained:
            check_optimizer(optimizer, change.old, change.name, replaced=True)


def _avoid_fused_encoders(model: nn.Module) -> None:
    """Turn off the fused inference of PyTorch's encoder layers, which reads weights of their linear layers directly."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if isinstance(module.linear1, Linear) or isinstance(module.linear2, Linear):
                module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
