"""What the weights of a layer are multiplied with in a call, for some rows: patches, states, what was attended to."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...nn.conv import margins
from ...surgery.prunable import CONVOLUTIONS, TRANSPOSED, Prunable
from .calibrate import as_rows


@dataclass(frozen=True)
class Product:
    """Weights of a module whose products are added: one, or an LSTM's of the inputs and of the states.

    Args:
        module: that is called; the weights may be those of a module in it.
        weights: of the same outputs.
        bias: the name of the parameter that is added to the product, if there is one.
        level, direction: of a recurrent layer's weights.
    """

    module: Any
    weights: tuple[Prunable, ...]
    bias: str | None
    level: int = 0
    direction: int = 0

    @property
    def name(self) -> str:
        """By which products of a module differ."""
        return self.weights[0].name

    @property
    def sizes(self) -> list[int]:
        """Inputs of each weight, a convolution's times its taps, padded to whole blocks."""
        return [weight.shape[1] * weight.blocks.taps for weight in self.weights]

    @property
    def block(self) -> tuple[int, int]:
        rows, columns = self.weights[0].block_shape
        return rows, columns * self.weights[0].blocks.taps

    def matrix(self) -> Tensor:
        """The weights side by side, `[out, sum(sizes)]`, whole blocks; a copy where there are several."""
        parts = [weight.padded().detach().flatten(1) for weight in self.weights]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def set(self, matrix: Tensor, other: Product, shift: Tensor) -> None:
        """Sets the weights, and the bias to another product's and this `[out]`, of whole blocks."""
        for weight, part in zip(self.weights, matrix.split(self.sizes, 1), strict=True):
            blocks, target = weight.blocks, weight.matrix()
            part = part.unflatten(0, (blocks.parts, -1))[:, : len(target) // blocks.parts].flatten(0, 1)
            target.copy_(part.unflatten(1, (-1, blocks.taps))[:, : target.shape[1]].reshape(target.shape))
        if self.bias:
            bias, parts = getattr(self.weights[0].module, self.bias), self.weights[0].blocks.parts
            shift = shift.unflatten(0, (parts, -1))[:, : len(bias) // parts].flatten()
            bias.copy_(getattr(other.weights[0].module, self.bias) + shift)

    def rows(self, args: tuple[Any, ...]) -> int:
        """How many rows of outputs a call has: tokens, positions, or steps of all sequences."""
        if type(self.module) in LAYERS:
            return len(packed(self.module, args)[0].data)
        if _is_conv(self.module):
            x = _images(self.module, args[0])
            return len(x) * math.prod(_sizes(self.module, x))
        if type(self.module) is nn.MultiheadAttention and self.weights[0].module is self.module:
            return sum(x.numel() // x.shape[-1] for x in _different(args[:3]))
        return args[0].numel() // args[0].shape[-1]

    def inputs(self, args: tuple[Any, ...], at: Tensor) -> Tensor:
        """The inputs of all weights side by side for these rows of a call: `[len(at), sum(sizes)]`, zero-padded."""
        if type(self.module) in LAYERS:
            known = _states(self.module, self.level, self.direction, *packed(self.module, args))
            parts = [known[weight.parameter.split("_l")[0]][at] for weight in self.weights]
        elif type(self.module) in CELLS:
            state = args[1] if len(args) > 1 else None
            state = state[0] if isinstance(state, tuple | list) else state
            state = args[0].new_zeros(*args[0].shape[:-1], self.module.hidden_size) if state is None else state
            known = {"weight_ih": as_rows(args[0]), "weight_hh": as_rows(state)}
            parts = [known[weight.parameter][at] for weight in self.weights]
        elif type(self.module) is nn.MultiheadAttention:
            whole = self.weights[0].module is self.module
            parts = [torch.cat([as_rows(x) for x in (_different(args[:3]) if whole else [_attended(args)])])[at]]
        elif _is_conv(self.module):
            parts = [_patches(self.module, _images(self.module, args[0]), at)]
        else:
            parts = [as_rows(args[0])[at]]
        padded = [F.pad(part, (0, size - part.shape[1])) for part, size in zip(parts, self.sizes, strict=True)]
        return padded[0] if len(padded) == 1 else torch.cat(padded, 1)


def products(module: Any, weights: list[Prunable]) -> list[Product]:
    """How a module's weights are multiplied, in the order in which it does that, those that can be observed."""
    kind, by_name = type(module), {weight.parameter: weight for weight in weights}
    if kind is nn.MultiheadAttention:
        biases = {"in_proj_weight": "in_proj_bias", "weight": "bias"}
        has_bias = module.in_proj_bias is not None
        return [
            Product(module, (by_name[name],), bias if has_bias else None)
            for name, bias in biases.items()
            if name in by_name
        ]
    if kind not in LAYERS and kind not in CELLS:
        seen = list(by_name) == ["weight"]
        return [Product(module, (by_name["weight"],), "bias" if module.bias is not None else None)] if seen else []
    cells = [(0, 0, "")] if kind in CELLS else []
    for level in range(getattr(module, "num_layers", 0)):
        cells += [(level, 0, f"_l{level}")] + [(level, 1, f"_l{level}_reverse")] * module.bidirectional
    # A GRU's gates do not add its products.
    together = [("ih",), ("hh",)] if kind in (nn.GRU, nn.GRUCell) else [("ih", "hh")]
    found = []
    for level, direction, suffix in cells:
        for names in together:
            chosen = tuple(by_name[f"weight_{n}{suffix}"] for n in names if f"weight_{n}{suffix}" in by_name)
            if chosen:
                bias = f"bias_{names[0]}{suffix}" if module.bias else None
                found.append(Product(module, chosen, bias, level, direction))
    return found


def called(model: nn.Module, weights: Iterable[Prunable]) -> dict[nn.Module, list[Prunable]]:
    """The weights by the modules that are called with their inputs: of attention not the linear layer in it."""
    attention = [module for module in model.modules() if type(module) is nn.MultiheadAttention]
    outer: dict[nn.Module, nn.Module] = {module.out_proj: module for module in attention}
    found: dict[nn.Module, list[Prunable]] = {}
    for weight in weights:
        found.setdefault(outer.get(weight.module, weight.module), []).append(weight)
    return found


def unseen(weight: Prunable) -> str:
    """Why nothing that reaches a weight was seen."""
    known = products(weight.module, [weight])
    return "no batch reaches it" if known else f"what reaches it inside of {type(weight.module).__name__} is not seen"


# -- attention ----------------------------------------------------------------------------------------------------


def _different(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _attended(call: Any) -> Tensor:
    """What reaches the last linear layer of a MultiheadAttention: its outputs where that layer is the identity."""
    module, args, kwargs = call.module, call.args, call.kwargs
    twin: Any = copy.copy(module)
    twin._modules = dict(module._modules)
    weight = module.out_proj.weight
    twin.out_proj = nn.Linear(module.embed_dim, module.embed_dim, bias=False, device="meta")
    twin.out_proj.weight = nn.Parameter(torch.eye(module.embed_dim, dtype=weight.dtype, device=weight.device))
    return twin.forward(*args, **kwargs)[0]


# -- convolutions -------------------------------------------------------------------------------------------------


def _is_conv(module: nn.Module) -> bool:
    return type(module) in CONVOLUTIONS or type(module) in TRANSPOSED


def _images(module: Any, x: Tensor) -> Tensor:
    """`[n, channels, *space]`, with the margins of a convolution."""
    x = x.detach() if x.dim() == len(module.kernel_size) + 2 else x.detach().unsqueeze(0)
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if type(module) in TRANSPOSED:
        return x
    return F.pad(x, margins(module), "constant" if module.padding_mode == "zeros" else module.padding_mode)


def _sizes(module: Any, x: Tensor) -> list[int]:
    """Of the output's space."""
    settings = zip(x.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True)
    if type(module) not in TRANSPOSED:
        return [(size - step * (taps - 1) - 1) // stride + 1 for size, taps, stride, step in settings]
    more = [extra - 2 * pad for pad, extra in zip(module.padding, module.output_padding, strict=True)]
    return [
        (size - 1) * stride + step * (taps - 1) + 1 + extra
        for (size, taps, stride, step), extra in zip(settings, more, strict=True)
    ]


def _patches(module: Any, x: Tensor, at: Tensor) -> Tensor:
    """What is under the kernel at these places of the output, `[len(at), channels * taps]`."""
    sizes, axes = _sizes(module, x), len(module.kernel_size)
    places = torch.unravel_index(at, (len(x), *sizes))
    index: list[Tensor] = [places[0].view(-1, *[1] * axes)]
    inside = x.new_ones([1] * (axes + 1))
    for axis, (place, taps) in enumerate(zip(places[1:], module.kernel_size, strict=True)):
        tap = torch.arange(taps, device=x.device) * module.dilation[axis]
        shape = [-1, *[taps if other == axis else 1 for other in range(axes)]]
        if type(module) in TRANSPOSED:
            scaled = place[:, None] + module.padding[axis] - tap
            here = scaled.div(module.stride[axis], rounding_mode="floor")
            known = (scaled % module.stride[axis] == 0) & (here >= 0) & (here < x.shape[axis + 2])
            inside = inside * known.view(shape)
            here = here.clamp(0, x.shape[axis + 2] - 1)
        else:
            here = place[:, None] * module.stride[axis] + tap
        index.append(here.view(shape))
    found = x.movedim(1, -1)[tuple(index)] * inside.unsqueeze(-1)  # [len(at), *taps, channels]
    return found.movedim(-1, 1).flatten(1)


# -- recurrent layers ---------------------------------------------------------------------------------------------

LAYERS, CELLS = (nn.LSTM, nn.GRU, nn.RNN), (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
States = tuple[Tensor, ...] | None


def packed(module: Any, args: tuple[Any, ...]) -> tuple[PackedSequence, States]:
    """The sequences by time, the longest first, and their initial states `[layers * directions, batch, ...]`."""
    x, given = args[0], args[1] if len(args) > 1 else None
    state: States = (
        given if given is None or isinstance(given, tuple) else tuple(given) if isinstance(given, list) else (given,)
    )
    if isinstance(x, PackedSequence):
        order = x.sorted_indices
        state = state if state is None or order is None else tuple(each[:, order] for each in state)
        return PackedSequence(x.data.detach(), x.batch_sizes), state
    if x.dim() == 2:
        x, state = x.unsqueeze(1), None if state is None else tuple(each.unsqueeze(1) for each in state)
    elif module.batch_first:
        x = x.transpose(0, 1)
    steps, batch = x.shape[:2]
    return PackedSequence(x.detach().flatten(0, 1), torch.full((steps,), batch)), state


def above(module: Any, level: int, x: PackedSequence, state: States) -> PackedSequence:
    """What a level of a recurrent layer makes of its inputs, with the initial states of all levels."""
    directions = 2 if module.bidirectional else 1
    names = ["hidden_size", "bias", "bidirectional"]
    names += ["proj_size"] * (type(module) is nn.LSTM) + ["nonlinearity"] * (type(module) is nn.RNN)
    layer = type(module)(x.data.shape[1], **{name: getattr(module, name) for name in names}, device="meta")
    for key in [name for name, _ in layer.named_parameters()]:
        setattr(layer, key, getattr(module, key.replace("_l0", f"_l{level}")))
    if state is None:
        return layer(x)[0]
    first = tuple(each[level * directions : (level + 1) * directions] for each in state)
    return layer(x, first if type(module) is nn.LSTM else first[0])[0]


def _states(module: Any, level: int, direction: int, x: PackedSequence, state: States) -> dict[str, Tensor]:
    """What each weight of a level and direction is multiplied with, `[rows, features]` by time."""
    for lower in range(level):
        x = above(module, lower, x, state)
    sizes, directions = x.batch_sizes.tolist(), 2 if module.bidirectional else 1
    after = above(module, level, x, state).data.chunk(directions, 1)[direction].split(sizes)
    first = after[0].new_zeros(sizes[0], after[0].shape[1])
    first = first if state is None else state[0][level * directions + direction].to(first.dtype)
    before = []
    for t, size in enumerate(sizes):
        known = after[t + 1 :][:1] if direction else after[:t][-1:]
        rows = known[0] if known else first[:0]
        before.append(torch.cat([rows, first[len(rows) :]])[:size])
    return {"weight_ih": as_rows(x.data), "weight_hh": as_rows(torch.cat(before))}
