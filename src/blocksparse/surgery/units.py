"""Groups the units of a traced model: the features that its layers write and read, which stay or go together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from .prunable import CONV1D, own_forward, qualified
from .trace import Call, Ref, Trace

CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
TRANSPOSED = {nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3}
DIMENSIONS: dict[Any, int] = {**CONVOLUTIONS, **TRANSPOSED}

# Modules and functions that act on each element alone, by name without underscores.
ELEMENTWISE = {
    "ReLU", "ReLU6", "LeakyReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Sigmoid", "Tanh", "Hardswish",
    "Hardsigmoid", "Hardtanh", "Softplus", "Softsign", "LogSigmoid", "Softshrink", "Hardshrink", "Tanhshrink",
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh", "hardswish",
    "hardsigmoid", "hardtanh", "softplus", "softsign", "logsigmoid", "softshrink", "hardshrink", "tanhshrink",
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "neg", "abs", "exp", "square", "clamp",
    "truediv", "itruediv", "div", "pow", "erf", "sin", "cos",
}  # fmt: skip
# In evaluation mode they return their input, as memory of its own or not.
UNCHANGED = {
    "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "Identity", "dropout", "dropout1d", "dropout2d",
    "dropout3d", "feature_dropout", "alpha_dropout", "contiguous", "clone", "detach",
}  # fmt: skip
MAX_POOLS = {f"{name}{d}{suffix}" for d in (1, 2, 3) for name, suffix in (
    ("MaxPool", "d"), ("AdaptiveMaxPool", "d"), ("AdaptiveAvgPool", "d"), ("max_pool", "d"),
    ("adaptive_max_pool", "d"), ("adaptive_avg_pool", "d"))}  # fmt: skip
AVERAGE_POOLS = {f"AvgPool{d}d" for d in (1, 2, 3)} | {f"avg_pool{d}d" for d in (1, 2, 3)}

RETURNED = "the model returns them"


@dataclass(eq=False)
class Units:
    """Units that several tensors have, so that all layers keep or lose them together.

    Args:
        size: how many there are.
        unwritten: bool `[size]`, the units for which no layer has a weight other than 0.
        producers: the layers that write them.
        consumers: the layers that read them, with the tensor that they read.
        norms: the batch norms in between.
        reason: why none can be removed, or None.
    """

    size: int
    unwritten: Tensor
    producers: list[Any] = field(default_factory=list)
    consumers: list[tuple[Any, Features]] = field(default_factory=list)
    norms: list[Any] = field(default_factory=list)
    reason: str | None = None
    parent: Units | None = None

    def root(self) -> Units:
        """Return the units that these were merged into."""
        return self if self.parent is None else self.parent.root()

    def merge(self, other: Units) -> None:
        """Make the units of two tensors the same."""
        ours, theirs = self.root(), other.root()
        if ours is theirs:
            return
        theirs.parent = ours
        ours.producers += theirs.producers
        ours.consumers += theirs.consumers
        ours.norms += theirs.norms
        ours.reason = ours.reason or theirs.reason
        ours.unwritten = ours.unwritten & theirs.unwritten


@dataclass(eq=False)
class Features:
    """The units of one tensor.

    Args:
        units: the units.
        axes: the number of spatial axes behind the axis of the units; None if theirs is the last axis.
        constant: float64 `[units]`, the value of each unit that is equal everywhere for all inputs, else NaN.
        flat: whether each unit has several neighbouring features, as behind `flatten`.
        overwritten: whether a later call changed the tensor in place.
    """

    units: Units
    axes: int | None
    constant: Tensor
    flat: bool = False
    overwritten: bool = False


def is_transposed(module: nn.Module) -> bool:
    """Return whether the module's weight is `[in, out, ...]`."""
    return type(module) in TRANSPOSED or qualified(type(module)) == CONV1D


def is_layer(module: Any) -> bool:
    """Return whether the module is a layer that can lose units."""
    return type(module) is nn.Linear or type(module) in DIMENSIONS or qualified(type(module)) == CONV1D


def weight_by_units(module: Any) -> Tensor:
    """Return the weight as `[out, in, taps]`."""
    weight: Tensor = module.weight.detach().flatten(2) if module.weight.dim() > 2 else module.weight.detach()[..., None]
    return weight.transpose(0, 1) if is_transposed(module) else weight


def stored_weights(module: Any) -> Tensor:
    """Return which weights differ from 0, bool `[out, in, taps]`."""
    return weight_by_units(module) != 0


def adds_constants(module: Any) -> bool:
    """Return whether a constant input adds the same to all outputs of a unit: no zeros pad the input."""
    if type(module) in TRANSPOSED:
        return False
    if type(module) in CONVOLUTIONS and module.padding_mode == "zeros":
        return not any(module.padding) if not isinstance(module.padding, str) else module.padding == "valid"
    return True


