"""Dense weights of a model in place of which block-sparse ones can stand, and that exchange."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..convert import from_dense
from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout, checked_block
from .conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .linear import Linear
from .lstm import LSTM
from .module import BlockSparseModule, Weight
from .optimizer import check_state, has_parameter
from .recurrent import Recurrent

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Skip = str | nn.Module | Iterable[str | nn.Module]

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


@dataclass(frozen=True)
class Prunable:
    """A dense weight that can become block-sparse.

    Args:
        name: of the parameter in the model, "encoder.0.weight" or "lstm.weight_hh_l0".
        module: that has it.
        parameter: its name there.
        block_shape: (rows, columns) of the blocks that it is to have.
    """

    name: str
    module: nn.Module
    parameter: str
    block_shape: tuple[int, int]

    def matrix(self) -> Tensor:
        """The weight as `[out, in]`, or `[out, in, *kernel]`: a view of the parameter, which can be written to."""
        return _as_matrix(self.module, getattr(self.module, self.parameter))

    def padded(self) -> Tensor:
        """`matrix()` with zeros up to whole blocks, the shape of its layouts; differentiable.

        Of an LSTM each gate has its own zeros.
        """
        return _pad(self.matrix(), self.shape, self._parts)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of its layouts, whole blocks."""
        rows, columns = self.matrix().shape[:2]
        block = self.block_shape
        if not _is_dense_lstm(self.module):
            return _up(rows, block[0]), _up(columns, block[1])
        # All that has to do with hidden units is padded alike: a step uses what the last one left.
        both, of_inputs = math.lcm(*block), self.parameter.startswith("weight_ih")
        return _up(rows // self._parts, both) * self._parts, _up(columns, block[1] if of_inputs else both)

    @property
    def grid(self) -> tuple[int, int]:
        """(out_blocks, in_blocks) of its layouts."""
        return self.shape[0] // self.block_shape[0], self.shape[1] // self.block_shape[1]

    @property
    def values_name(self) -> str:
        """The name of the parameter in the model once the weight is block-sparse."""
        whole = isinstance(self.module, nn.LSTM | Recurrent)  # it has several weights, each with its name
        return f"{self.name}.values" if whole else f"{self.name.removesuffix('weight')}values"

    @property
    def _parts(self) -> int:
        return _parts(self.module, self.parameter)


def prunable(model: nn.Module, block_size: int | tuple[int, int] = 32, skip: Skip = ()) -> list[Prunable]:
    """Every weight of a model that can become block-sparse, in the order of `named_modules`.

    These are the weights of torch.nn's linear layers, of convolutions without groups and of their transposes, of LSTMs,
    and of the linear layer that the transformers library calls Conv1D; and dense weights of `blocksparse.nn`'s
    recurrent layers. Weights that have two names (tied ones) stay dense, and so do subclasses, which may use their
    weight in another way.

    Args:
        model: any module, or one such layer.
        block_size: an int or (rows, columns). What is no multiple of it is padded.
        skip: modules of the model with all that is in them, or names of modules or parameters.

    Raises:
        BlockSparseError: no module, one on the meta device, a block size that is none, something to skip that the model
            does not have.

    >>> import torch
    >>> from blocksparse.nn.exchange import prunable
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 10))
    >>> [(weight.name, weight.grid) for weight in prunable(model, block_size=16)]
    [('0.weight', (3, 4)), ('2.weight', (1, 3))]
    """
    return [weight for weight, reason in survey(model, block_size, skip) if reason is None]


def survey(
    model: nn.Module, block_size: int | tuple[int, int] = 32, skip: Skip = ()
) -> list[tuple[Prunable, str | None]]:
    """Every dense weight of a model, and None or the reason why it cannot become block-sparse.

    A weight here is a parameter of two axes or more; what else they are, arguments and errors are as for `prunable`.
    """
    if not isinstance(model, nn.Module):
        raise BlockSparseError.expected("model", "a torch.nn.Module", type(model).__name__)
    block = checked_block(block_size)
    skipped_modules, skipped_names = _skipped(model, skip)
    owners: dict[Tensor, list[str]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append(_dotted(name, key))
    found = []
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseModule):
            continue
        for key, parameter in module._parameters.items():
            if parameter is None or not _is_weight(key, parameter):
                continue
            weight = Prunable(_dotted(name, key), module, key, block)
            if parameter.is_meta:
                raise BlockSparseError.expected("model", "parameters with values", f"{weight.name} on the meta device")
            reason = _obstacle(weight)
            others = [other for other in owners[parameter] if other != weight.name]
            if reason is None and others:
                reason = f"tied to {', '.join(others)}"
            if reason is None and (module in skipped_modules or weight.name in skipped_names):
                reason = "skipped"
            found.append((weight, reason))
    return found


@torch.no_grad()
def exchange(
    model: nn.Module, layouts: Mapping[str, BlockLayout], optimizer: torch.optim.Optimizer | None = None
) -> nn.Module:
    """Gives weights of a model layouts, in place: their modules become block-sparse ones, with the weights' values.

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
        BlockSparseError: a name that is none of a weight that can become block-sparse, a layout of another shape, an
            optimizer that has none of the weights or keeps what cannot follow. Nothing is changed then.

    >>> import torch, blocksparse as bs
    >>> from blocksparse.nn.exchange import exchange
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU())
    >>> exchange(model, {"0.weight": bs.BlockLayout([[True, False]], block_size=32)})
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
    """A parameter and the one that takes its place; `take` makes what belongs to the new one of what did to the old."""

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
    if _is_dense_lstm(module):
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
            take = partial(_pad, shape=shape, parts=_parts(module, key))
            setattr(new, key, nn.Parameter(take(old.detach()), requires_grad=old.requires_grad))
            changes.append(_Change(key, old, getattr(new, key), take))
    return like(module, new)


def _filled(new: BlockSparseModule, weight: Prunable, layout: BlockLayout, changes: list[_Change]) -> BlockSparseModule:
    """A module on the meta device with the values that the weight has on the layout."""
    old = getattr(weight.module, weight.parameter)

    def take(tensor: Tensor) -> Tensor:
        return from_dense(_pad(_as_matrix(weight.module, tensor), weight.shape, weight._parts), layout)

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


# -- what can be exchanged ---------------------------------------------------------------------------------------


def _weights_of(model: nn.Module, layouts: Mapping[str, BlockLayout]) -> dict[str, Prunable]:
    surveys: dict[tuple[int, int], dict[str, tuple[Prunable, str | None]]] = {}
    found = {}
    for name, layout in layouts.items():
        check_layout(layout)
        if layout.block_shape not in surveys:
            surveys[layout.block_shape] = {w.name: (w, reason) for w, reason in survey(model, layout.block_shape)}
        weight, reason = surveys[layout.block_shape].get(name, (None, "the model has none of this name"))
        if weight is None or reason is not None:
            raise BlockSparseError.expected("layouts", f"weights that can be block-sparse, not {name}", reason)
        if weight.shape != layout.shape:
            raise BlockSparseError.expected(f"the layout of {name}", f"shape {weight.shape}", repr(layout))
        found[name] = weight
    return found


def _is_weight(key: str, parameter: nn.Parameter) -> bool:
    if isinstance(parameter, nn.UninitializedParameter):
        return key.startswith("weight")
    return parameter.dim() >= 2


def _obstacle(weight: Prunable) -> str | None:
    """Why the weight cannot be exchanged, its name apart."""
    module, parameter = weight.module, getattr(weight.module, weight.parameter)
    kind = type(module)
    if isinstance(parameter, nn.UninitializedParameter):
        return "not initialized yet"
    if parameter.dtype not in DTYPES:
        return f"{parameter.dtype} is not supported"
    if isinstance(module, Recurrent) and not _is_dense_lstm(module):
        fits = weight.parameter in module._sizes and _fits(weight)
        return None if fits else "no multiple of the block"
    known = kind in (nn.Linear, *CONVOLUTIONS, *TRANSPOSED) or _is_transformers_conv1d(module)
    if not known and not (_is_dense_lstm(module) and weight.parameter.startswith("weight_")):
        return f"{kind.__name__} has no block-sparse counterpart"
    if getattr(module, "groups", 1) != 1:
        return f"{module.groups} groups"
    return None


def _fits(weight: Prunable) -> bool:
    rows, columns = weight.matrix().shape
    return rows // weight._parts % weight.block_shape[0] == 0 and columns % weight.block_shape[1] == 0


def _skipped(model: nn.Module, skip: Skip) -> tuple[set[nn.Module], set[str]]:
    """The modules that are to be left as they are, and the names of parameters."""
    modules: set[nn.Module] = set()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    named = dict(model.named_modules(remove_duplicate=False))
    names: set[str] = set()
    for item in [skip] if isinstance(skip, str | nn.Module) else skip:
        found = named.get(item) if isinstance(item, str) else item
        if isinstance(found, nn.Module) and found in named.values():
            modules.update(found.modules())
        elif item in parameters:
            names.add(item)
        else:
            got = type(item).__name__ if isinstance(item, nn.Module) else repr(item)
            raise BlockSparseError.expected("skip", "modules of the model, or names of modules or parameters", got)
    return modules, names


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
    """PyTorch's encoder layers read the weights of their linear layers in inference, unless told that they cannot."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if isinstance(module.linear1, Linear) or isinstance(module.linear2, Linear):
                module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _is_dense_lstm(module: nn.Module) -> bool:
    """Whether it is an LSTM, PyTorch's or ours, without padding: all of its weights are dense."""
    return type(module) is nn.LSTM or (type(module) is LSTM and not module._modules)


def _is_transformers_conv1d(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _parts(module: nn.Module, parameter: str) -> int:
    """Of how many parts, one above the other, a weight or a bias is: an LSTM's of four gates."""
    if _is_dense_lstm(module):
        return 1 if parameter.startswith("weight_hr") else 4
    if isinstance(module, Recurrent) and parameter in module._sizes:
        return len(getattr(module, parameter)) // module._sizes[parameter][0].padded
    return 1


def _as_matrix(module: nn.Module, tensor: Tensor) -> Tensor:
    """A tensor of the shape of the module's weight as `[out, in, *kernel]`, a view."""
    flipped = type(module) in TRANSPOSED or _is_transformers_conv1d(module)
    return tensor.transpose(0, 1) if flipped else tensor


def _pad(tensor: Tensor, shape: tuple[int, ...], parts: int = 1) -> Tensor:
    """The tensor with zeros behind each of its parts, so that its first axes have this shape."""
    if tuple(tensor.shape[: len(shape)]) == shape:
        return tensor
    split = tensor.unflatten(0, (parts, -1))
    wanted = (shape[0] // parts, *shape[1:])
    more = [(0, size - here) for size, here in zip(wanted, split.shape[1:], strict=False)]
    behind = [(0, 0)] * (tensor.dim() - len(shape))
    return F.pad(split, [n for pair in reversed(more + behind) for n in pair]).flatten(0, 1)


def _up(size: int, block: int) -> int:
    return -(-size // block) * block


def _dotted(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter
