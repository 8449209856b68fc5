"""Removes the units that pruning left without inputs or outputs, so that a model gets smaller dense layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from ..checked import check_model
from ..errors import BlockSparseError, format_reasons, warn_user
from ..nn.quantized import QuantizedModule
from ..surgery.connections import FeatureGroup, Port, trace_features
from ..surgery.example_inputs import find_inputs
from ..surgery.feature_trace import RETURNED, FeatureTrace
from ..surgery.layer_rules import adds_constants
from ..surgery.model_tools import copy_model, evaluation_mode, split_arguments
from ..surgery.prunable import CONV1D, CONVOLUTIONS, TRANSPOSED, own_forward, qualified
from .densify import densify

# Relative difference of outputs that rounding of folded biases may cause, in units of the weights' precision.
TOLERANCE = 1e3


@torch.inference_mode(False)
@torch.no_grad()
def shrink(model: nn.Module, example: Any = None) -> nn.Module:
    """Return a smaller dense model with equal outputs, without the units that pruning left without a function.

    A unit is an output of a linear layer or a channel of a convolution. It is removed from the layers that write it,
    from those that read it and from batch norms in between if

    - no layer that reads it has a weight for it other than 0, or
    - no layer that writes it has one. Its constant value is then added to the biases of the layers that read it. A
      convolution that pads with zeros would not see a constant at the border, so there the unit stays unless it is 0.

    Between the layers may be activations, batch norms, depthwise convolutions, dropout, pools, `flatten`, sums and
    concatenations. Tensors that are added share their units, so these go only if all layers agree. Block-sparse layers
    become dense first, see `densify`. In evaluation mode the outputs are equal up to rounding.

    Attention by `torch.nn.functional.scaled_dot_product_attention` loses heads: a whole head, if the layer that reads
    it has no weight for it, or its values are constants. The model has to view queries, keys and values as heads by
    layers of their own and by -1, as in `view(batch, tokens, -1, 64)`, which most of transformers does;
    `torch.nn.MultiheadAttention` does not. If later calls have masks that hide all tokens from one, give an example
    with such a mask. Channels of grouped convolutions stay.

    Args:
        model: a dense or block-sparse model. It stays as it is.
        example: inputs to run it on: a tensor, a tuple or list of positional arguments or a dict of keyword arguments.
            A call on them shows which layer reads what, and the outputs of both models on them are compared. Branches
            of the model's code that the example does not take may fail later. Without an example, inputs that the model
            accepts are looked for by the sizes of its layers.

    Returns:
        The smaller model; modules of torch.nn, except for recurrent layers that stay ours. A SparsityWarning names
        layers whose units have no function but stay, with the reasons.

    Raises:
        BlockSparseError: not a module; layers in 8 bits; an example that the model does not accept; no example, and no
            inputs were found; outputs that would differ.

    >>> import torch, blocksparse as bs
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 100), torch.nn.ReLU(), torch.nn.Linear(100, 3))
    >>> with torch.no_grad():
    ...     _ = net[0].weight[:70].zero_()
    >>> bs.shrink(net, torch.randn(1, 8))
    Sequential(
      (0): Linear(in_features=8, out_features=30, bias=True)
      (1): ReLU()
      (2): Linear(in_features=30, out_features=3, bias=True)
    )
    """
    check_model(model)
    if quantized := [name or "it" for name, module in model.named_modules() if isinstance(module, QuantizedModule)]:
        raise BlockSparseError(
            f"model: layers in 8 bits cannot be shrunk ({', '.join(quantized[:3])}): shrink before blocksparse.quantize"
        )
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        raise BlockSparseError("model: some parameters are not initialized yet: call the model once first.")
    dense = densify(model)
    if example is None:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            example = find_inputs(dense)
    error, tolerance = _remove_useless_units(dense, example, heads=True)
    if not error <= tolerance:
        dense = densify(model)
        error, tolerance = _remove_useless_units(dense, example, heads=False)
    if not error <= tolerance:
        raise BlockSparseError.expected(
            "model",
            f"equal outputs on the example, within {tolerance:.2g}",
            f"a difference of {error:.2g}: the model depends on its numbers of units, for example by a view of fixed "
            "sizes (write -1 there, or shrink its parts one by one)",
        )
    return dense


def _remove_useless_units(model: nn.Module, example: Any, *, heads: bool) -> tuple[float, float]:
    """Remove units in place; return the relative difference of the outputs, and the tolerance for it.

    Args:
        model: a dense model.
        example: inputs for it.
        heads: whether to remove heads too. Errors then count as a difference: a model may depend on their number in
            ways that a trace does not see.
    """
    args, kwargs = split_arguments(example)
    with evaluation_mode(model):
        before, tolerance = _run(model, args, kwargs)
        try:
            while _remove_units(*(traced := trace_features(model, args, kwargs, for_removal=True)), heads=heads):
                pass
            error = _difference(before, _run(model, args, kwargs)[0])
        except Exception:  # the user's module may raise anything
            if not heads:
                raise
            return math.inf, tolerance
        if error <= tolerance and (useless := _useless(*traced, heads=heads)):
            lines = ["shrink: these layers keep units without a function", *format_reasons(useless)]
            warn_user("\n  ".join(lines))
    return error, tolerance


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
    """Return the outputs, in float64 if the model can, and the relative difference that rounding explains."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    precision = max((torch.finfo(dtype).eps for dtype in dtypes), default=1e-16)

    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    try:
        in_double = pytree.tree_map(double, (args, dict(kwargs)))
        return copy_model(model).double()(*in_double[0], **in_double[1]), TOLERANCE * precision
    except Exception:  # a model of the user's may compute in one dtype only
        try:
            return model(*args, **kwargs), 10 * TOLERANCE * precision
        except Exception as error:
            raise BlockSparseError.expected("example", "inputs that the model accepts", error) from error


