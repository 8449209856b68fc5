"""Finds the dense weights of a model that can become block-sparse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as OutputProjection
from torch.nn.utils.parametrize import is_parametrized

from ..checked import check_model, checked_block
from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout
from ..nn.cells import GRUCell, LSTMCell, RNNCell
from ..nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from ..nn.experts import Experts
from ..nn.gru import GRU, RNN
from ..nn.lstm import LSTM
from ..nn.module import BlockSparseModule
from ..nn.multi_weight import MultiWeightModule
from ..nn.recurrent import Recurrent
from ..nn.weight_norm import WeightNorm
from .blocks import Blocks
from .mixtures import is_experts
from .references import find_references
from .sharding import unwrapped_class

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Skip = str | nn.Module | Iterable[str | nn.Module]
SKIPPED = "skipped"
PARAMETRIZED = "parametrized: call torch.nn.utils.parametrize.remove_parametrizations first"
ALONE = "fully_shard was applied to it alone: apply fully_shard to its parent, or skip it"

CONVOLUTIONS: dict[type[nn.Module], Any] = {
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
}
TRANSPOSED: dict[type[nn.Module], Any] = {
    nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.ConvTranspose3d: ConvTranspose3d,
}
RECURRENT: dict[type[nn.Module], Any] = {
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
}
# Linear layers of the transformers library; the weight of its Conv1D is transposed.
CONV1D = "transformers.pytorch_utils.Conv1D"
TRANSFORMERS = (CONV1D, "transformers.models.falcon.modeling_falcon.FalconLinear")
# A weight stays dense if its blocks pad it to more parameters than both this and PADDING_FACTOR times its own.
MAX_PADDED, PADDING_FACTOR = 2**24, 16
# The base class of layers with adapters in the peft library.
ADAPTED = "peft.tuners.tuners_utils.BaseTunerLayer"
KNOWN: tuple[type[nn.Module], ...] = (nn.Linear, nn.MultiheadAttention, *CONVOLUTIONS, *TRANSPOSED, *RECURRENT)
NO_COUNTERPART: dict[type[nn.Module], str] = {
    nn.Embedding: "its rows are looked up, not multiplied",
    nn.EmbeddingBag: "its rows are looked up, not multiplied",
    nn.Bilinear: "it multiplies two inputs",
}


class Unexpected(str):
    """A reason why a weight stays dense that may surprise its owner, so a warning reports it."""


@dataclass(frozen=True)
class Prunable:
    """A dense weight that can become block-sparse.

    Args:
        name: the parameter's name in the model, such as "encoder.0.weight" or "lstm.weight_hh_l0".
        module: the module of the parameter.
        parameter: the parameter's name in the module.
        blocks: its blocks.
    """

    name: str
    module: nn.Module
    parameter: str
    blocks: Blocks

    @property
    def tensor(self) -> nn.Parameter:
        return getattr(self.module, self.parameter)

    @property
    def block_shape(self) -> tuple[int, int]:
        """(rows, columns) of a block."""
        return self.blocks.block_shape

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of its layouts, padded to whole blocks."""
        return self.blocks.shape

    @property
    def grid(self) -> tuple[int, int]:
        """(out_blocks, in_blocks) of its layouts."""
        return self.blocks.grid

    def matrix(self) -> Tensor:
        """Return the weight as `[out, in, *kernel]`, a writable view of the parameter."""
        return self.blocks.matrix(self.tensor)

    def padded(self) -> Tensor:
        """Return `matrix()` padded with zeros to whole blocks, each gate of an LSTM by itself; differentiable."""
        return self.blocks.padded(self.tensor)

    def in_blocks(self, block_shape: tuple[int, int]) -> Prunable:
        """Return the weight with blocks of another shape."""
        return replace(self, blocks=_blocks_of(self.module, self.parameter, block_shape))

    def check_fit(self, layout: BlockLayout) -> None:
        """Raise a BlockSparseError unless the layout has the weight's padded shape."""
        shape = self.in_blocks(layout.block_shape).shape
        if shape != layout.shape:
            raise BlockSparseError.expected(f"the layout of {self.name}", f"shape {shape}", repr(layout))

    @property
    def obstacle(self) -> str | None:
        """The reason why the weight cannot be replaced, or None; tied and skipped weights are not considered."""
        module, parameter = self.module, self.tensor
        kind = type(module)
        if isinstance(parameter, nn.UninitializedParameter):
            return Unexpected("not initialized yet: call the model once first")
        if parameter.dtype not in DTYPES:
            return f"{parameter.dtype} is not supported"
        if 0 in parameter.shape:
            return f"it is empty, {list(parameter.shape)}"
        for key, value in vars(module).items():  # computed from parameters such as weight_g, weight_v
            if isinstance(value, Tensor) and any(name.startswith(f"{key}_") for name in module._parameters):
                return Unexpected(
                    f"its module computes {key} from other parameters in each call: call remove_weight_norm, "
                    "remove_spectral_norm or prune.remove of torch.nn.utils first"
                )
        if is_parametrized(module):
            return Unexpected(PARAMETRIZED)
        if why := own_forward(module):
            return Unexpected(why)
        padded, (rows, columns) = math.prod(self.shape) * self.blocks.taps, self.block_shape
        if padded > max(MAX_PADDED, PADDING_FACTOR * parameter.numel()):
            return f"blocks of {rows} x {columns} would pad its {parameter.numel()} parameters to {padded}"
        if isinstance(module, Recurrent) and not is_dense_recurrent(module):
            fits = self.parameter in module.sizes and not self.blocks.needs_padding
            return None if fits else "its sizes are not multiples of the block"
        if is_dense_recurrent(module):
            known = self.parameter.startswith("weight_")
        elif kind is nn.MultiheadAttention or isinstance(module, MultiWeightModule) or is_experts(module):
            known = self.parameter in weights_of_parts(module)
        else:
            known = self.parameter == "weight" and (
                kind in (nn.Linear, OutputProjection, *CONVOLUTIONS, *TRANSPOSED) or qualified(kind) in TRANSFORMERS
            )
        if not known:
            if kind in KNOWN or isinstance(module, MultiWeightModule):
                return f"{self.parameter} is not multiplied with the inputs"
            unwrapped = unwrapped_class(module)
            if unwrapped is not kind and (unwrapped in KNOWN or qualified(unwrapped) in TRANSFORMERS):
                return ALONE if self.parameter.startswith("weight") else "not multiplied with the inputs"
            if self.has_own_forward:
                return Unexpected(f"{kind.__name__} may use its weight in another way than its base class")
            if isinstance(module, KNOWN) and "weight" in self.parameter:
                base = next(base.__name__ for base in KNOWN if isinstance(module, base))
                return Unexpected(f"{kind.__name__} is a subclass of {base}, which would be lost: use {base} itself")
            unknown = "how it multiplies a stack of weights is not known" if parameter.dim() == 3 else None
            why = next((why for base, why in NO_COUNTERPART.items() if isinstance(module, base)), unknown)
            return f"{kind.__name__} has no block-sparse counterpart" + (f": {why}" if why else "")
        if getattr(module, "groups", 1) != 1:
            return f"{module.groups} groups"
        return None

    @property
    def has_own_forward(self) -> bool:
        """Whether the module is of a subclass of a known class, with a forward of its own."""
        if not isinstance(self.module, KNOWN):  # the class of a ScriptModule has no forward
            return False
        forward = type(self.module).forward
        return all(forward is not base.forward for base in KNOWN)

    @property
    def values_name(self) -> str:
        """The name of the values in the model once the weight is block-sparse."""
        prefix = f"{self.name}." if has_several_weights(self.module) else self.name.removesuffix("weight")
        return f"{prefix}values"