class Analysis:
    """The units of all tensors in a trace, for the present weights of its layers.

    Args:
        model: the dense model, in evaluation mode.
        trace: its calls.
    """

    def __init__(self, model: nn.Module, trace: Trace):
        self.names = {module: name for name, module in model.named_modules()}
        self.units: list[Units] = []
        self._features: dict[Ref, Features] = {}
        self._fixed = _reasons_of_modules(model, trace, self.names)
        for call in trace.calls:
            result = self._follow(call)
            if result is None:
                self._fix(call.inputs, f"{self._title(call)} reads them")
            elif len(call.results) == 1:
                self._features[call.results[0]] = result
                if call.is_in_place and (before := self._features.get(call.inputs[0])) is not result and before:
                    before.overwritten = True
        self._fix(trace.outputs, RETURNED)

    def groups(self) -> Iterator[Units]:
        """Yield each group of units once."""
        return (units for units in self.units if units.parent is None)

    def _title(self, call: Call) -> str:
        if isinstance(call.target, nn.Module):
            return f"{self.names.get(call.target) or 'the model'} ({call.name})"
        return call.name

    def _fix(self, refs: list[Ref], reason: str) -> None:
        """Keep all units of some tensors."""
        for ref in refs:
            if ref in self._features:
                units = self._features[ref].units.root()
                units.reason = units.reason or reason

    def _follow(self, call: Call) -> Features | None:
        """Return the features of a call's result, or None if the call may need all of its inputs as they are."""
        if is_layer(call.target):
            return self._layer(call)
        inputs = [self._features.get(ref) for ref in call.inputs]
        if not _is_of_torch(call.target) or not inputs or any(each is None or each.overwritten for each in inputs):
            return None
        first: Features = inputs[0]  # type: ignore[assignment]
        if call.name in UNCHANGED:
            return first
        if isinstance(call.target, _BatchNorm):
            return self._norm(call.target, first)
        if call.name in ELEMENTWISE:
            return self._elementwise(call, inputs)
        if len(inputs) > 1:
            return None
        if call.name in MAX_POOLS | AVERAGE_POOLS:
            return _pooled(call, first)
        return _flattened(call, first)

    def _layer(self, call: Call) -> Features:
        """Return the output of a layer, and note the layer at the units that it reads and writes."""
        module, x = call.target, self._features.get(call.inputs[0]) if call.inputs else None
        weight = weight_by_units(module)
        grouped = getattr(module, "groups", 1) != 1
        size = module.out_channels if grouped else weight.shape[0]
        written = torch.ones(size, dtype=torch.bool) if grouped else (weight != 0).flatten(1).any(1).cpu()
        units = Units(size, ~written)
        reason = self._fixed.get(module) or ("it is a grouped convolution" if grouped else None)
        name = self.names[module] or "the model"
        constant = torch.full((units.size,), torch.nan, dtype=torch.float64)
        units.producers.append(module)
        if reason:
            units.reason = reason
        else:
            bias = torch.zeros(units.size) if module.bias is None else module.bias.detach().double().cpu()
            constant = torch.where(units.unwritten, bias.double(), constant)
        if x is not None:
            axes, inputs = DIMENSIONS.get(type(module)), 0 if grouped else weight.shape[1]
            fits = x.axes == axes and (inputs % x.units.size == 0 if x.flat else inputs == x.units.size)
            if reason or x.overwritten or not fits:
                self._fix(call.inputs, f"{name} reads them" + (f", and {reason}" if reason else ""))
            else:
                x.units.root().consumers.append((module, x))
        self.units.append(units)
        return Features(units, DIMENSIONS.get(type(module)), constant)

    def _norm(self, norm: Any, x: Features) -> Features | None:
        """Return the output of a batch norm in evaluation mode."""
        if norm.running_mean is None or norm in self._fixed or norm.num_features != x.units.size or x.flat:
            return None
        mean, var = norm.running_mean.double().cpu(), norm.running_var.double().cpu()
        constant = (x.constant - mean) / (var + norm.eps).sqrt()
        if norm.affine:
            weight, bias = norm.weight.detach().double().cpu(), norm.bias.detach().double().cpu()
            constant = torch.where(weight == 0, bias, constant * weight + bias)
        x.units.root().norms.append(norm)
        return Features(x.units, x.axes, constant)

    def _elementwise(self, call: Call, inputs: list[Any]) -> Features | None:
        """Return the result of a function of each element; tensors that it combines have the same units."""
        first, tensors = inputs[0], pytree.tree_leaves((call.args, dict(call.kwargs)))
        if any(isinstance(each, Tensor) for each in tensors):
            return None
        if any((x.axes, x.flat, x.units.size) != (first.axes, first.flat, first.units.size) for x in inputs[1:]):
            return None
        values = {ref: x.constant.clone() for ref, x in zip(call.inputs, inputs, strict=True)}
        args, kwargs = pytree.tree_map_only(Ref, values.__getitem__, (call.args, dict(call.kwargs)))
        unknown = torch.stack([x.constant.isnan() for x in inputs]).any(0)
        constant = call.target(*args, **kwargs).masked_fill(unknown, torch.nan)
        for x in inputs[1:]:
            first.units.root().merge(x.units)
        return Features(first.units, first.axes, constant, first.flat)