def _difference(ours: Any, theirs: Any) -> float:
    """Return the greatest relative difference of the tensors in two results, inf if their shapes differ."""
    pairs = [
        [each.double() for each in pytree.tree_leaves(result) if isinstance(each, Tensor) and not each.is_complex()]
        for result in (ours, theirs)
    ]
    if len(pairs[0]) != len(pairs[1]):
        return math.inf
    errors = [0.0]
    for one, other in zip(*pairs, strict=True):
        if one.shape != other.shape or not torch.equal(one.isnan(), other.isnan()):
            return math.inf
        one, other = one.nan_to_num(), other.nan_to_num()
        scale = float(one.abs().max()) if one.numel() else 1.0
        difference = float((one - other).abs().max()) if one.numel() else 0.0
        errors.append(difference / max(scale, 1e-12))
    return max(errors)


def _remove_units(groups: list[FeatureGroup], trace: FeatureTrace, *, heads: bool) -> bool:
    """Remove the units that no layer needs, except for one per group; return whether anything was removed."""
    keys_of = _attentions(groups) if heads else {}
    removed: dict[FeatureGroup, Tensor] = {}
    for group in groups:
        if group.consumers and _obstacle(group, trace, keys_of) is None:
            removed[group] = _removable(group)
            if keys := keys_of.get(group):
                unneeded = np.setdiff1d(group.sections, group.sections[~removed[group].numpy()])
                unneeded = unneeded[len(unneeded) == len(set(group.sections)) :]  # one stays
                removed[group], removed[keys] = (
                    torch.from_numpy(np.isin(each.sections, unneeded)) for each in (group, keys)
                )
            removed[group][0] &= not removed[group].all()
    for group, units in removed.items():
        for port in group.consumers:
            _add_constants(port, units)
    deleted: dict[tuple[Any, str, int], set[int]] = {}
    for group, units in removed.items():
        for port in group.ports if units.any() else ():
            axes = {_name_of(port.module, tensor): axis for tensor, axis in port.tensors}
            if port in group.producers and port.module.bias is not None:  # it may be new
                axes["bias"] = 0
            for name, axis in axes.items():
                lines = port.positions[units.numpy()].ravel().tolist()
                deleted.setdefault((port.module, name, axis), set()).update(lines)
    for (module, name, axis), lines in deleted.items():
        _delete(module, name, axis, lines)
    return bool(deleted)


def _attentions(groups: list[FeatureGroup]) -> dict[FeatureGroup, FeatureGroup]:
    """Return the queries and keys of each group of values that may lose the same heads."""
    found: dict[FeatureGroup, FeatureGroup] = {}
    for values in groups:
        others = [each for each in groups if each is not values and each.attention == values.attention]
        if values.attention is None or not values.consumers or len(others) != 1:
            continue
        (keys,) = others
        if not keys.consumers and np.array_equal(np.unique(keys.sections), np.unique(values.sections)):
            found[values] = keys
    return found


def _removable(group: FeatureGroup) -> Tensor:
    """Return which units no layer needs, bool `[units]`."""
    unneeded = torch.ones(group.size, dtype=torch.bool, device="cpu")
    for port in group.consumers:
        constants = (
            port.constants if port.constants is not None else torch.full(port.positions.shape, torch.nan, device="cpu")
        )
        is_known = ~constants.isnan() & (adds_constants(port.module) | (constants == 0))
        unneeded &= _is_zero(port) | is_known.all(1)
    return unneeded


def _is_zero(port: Port) -> Tensor:
    """Return for which units a layer has only weights of 0, bool `[units]`."""
    weight, axis = port.tensors[0]
    zero = (weight.detach() == 0).movedim(axis, 0).flatten(1).all(1).cpu()
    return zero[torch.from_numpy(port.positions)].all(1)


