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

from ..checked import checked_block
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
from .carry import own_forward
from .mixtures import is_experts
from .references import held_elsewhere
from .sharding import unwrapped_class

__all__ = ["Prunable", "Skip", "prunable", "survey"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Skip = str | nn.Module | Iterable[str | nn.Module]
SKIPPED = "skipped"
PARAMETRIZED = "parametrized: torch.nn.utils.parametrize.remove_parametrizations first"
ALONE = "fully_shard was applied to it alone: apply it to a module that it is in, or skip it"

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
# Linear layers of the library transformers; its Conv1D has a transposed weight.
CONV1D = "transformers.pytorch_utils.Conv1D"
TRANSFORMERS = (CONV1D, "transformers.models.falcon.modeling_falcon.FalconLinear")
# A weight that its blocks pad to more numbers than this, and to more than TIMES its own, stays dense.
MAX_PADDED, TIMES = 2**24, 16
# The base of layers with adapters of the library peft.
ADAPTED = "peft.tuners.tuners_utils.BaseTunerLayer"
KNOWN: tuple[type[nn.Module], ...] = (nn.Linear, nn.MultiheadAttention, *CONVOLUTIONS, *TRANSPOSED, *RECURRENT)
NO_COUNTERPART: dict[type[nn.Module], str] = {
    nn.Embedding: "its rows are looked up, not multiplied",
    nn.EmbeddingBag: "its rows are looked up, not multiplied",
    nn.Bilinear: "it multiplies two inputs",
}


class Unexpected(str):
    """A reason why a weight stays dense that its owner may not know of: who replaces weights says it."""


@dataclass(frozen=True)
class Prunable:
    """A dense weight that can become block-sparse.

    Args:
        name: of the parameter in the model, "encoder.0.weight" or "lstm.weight_hh_l0".
        module: that has it.
        parameter: its name there.
        blocks: how it falls into blocks.
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
        """(rows, columns) of its blocks."""
        return self.blocks.block_shape

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of its layouts, whole blocks."""
        return self.blocks.shape

    @property
    def grid(self) -> tuple[int, int]:
        """(out_blocks, in_blocks) of its layouts."""
        return self.blocks.grid

    def matrix(self) -> Tensor:
        """The weight as `[out, in]`, or `[out, in, *kernel]`: a view of the parameter, which can be written to."""
        return self.blocks.matrix(self.tensor)

    def padded(self) -> Tensor:
        """`matrix()` with zeros up to whole blocks, the shape of its layouts; differentiable.

        Of an LSTM each gate has its own zeros.
        """
        return self.blocks.padded(self.tensor)

    def in_blocks(self, block_shape: tuple[int, int]) -> Prunable:
        """The same weight, to have blocks of another shape."""
        return replace(self, blocks=_blocks_of(self.module, self.parameter, block_shape))

    def stored(self, layout: BlockLayout) -> int:
        """How many numbers the weight has with this layout, those that pad its blocks among them."""
        return layout.nnz * math.prod(layout.block_shape) * self.blocks.taps

    def check_fit(self, layout: BlockLayout) -> None:
        """Raises a BlockSparseError unless the layout is of the weight's padded shape."""
        shape = self.in_blocks(layout.block_shape).shape
        if shape != layout.shape:
            raise BlockSparseError.expected(f"the layout of {self.name}", f"shape {shape}", repr(layout))

    @property
    def obstacle(self) -> str | None:
        """Why the weight cannot be replaced, its name apart; or None."""
        module, parameter = self.module, self.tensor
        kind = type(module)
        if isinstance(parameter, nn.UninitializedParameter):
            return Unexpected("not initialized yet: call the model once before")
        if parameter.dtype not in DTYPES:
            return f"{parameter.dtype} is not supported"
        if 0 in parameter.shape:
            return f"it has no numbers, {list(parameter.shape)}"
        for key, value in vars(module).items():  # where the parameters it is computed from have longer names
            if isinstance(value, Tensor) and any(name.startswith(f"{key}_") for name in module._parameters):
                return Unexpected(
                    f"its module computes {key} from other parameters in each call (remove_weight_norm, "
                    "remove_spectral_norm or prune.remove of torch.nn.utils makes it a parameter)"
                )
        if is_parametrized(module):
            return Unexpected(PARAMETRIZED)
        if why := own_forward(module):
            return Unexpected(why)
        numbers, (rows, columns) = math.prod(self.shape) * self.blocks.taps, self.block_shape
        if numbers > max(MAX_PADDED, TIMES * parameter.numel()):
            return f"blocks of {rows} x {columns} would pad its {parameter.numel()} numbers to {numbers}"
        if isinstance(module, Recurrent) and not is_dense_recurrent(module):
            fits = self.parameter in module.sizes and not self.blocks.needs_padding
            return None if fits else "no multiple of the block"
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
            before = unwrapped_class(module)
            if before is not kind and (before in KNOWN or qualified(before) in TRANSFORMERS):
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
        """Whether its module is one of those known by its base class, with a forward of its own."""
        if not isinstance(self.module, KNOWN):  # a ScriptModule's class has no forward to ask for
            return False
        forward = type(self.module).forward
        return all(forward is not base.forward for base in KNOWN)

    @property
    def values_name(self) -> str:
        """The name of the parameter in the model once the weight is block-sparse."""
        several = has_several_weights(self.module)  # each with its name
        return f"{self.name}.values" if several else f"{self.name.removesuffix('weight')}values"


def prunable(
    model: nn.Module, block_size: int | tuple[int, int] = 32, skip: Skip = (), empty: bool = False
) -> list[Prunable]:
    """Lists every weight of a model that can become block-sparse, in the order of `named_modules`.

    These are the weights of torch.nn's linear layers, of convolutions without groups and of their transposes, of
    recurrent layers and cells, of multi-head attention, of the linear layer that the transformers library calls Conv1D
    and of its experts that compute what MixtralExperts does; and dense weights of `blocksparse.nn`'s modules that have
    several. Weights that have two names (tied ones) stay dense, and so do subclasses, which may use their weight in
    another way, and adapters of the library peft.

    Args:
        model: any module, or one such layer.
        block_size: an int or (rows, columns). What is no multiple of it is padded.
        skip: modules of the model with all that is in them; names of modules or parameters, or patterns of names as
            in a shell, "encoder.layers.*" say.
        empty: whether parameters may be on the meta device: for those who do not look at the values.

    Raises:
        BlockSparseError: no module, one on the meta device, an invalid block size, something to skip that the model
            does not have.

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
    """Lists every parameter of two axes or more with None, or why it cannot become block-sparse; see `prunable`."""
    if not isinstance(model, nn.Module):
        raise BlockSparseError.expected("model", "a torch.nn.Module", type(model).__name__)
    block = checked_block(block_size)
    skipped_modules, skipped_names = skipped(model, skip)
    owners: dict[Tensor, list[str]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append(_dotted(name, key))
    found = []
    inside = _inside(model)
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseModule):
            continue
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not _is_weight(key, parameter):
                continue
            weight = Prunable(_dotted(name, key), module, key, _blocks_of(module, key, block))
            if parameter.is_meta and not empty:
                got = f"{weight.name} on the meta device" + (f"; {why}" if (why := own_forward(module)) else "")
                raise BlockSparseError.expected("model", "parameters with values", got)
            reason = SKIPPED if module in skipped_modules or weight.name in skipped_names else weight.obstacle
            reason = inside.get(module) or reason
            others = [other for other in owners[parameter] if other != weight.name]
            if reason is None and others:
                reason = f"tied to {', '.join(others)}"
            found.append((weight, reason))
    return _without_held(model, found)


def _without_held(model: nn.Module, found: list[tuple[Prunable, str | None]]) -> list[tuple[Prunable, str | None]]:
    """Adds a reason to weights that the model also uses by other ways than its tree of modules."""
    attentions: dict[nn.Module, nn.Module] = {
        each.out_proj: each for each in model.modules() if isinstance(each, nn.MultiheadAttention)
    }
    replaced = {
        weight: [each for each in (weight.tensor, weight.module, attentions.get(weight.module)) if each is not None]
        for weight, reason in found
        if reason is None
    }
    held = held_elsewhere(model, [each for several in replaced.values() for each in several]) if replaced else {}
    ways = {weight: [held[each] for each in several if each in held] for weight, several in replaced.items()}
    return [(weight, held_by(ways[weight][0]) if ways.get(weight) else reason) for weight, reason in found]


def held_by(where: str) -> Unexpected:
    """The reason of a layer that something besides the modules it is in refers to."""
    return Unexpected(f"{where} refers to it too, and would use the old one: have it look the layer up in the model")


def sort_out(
    model: nn.Module, skip: Skip, refusal: Callable[[Prunable], str | None]
) -> tuple[list[Prunable], dict[str, str]]:
    """The weights that could be replaced and are not refused, and the reasons for the others by name."""
    found = [(weight, reason or refusal(weight)) for weight, reason in survey(model, 1, skip)]
    left = {weight.name: reason for weight, reason in found if reason is not None}
    return [weight for weight, _ in found if weight.name not in left], left


def weights_of(model: nn.Module, layouts: Mapping[str, BlockLayout]) -> dict[str, Prunable]:
    """Finds the weights that layouts are given for, by name, after checking that each fits."""
    known = {weight.name: (weight, reason) for weight, reason in survey(model, 1, empty=True)}
    found = {}
    for name, layout in layouts.items():
        check_layout(layout)
        weight, reason = known.get(name, (None, "the model has none of this name"))
        if weight is not None:
            weight = weight.in_blocks(layout.block_shape)
            reason = weight.obstacle or reason
        if weight is None or reason is not None:
            raise BlockSparseError.expected("layouts", f"weights that can be block-sparse, not {name}", reason)
        weight.check_fit(layout)
        found[name] = weight
    return found


def _blocks_of(module: nn.Module, parameter: str, block: tuple[int, int]) -> Blocks:
    tensor, parts, multiple = getattr(module, parameter), 1, None
    if isinstance(tensor, nn.UninitializedParameter):
        return Blocks((0, 0), block)
    if is_dense_recurrent(module):
        parts = 1 if parameter.startswith("weight_hr") else RECURRENT.get(type(module), module).gates
        # Everything that concerns hidden units has the same padding: a step uses what the last one left.
        both = math.lcm(*block)
        multiple = both, block[1] if parameter.startswith("weight_ih") else both
    elif (isinstance(module, Experts) or is_experts(module)) and tensor.dim() == 3:
        return Blocks(tensor.shape, block, len(tensor), stacked=True)
    elif isinstance(module, MultiWeightModule) and parameter in module.sizes:
        parts = len(tensor) // module.sizes[parameter][0].padded
    elif isinstance(module, nn.MultiheadAttention) and parameter == "in_proj_weight":
        parts = 3
    transposed = type(module) in TRANSPOSED or qualified(type(module)) == CONV1D
    return Blocks(tensor.shape, block, parts, transposed, multiple)


def _is_weight(key: str, parameter: nn.Parameter) -> bool:
    if isinstance(parameter, nn.UninitializedParameter):
        return key.startswith("weight")
    return parameter.dim() >= 2


def skipped(model: nn.Module, skip: Skip) -> tuple[set[nn.Module], set[str]]:
    """The modules that are to be left as they are, and the names of parameters."""
    modules: set[nn.Module] = set()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    named = dict(model.named_modules(remove_duplicate=False))
    names: set[str] = set()
    items = [skip] if isinstance(skip, str | nn.Module) else skip
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


def _matching(pattern: Any, names: Iterable[str]) -> list[str]:
    """The name itself where it is one, or those that fit the pattern."""
    if not isinstance(pattern, str):
        return []
    return [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]


def is_dense_recurrent(module: nn.Module) -> bool:
    """Whether it is a recurrent layer or a cell, PyTorch's or ours, without padding: all of its weights are dense."""
    kind = type(module)
    return kind in RECURRENT or (kind in RECURRENT.values() and not any(True for _ in module.children()))


def has_several_weights(module: nn.Module) -> bool:
    """Whether the module has several weights, which can become block-sparse one by one."""
    return isinstance(module, (*RECURRENT, nn.MultiheadAttention, MultiWeightModule)) or is_experts(module)


def weights_of_parts(module: Any) -> tuple[str, ...]:
    """The names of the weights of a module that has several, besides those of the modules in it."""
    if isinstance(module, MultiWeightModule):
        return tuple(module.sizes)
    if is_experts(module):
        return "gate_up_proj", "down_proj"
    return "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"


def _inside(model: nn.Module) -> dict[nn.Module, str]:
    """Why modules stay dense because of the ones that they are in."""
    reasons: dict[nn.Module, str] = {}
    for module in model.modules():
        kind = type(module)
        if isinstance(module, nn.MultiheadAttention) and kind is not nn.MultiheadAttention:
            reasons[module.out_proj] = Unexpected(f"inside of {kind.__name__}, a subclass of MultiheadAttention")
        elif isinstance(module, nn.MultiheadAttention) and (why := own_forward(module)):
            reasons[module.out_proj] = Unexpected(why)
        if isinstance(module, WeightNorm):
            reasons[module.module] = "only its direction counts, in a WeightNorm: blocksparse.nn.fold first"
        if is_parametrized(module):
            reasons |= dict.fromkeys(module.parametrizations.modules(), Unexpected(PARAMETRIZED))  # type: ignore[union-attr]
        if any(qualified(base) == ADAPTED for base in kind.__mro__):
            others = [child for name, child in module.named_children() if name != "base_layer"]
            reasons |= {each: "an adapter" for child in others for each in child.modules()}
    return reasons


def qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _dotted(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter
