"""Removes the units that pruning left without inputs or outputs, so that a model gets smaller dense layers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import BlockSparseError, SparsityWarning, format_reasons
from ..nn.quantized import QuantizedModule
from ..surgery.model_tools import copy_model, evaluation_mode
from ..surgery.trace import greatest_difference, trace_example, trace_symbolically
from ..surgery.units import (
    RETURNED,
    Analysis,
    Features,
    Units,
    adds_constants,
    is_layer,
    is_transposed,
    stored_weights,
    weight_by_units,
)
from .densify import densify
from .speed import call_arguments

# Relative difference of outputs that rounding of folded biases may cause, in units of the weights' precision.
TOLERANCE = 1e3


@torch.no_grad()
def shrink(model: nn.Module, example: Any = None) -> nn.Module:
    """Return a smaller dense model with equal outputs, without the units that pruning left without a function.

    A unit is an output of a linear layer or a channel of a convolution. It is removed from the layers that write it,
    from those that read it and from batch norms in between if

    - no layer that reads it has a weight for it other than 0, or
    - no layer that writes it has one. Its constant value is then added to the biases of the layers that read it. A
      convolution that pads with zeros would not see a constant at the border, so there the unit stays unless it is 0.

    Between the layers may be activations, batch norms, dropout, pools, `flatten` and sums. Tensors that are added share
    their units, so these go only if all layers agree. Block-sparse layers become dense first, see `densify`. In
    evaluation mode the outputs are equal up to rounding. Heads of attention stay.

    Args:
        model: a dense or block-sparse model. It stays as it is.
        example: inputs to run it on: a tensor, a tuple or list of positional arguments or a dict of keyword arguments.
            They find out which layer reads what, and the outputs of both models on them are compared. Without an
            example, torch.fx traces the model with batches of inputs and the default values of optional arguments.

    Returns:
        The smaller model; modules of torch.nn, except for recurrent layers that stay ours. A SparsityWarning names
        layers whose units have no function but stay, with the reasons.

    Raises:
        BlockSparseError: not a module; layers in 8 bits; a model that torch.fx cannot trace without an example; an
            example that the model does not accept; outputs that would differ.

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
    if not isinstance(model, nn.Module):
        raise BlockSparseError.expected("model", "a torch.nn.Module", type(model).__name__)
    if quantized := [name or "it" for name, module in model.named_modules() if isinstance(module, QuantizedModule)]:
        raise BlockSparseError(
            f"model: layers in 8 bits cannot be shrunk ({', '.join(quantized[:3])}): shrink before blocksparse.quantize"
        )
    dense = densify(model)
    with evaluation_mode(dense):
        args, kwargs = call_arguments(example)
        if example is None:
            trace, before = trace_symbolically(dense), None
        else:
            before, tolerance = _run(dense, args, kwargs)
            trace = trace_example(dense, args, kwargs)
        while _remove_units(Analysis(dense, trace)):
            pass
        if before is not None:
            error = greatest_difference(before, _run(dense, args, kwargs)[0])
            if not error <= tolerance:
                raise BlockSparseError.expected(
                    "model", f"equal outputs on the example, within {tolerance:.2g}", f"a difference of {error:.2g}"
                )
        if left := _left(Analysis(dense, trace)):
            lines = ["shrink: these layers keep units without a function", *format_reasons(left)]
            warnings.warn("\n  ".join(lines), SparsityWarning, stacklevel=3)
    return dense


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


def _remove_units(analysis: Analysis) -> bool:
    """Remove units up to a change of biases, which the analysis does not know; return whether anything changed."""
    changed = False
    for units in analysis.groups():
        removed, folded = _remove(units)
        changed |= removed
        if folded:
            break
    return changed


def _removable(units: Units) -> Tensor:
    """Return which units no layer needs, bool `[units]`."""
    unneeded = torch.ones(units.size, dtype=torch.bool)
    for module, x in units.consumers:
        constant = x.constant if adds_constants(module) else x.constant.masked_fill(x.constant != 0, torch.nan)
        unneeded &= _unread(module, x) | ~constant.isnan()
    return unneeded


def _unread(module: Any, x: Features) -> Tensor:
    """Return for which units a layer has only weights of 0, bool `[units]`."""
    zero = ~stored_weights(module).any(2).any(0).cpu()
    return zero.view(x.units.size, -1).all(1)


def _remove(units: Units) -> tuple[bool, bool]:
    """Remove the units that no layer needs, but leave one; return whether anything changed, and whether biases did."""
    if units.reason or not units.consumers:
        return False, False
    keep = ~_removable(units)
    if not keep.any():
        keep[0] = True
    if keep.all():
        return False, False
    folded = False
    for module, x in units.consumers:
        folded |= _add_constants(module, x, keep)
        inputs = keep.repeat_interleave(stored_weights(module).shape[1] // keep.numel())
        _select(module, "weight", inputs, axis=0 if is_transposed(module) else 1)
    for module in units.producers:
        _select(module, "weight", keep, axis=1 if is_transposed(module) else 0)
        _select(module, "bias", keep)
    for norm in units.norms:
        for name in ("weight", "bias", "running_mean", "running_var"):
            _select(norm, name, keep)
        norm.num_features = int(keep.sum())
    return True, folded


def _add_constants(module: Any, x: Features, keep: Tensor) -> bool:
    """Add the constant inputs that are removed to a layer's bias; return whether it changed."""
    constant = x.constant.masked_fill(keep | x.constant.isnan(), 0)
    if not constant.any():
        return False
    weight = weight_by_units(module).double().sum(2)
    added = weight.view(weight.shape[0], x.units.size, -1).sum(2) @ constant.to(weight.device)
    if not added.any():
        return False
    if module.bias is None:
        module.bias = nn.Parameter(added.to(module.weight.dtype), requires_grad=module.weight.requires_grad)
    else:
        module.bias.copy_(module.bias.double() + added)
    return True


def _select(module: Any, name: str, keep: Tensor, axis: int = 0) -> None:
    """Keep some rows of a parameter or buffer, and set the sizes of a layer."""
    tensor = getattr(module, name)
    if tensor is None:
        return
    chosen = tensor.detach().index_select(axis, keep.nonzero().squeeze(1).to(tensor.device))
    if not isinstance(tensor, nn.Parameter):
        setattr(module, name, chosen)
        return
    setattr(module, name, nn.Parameter(chosen, requires_grad=tensor.requires_grad))
    if name == "weight" and is_layer(module):
        outputs, inputs = reversed(chosen.shape[:2]) if is_transposed(module) else chosen.shape[:2]
        sizes = ("out_features", outputs), ("in_features", inputs), ("out_channels", outputs), ("in_channels", inputs)
        for key, size in (*sizes, ("nf", outputs), ("nx", inputs)):
            if key in vars(module):
                setattr(module, key, size)


def _left(analysis: Analysis) -> dict[str, str]:
    """Return why units without a function were left, by the name of the layer that writes them."""
    left: dict[str, str] = {}
    for units in analysis.groups():
        reason = units.reason
        if reason == RETURNED:
            continue
        useless = units.unwritten.clone()
        if units.consumers:
            useless |= torch.stack([_unread(module, x) for module, x in units.consumers]).all(0)
        if not reason:
            layers = ", ".join(analysis.names[module] for module, _ in units.consumers if not adds_constants(module))
            reason = f"they are constants that {layers}, padded or transposed, would not add to all outputs"
            if not layers:
                continue
        if count := int(useless.sum()):
            left[analysis.names[units.producers[0]] or "the model"] = f"{count} of {units.size} units: {reason}"
    return left