def _add_constants(port: Port, removed: Tensor) -> None:
    """Add the constant inputs that are removed to a layer's bias."""
    if port.constants is None:
        return
    module: Any = port.module
    weight, axis = port.tensors[0]
    constants = torch.zeros(weight.shape[axis], dtype=torch.float64, device="cpu")
    constants[torch.from_numpy(port.positions[removed.numpy()])] = port.constants[removed].nan_to_num(0)
    added = weight.detach().double().movedim(axis, 1).unsqueeze(2).flatten(2).sum(2) @ constants.to(weight.device)
    if not added.any():
        return
    if module.bias is None:
        module.bias = nn.Parameter(added.to(weight.dtype), requires_grad=weight.requires_grad)
    else:
        module.bias.copy_(module.bias.double() + added)


def _name_of(module: nn.Module, tensor: Tensor) -> str:
    """Return the name of a parameter or buffer in its module."""
    return next(name for name, each in (module._parameters | module._buffers).items() if each is tensor)


def _delete(module: Any, name: str, axis: int, lines: set[int]) -> None:
    """Delete lines of a parameter or buffer, and set the sizes of its module."""
    tensor = getattr(module, name)
    stays = torch.from_numpy(np.setdiff1d(np.arange(tensor.shape[axis]), list(lines)))
    chosen = tensor.detach().index_select(axis, stays.to(tensor.device))
    if not isinstance(tensor, nn.Parameter):
        setattr(module, name, chosen)
        return
    setattr(module, name, nn.Parameter(chosen, requires_grad=tensor.requires_grad))
    if name != "weight":
        return
    sizes: dict[str, int] = {"num_features": len(chosen)}
    if _is_layer(module):
        is_transposed = type(module) in TRANSPOSED or qualified(type(module)) == CONV1D
        outputs, inputs = reversed(chosen.shape[:2]) if is_transposed else chosen.shape[:2]
        if getattr(module, "groups", 1) > 1:  # depthwise
            outputs = inputs = len(chosen)
            sizes["groups"] = outputs
        sizes |= {"out_features": outputs, "out_channels": outputs, "nf": outputs}
        sizes |= {"in_features": inputs, "in_channels": inputs, "nx": inputs}
    for key in sizes.keys() & vars(module).keys():
        setattr(module, key, sizes[key])


def _is_layer(module: nn.Module) -> bool:
    """Return whether the module is a layer that can lose units."""
    return type(module) in (nn.Linear, *CONVOLUTIONS, *TRANSPOSED) or qualified(type(module)) == CONV1D


def _obstacle(group: FeatureGroup, trace: FeatureTrace, keys_of: Mapping[FeatureGroup, FeatureGroup]) -> str | None:
    """Return why no unit of a group may be removed, or None. Values of attention share obstacles with their keys."""
    both = [group, *(each for pair in keys_of.items() if group in pair for each in pair if each is not group)]
    reasons = (reason for each in both for port in each.ports if (reason := _obstacle_of_module(port.module, trace)))
    of_group = (reason for each in both if (reason := each.excluded or each.unremovable))
    alone = "attention reads them" if group.attends and len(both) == 1 else None
    return next(reasons, None) or next(of_group, None) or alone


def _obstacle_of_module(module: nn.Module, trace: FeatureTrace) -> str | None:
    """Return why a module must keep its weights, or None."""
    if not (_is_layer(module) or isinstance(module, _BatchNorm)):
        return f"{trace.names[module] or 'the model'} ({type(module).__name__}) reads them"
    if own := own_forward(module):
        return own
    if "weight" not in module._parameters or "bias" not in module._parameters:
        return "its weight is computed in each call: remove the parametrization first"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks"
    return "the model calls it several times" if trace.calls[module] > 1 else None


def _useless(groups: list[FeatureGroup], trace: FeatureTrace, *, heads: bool) -> dict[str, str]:
    """Return why units without a function stay, by the name of a layer that writes them."""
    reasons: dict[str, str] = {}
    keys_of = _attentions(groups) if heads else {}
    for group in groups:
        reason = _obstacle(group, trace, keys_of)
        if reason is None and group.attends:
            reason = "attention loses whole heads only, and none with constants that a mask may hide"
        if reason == RETURNED:
            continue
        useless = torch.stack([_is_zero(port) for port in group.producers if port.tensors]).all(0)
        if group.consumers:
            useless |= torch.stack([_is_zero(port) for port in group.consumers]).all(0)
        if not reason:
            padded = ", ".join(port.name for port in group.consumers if not adds_constants(port.module))
            if not padded:
                continue
            reason = f"they are constants that {padded}, padded or transposed, would not add to all outputs"
        if count := int(useless.sum()):
            named = [port.name for port in group.producers if _obstacle_of_module(port.module, trace) == reason]
            name = (named or [port.name for port in group.producers])[0] or "the model"
            reasons[name] = f"{count} of {group.size} units: {reason}"
    written = {port.module for group in groups for port in group.producers}
    for module, name in trace.names.items():  # layers whose weights are no parameters are in no group
        reason = _obstacle_of_module(module, trace) if _is_layer(module) and module not in written else None
        if reason and (count := int((module.weight == 0).flatten(1).all(1).sum())):
            reasons[name] = f"{count} of {len(module.weight)} units: {reason}"
    return reasons