def _is_of_torch(target: Any) -> bool:
    """Return whether a module or function computes what its name says."""
    if isinstance(target, nn.Module):
        has_hooks = target._forward_hooks or target._forward_pre_hooks
        return type(target).__module__.startswith("torch.nn.") and not has_hooks and own_forward(target) is None
    package = getattr(target, "__module__", None) or "torch"
    return package == "_operator" or (package.startswith("torch") and not package.startswith("torch._ops"))


def _pooled(call: Call, x: Features) -> Features | None:
    """Return the result of a pool, whose padding of an average changes constants other than 0."""
    if x.axes is None or len(call.results) != 1:
        return None
    constant = x.constant
    if call.name in AVERAGE_POOLS:
        padding = getattr(call.target, "padding", call.kwargs.get("padding", call.args[3] if len(call.args) > 3 else 0))
        divisor = getattr(call.target, "divisor_override", None) or call.kwargs.get("divisor_override")
        if padding not in (0, (0,), (0, 0), (0, 0, 0)) or divisor or len(call.args) > 5:
            constant = constant.masked_fill(constant != 0, torch.nan)
    return Features(x.units, x.axes, constant)


def _flattened(call: Call, x: Features) -> Features | None:
    """Return the result of a call that flattens or averages all spatial axes of a batch."""
    args, kwargs = call.args[1:], dict(call.kwargs)
    if x.axes is None:
        return None
    if isinstance(call.target, nn.Flatten):
        is_flatten = (call.target.start_dim, call.target.end_dim) in ((1, -1), (1, x.axes + 1))
    elif call.name == "flatten":
        axes = (*args, *(kwargs[key] for key in ("start_dim", "end_dim") if key in kwargs))
        is_flatten = axes in ((1,), (1, -1), (1, x.axes + 1))
    elif call.name in ("view", "reshape"):
        sizes: Any = args[0] if args and isinstance(args[0], tuple | list | torch.Size) else args
        is_flatten = len(sizes) == 2 and isinstance(sizes[1], int) and sizes[1] == -1
    elif call.name == "mean":
        dims = args[0] if args else kwargs.get("dim")
        dims = (dims,) if isinstance(dims, int) else tuple(dims or ())
        spatial = {dim % (x.axes + 2) for dim in dims} == set(range(2, x.axes + 2))
        if not spatial:
            return None
        keeps = (args[1] if len(args) > 1 else kwargs.get("keepdim", False)) is True
        return Features(x.units, x.axes if keeps else None, x.constant)
    else:
        return None
    return Features(x.units, None, x.constant, flat=True) if is_flatten else None


def _reasons_of_modules(model: nn.Module, trace: Trace, names: dict[nn.Module, str]) -> dict[Any, str]:
    """Return why modules must keep their weights, by module."""
    reasons: dict[Any, str] = {}
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append(module)
        if not (is_layer(module) or isinstance(module, _BatchNorm)):
            continue
        if own := own_forward(module):
            reasons[module] = own
        elif "weight" not in module._parameters or "bias" not in module._parameters:
            reasons[module] = "its weight is computed in each call: remove the parametrization first"
        elif module._forward_hooks or module._forward_pre_hooks:
            reasons[module] = "it has forward hooks"
    for shared in owners.values():
        for module in shared if len(shared) > 1 else ():
            others = [names[each] for each in shared if each is not module]
            reasons[module] = f"it shares a parameter with {', '.join(others) or 'itself'}"
    calls = Counter(call.target for call in trace.calls if isinstance(call.target, nn.Module))
    reasons |= {module: "the model calls it several times" for module, count in calls.items() if count > 1}
    for call in trace.calls:
        for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))):
            for module in owners.get(leaf, ()) if isinstance(leaf, Tensor) else ():
                reasons.setdefault(module, f"the model also calls {call.name} on its weight")
        if isinstance(call.target, nn.Module) and not is_layer(call.target):
            inner = list(call.target.modules())[1:]
            reasons |= dict.fromkeys(inner, f"it belongs to {names[call.target]}")
    return reasons