def prunable(
    model: nn.Module, block_size: int | tuple[int, int] = 32, skip: Skip = (), empty: bool = False
) -> list[Prunable]:
    """List every weight of a model that can become block-sparse, in the order of `named_modules`.

    These are the weights of linear layers, convolutions without groups, their transposes, recurrent layers
    and cells, and multi-head attention; of Conv1D and the experts of mixtures in the transformers library; and dense
    weights of `blocksparse.nn`'s modules with several weights. Tied weights stay dense, and so do subclasses, which may
    use their weight differently, and adapters of the peft library.

    Args:
        model: any module, or one such layer.
        block_size: an int or (rows, columns) (default 32); other sizes are padded.
        skip: modules to leave out with all that is in them, names of modules or parameters, or shell patterns such as
            "encoder.layers.*".
        empty: whether parameters may be on the meta device, for callers that do not read values.

    Raises:
        BlockSparseError: not a module, a model on the meta device, an invalid block size, or a name in `skip` that the
            model does not have.

    >>> import torch
    >>> from blocksparse.surgery.prunable import prunable
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 10))
    >>> [(weight.name, weight.grid) for weight in prunable(model, block_size=16)]
    [('0.weight', (3, 4)), ('2.weight', (1, 3))]
    """
    return [weight for weight, reason in survey(model, block_size, skip, empty) if reason is None]


def survey(
    model: nn.Module, block_size: int | tuple[int, int] = 32, skip: Skip = (), empty: bool = False
) -> list[tuple[Prunable, str | None]]:
    """Return (weight, why it cannot become block-sparse or None) for each parameter of two or more axes."""
    check_model(model)
    block = checked_block(block_size)
    skipped_modules, skipped_names = find_skipped(model, skip)
    owners: dict[Tensor, list[str]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append(f"{name}.{key}".lstrip("."))
    found: list[tuple[Prunable, str | None]] = []
    ties = []  # positions in `found` of weights that are dense only because they are tied
    dense_inside = _dense_inside_parents(model)
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseModule):
            continue
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            is_uninitialized = isinstance(parameter, nn.UninitializedParameter)
            if not (key.startswith("weight") if is_uninitialized else parameter.dim() >= 2):
                continue
            weight = Prunable(f"{name}.{key}".lstrip("."), module, key, _blocks_of(module, key, block))
            if parameter.is_meta and not empty:
                got = f"{weight.name} on the meta device" + (f"; {why}" if (why := own_forward(module)) else "")
                raise BlockSparseError.expected("model", "parameters with values", got)
            reason = SKIPPED if module in skipped_modules or weight.name in skipped_names else weight.obstacle
            reason = dense_inside.get(module) or reason
            tied = [other for other in owners[parameter] if other != weight.name]
            if reason is None and tied:
                untied = f"model.{weight.name} = torch.nn.Parameter(model.{weight.name}.detach().clone())"
                reason = f"tied to {', '.join(tied)}: to prune it, untie it first by {untied}"
                ties.append(len(found))
            found.append((weight, reason))
    size = sum(weight.tensor.numel() for weight, reason in found if reason is None)
    for i in ties:
        weight, reason = found[i]
        if weight.tensor.numel() > size:  # most of the model
            found[i] = weight, Unexpected(reason)
    return _without_referenced(model, found)


def _without_referenced(
    model: nn.Module, found: list[tuple[Prunable, str | None]]
) -> list[tuple[Prunable, str | None]]:
    """Return the weights with a reason added to those that the model refers to outside of its tree of modules."""
    attentions: dict[nn.Module, nn.Module] = {
        each.out_proj: each for each in model.modules() if isinstance(each, nn.MultiheadAttention)
    }
    replaced = {
        weight: [each for each in (weight.tensor, weight.module, attentions.get(weight.module)) if each is not None]
        for weight, reason in found
        if reason is None
    }
    places = find_references(model, [each for group in replaced.values() for each in group]) if replaced else {}
    reasons = {
        weight: reason_of_reference(places[each])
        for weight, group in replaced.items()
        for each in group
        if each in places
    }
    return [(weight, reasons.get(weight, reason)) for weight, reason in found]


def reason_of_reference(where: str) -> Unexpected:
    """Return why a layer stays that something refers to outside of the tree of modules."""
    return Unexpected(f"{where} refers to it too, and would keep the old layer: look the layer up in the model instead")


def split_refused(
    model: nn.Module, skip: Skip, refusal: Callable[[Prunable], str | None]
) -> tuple[list[Prunable], dict[str, str]]:
    """Return the weights that can be replaced and are not refused, and why others are not, by name."""
    found = [(weight, reason or refusal(weight)) for weight, reason in survey(model, 1, skip)]
    left = {weight.name: reason for weight, reason in found if reason is not None}
    return [weight for weight, _ in found if weight.name not in left], left


def find_weights(model: nn.Module, layouts: Mapping[str, BlockLayout]) -> dict[str, Prunable]:
    """Find the weights that layouts are given for, by name, and check that the layouts fit."""
    known = {weight.name: (weight, reason) for weight, reason in survey(model, 1, empty=True)}
    found = {}
    for name, layout in layouts.items():
        check_layout(layout)
        weight, reason = known.get(name, (None, "the model has no parameter of this name"))
        if weight is not None:
            weight = weight.in_blocks(layout.block_shape)
            reason = weight.obstacle or reason
        if weight is None or reason is not None:
            raise BlockSparseError(f"layouts: {name} cannot be block-sparse: {reason}")
        weight.check_fit(layout)
        found[name] = weight
    return found


def _blocks_of(module: nn.Module, parameter: str, block: tuple[int, int]) -> Blocks:
    """Return the division of a dense parameter into blocks of shape `block`, by the kind of its module.

    The kind decides whether the parameter stacks several weights (gates, experts, q, k and v), is transposed, or needs
    more padding. An uninitialized parameter has no blocks.
    """
    tensor, parts, multiple = getattr(module, parameter), 1, None
    if isinstance(tensor, nn.UninitializedParameter):
        return Blocks((0, 0), block)
    if is_dense_recurrent(module):
        parts = 1 if parameter.startswith("weight_hr") else RECURRENT.get(type(module), module).gates
        # Hidden units are outputs of one step and inputs of the next, so both have the same padding.
        hidden = math.lcm(*block)
        multiple = hidden, block[1] if parameter.startswith("weight_ih") else hidden
    elif (isinstance(module, Experts) or is_experts(module)) and tensor.dim() == 3:
        return Blocks(tensor.shape, block, len(tensor), stacked=True)
    elif isinstance(module, MultiWeightModule) and parameter in module.sizes:
        parts = len(tensor) // module.sizes[parameter][0].padded
    elif isinstance(module, nn.MultiheadAttention) and parameter == "in_proj_weight":
        parts = 3
    transposed = type(module) in TRANSPOSED or qualified(type(module)) == CONV1D
    return Blocks(tensor.shape, block, parts, transposed, multiple)


def find_skipped(model: nn.Module, skip: Skip) -> tuple[set[nn.Module], set[str]]:
    """Return the modules to leave as they are, and the names of parameters to leave."""
    modules: set[nn.Module] = set()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    named = dict(model.named_modules(remove_duplicate=False))
    names: set[str] = set()
    items = [skip] if isinstance(skip, str | nn.Module | Tensor) else skip
    for item in items if isinstance(items, Iterable) else [skip]:
        if isinstance(item, nn.Module):
            found, matched = [module for module in named.values() if module is item], list[str]()
        else:
            found, matched = [named[name] for name in _matching(item, named)], _matching(item, parameters)
        if not found and not matched:
            got = type(item).__name__ if isinstance(item, nn.Module) else repr(item)
            raise BlockSparseError.expected(
                "skip", "modules of the model, or names or patterns of modules or parameters", got
            )
        modules.update(each for module in found for each in module.modules())
        names.update(matched)
    return modules, names


def skip_by_name(model: nn.Module, skip: Skip) -> Skip:
    """Return the same `skip` for copies of a model: modules of the model are replaced by their names."""
    names = {module: name for name, module in model.named_modules()}
    if isinstance(skip, nn.Module):
        return names.get(skip, skip)
    if isinstance(skip, str) or not isinstance(skip, Iterable):
        return skip
    return [names.get(item, item) if isinstance(item, nn.Module) else item for item in skip]


def _matching(pattern: Any, names: Iterable[str]) -> list[str]:
    """Return the name itself if it is there, or the names that match it as a pattern."""
    if not isinstance(pattern, str):
        return []
    return [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]


def is_dense_recurrent(module: nn.Module) -> bool:
    """Return whether a module is a recurrent layer or cell, PyTorch's or ours, with dense weights only."""
    kind = type(module)
    return kind in RECURRENT or (kind in RECURRENT.values() and not any(True for _ in module.children()))


def own_forward(module: nn.Module) -> str | None:
    """Return why a module computes something else than its class, so that it cannot be replaced; or None."""
    mine = vars(module)
    if isinstance(module, torch.jit.ScriptModule):  # all of its methods are its own
        return None
    if "_hf_hook" in mine and "forward" in mine:
        return (
            "accelerate has hooked it: accelerate.hooks.remove_hook_from_module before, add_hook_to_module afterwards"
        )
    if "forward" in mine:
        return "its forward was set on the instance: call `del module.forward` first, or use a forward hook"
    if mine.get("_compiled_call_impl") is not None:
        return "its own compile() was called: compile it afterwards"
    return None


def has_several_weights(module: nn.Module) -> bool:
    """Return whether a module has several weights, which can become block-sparse one by one."""
    return isinstance(module, (*RECURRENT, nn.MultiheadAttention, MultiWeightModule)) or is_experts(module)


def weights_of_parts(module: Any) -> tuple[str, ...]:
    """Return the names of the weights of a module with several, without those of submodules."""
    if isinstance(module, MultiWeightModule):
        return tuple(module.sizes)
    if is_experts(module):
        return "gate_up_proj", "down_proj"
    return "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"


def _dense_inside_parents(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules that stay dense because of their parents, with the reasons."""
    reasons: dict[nn.Module, str] = {}
    for module in model.modules():
        kind = type(module)
        if isinstance(module, nn.MultiheadAttention) and kind is not nn.MultiheadAttention:
            reasons[module.out_proj] = Unexpected(f"inside {kind.__name__}, a subclass of MultiheadAttention")
        elif isinstance(module, nn.MultiheadAttention) and (why := own_forward(module)):
            reasons[module.out_proj] = Unexpected(why)
        if isinstance(module, WeightNorm):
            reasons[module.module] = "inside a WeightNorm, only its direction counts: call blocksparse.nn.fold first"
        if is_parametrized(module):
            reasons |= dict.fromkeys(module.parametrizations.modules(), Unexpected(PARAMETRIZED))  # type: ignore[union-attr]
        if any(qualified(base) == ADAPTED for base in kind.__mro__):
            others = [child for name, child in module.named_children() if name != "base_layer"]
            reasons |= {each: "an adapter" for child in others for each in child.modules()}
    return reasons


def qualified(kind: type) -> str:
    """Return the name of a class with its Python module."""
    return f"{kind.__module__}.{kind.__name__}"
