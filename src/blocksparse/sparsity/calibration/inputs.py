"""The inputs that a layer's weights multiply in a call: activations, patches of images, states, attention outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...nn.conv import margins
from ...surgery.prunable import CONVOLUTIONS, RECURRENT, TRANSPOSED, Prunable
from .calibrate import as_rows


@dataclass(frozen=True)
class Product:
    """Weights of a module whose products with their inputs are added: one weight, or an LSTM's two of the same gates.

    Args:
        module: the module that is called; the weights may belong to a module inside it.
        weights: weights with the same outputs.
        bias: name of the parameter that is added to the product, or None.
        level: level of a recurrent layer's weights.
        direction: 0, or 1 for the reverse direction of a recurrent layer.
    """

    module: Any
    weights: tuple[Prunable, ...]
    bias: str | None
    level: int = 0
    direction: int = 0

    @property
    def name(self) -> str:
        """The name of the first weight, which identifies the product."""
        return self.weights[0].name

    @property
    def sizes(self) -> list[int]:
        """The number of inputs of each weight, times taps of a convolution, padded to whole blocks."""
        return [weight.shape[1] * weight.blocks.taps for weight in self.weights]

    @property
    def block(self) -> tuple[int, int]:
        """(rows, columns) of a block, columns times taps."""
        rows, columns = self.weights[0].block_shape
        return rows, columns * self.weights[0].blocks.taps

    def matrix(self) -> Tensor:
        """Return the weights side by side, `[out, sum(sizes)]`, padded to whole blocks; a copy if there are several."""
        parts = [weight.padded().detach().flatten(1) for weight in self.weights]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def set(self, matrix: Tensor, other: Product, shift: Tensor) -> None:
        """Set the weights to a matrix and the bias to another product's bias + shift `[out]`, both with padding."""
        for weight, part in zip(self.weights, matrix.split(self.sizes, 1), strict=True):
            blocks, target = weight.blocks, weight.matrix()
            part = part.unflatten(0, (blocks.parts, -1))[:, : len(target) // blocks.parts].flatten(0, 1)
            target.copy_(part.unflatten(1, (-1, blocks.taps))[:, : target.shape[1]].reshape(target.shape))
        if self.bias:
            bias, parts = getattr(self.weights[0].module, self.bias), self.weights[0].blocks.parts
            shift = shift.unflatten(0, (parts, -1))[:, : len(bias) // parts].flatten()
            bias.copy_(getattr(other.weights[0].module, self.bias) + shift)

    def rows(self, args: tuple[Any, ...]) -> int:
        """Return the number of rows of outputs of a call: tokens, positions, or steps of all sequences."""
        if type(self.module) in LAYERS:
            return len(pack_inputs(self.module, args)[0].data)
        if _is_conv(self.module):
            x = _images(self.module, args[0])
            return len(x) * math.prod(_output_sizes(self.module, x))
        if type(self.module) is nn.MultiheadAttention and self.weights[0].module is self.module:
            return sum(x.numel() // x.shape[-1] for x in _distinct(args[:3]))
        return args[0].numel() // args[0].shape[-1]

    def inputs(self, args: tuple[Any, ...], at: Tensor) -> Tensor:
        """Return the inputs of all weights side by side at rows of a call, `[len(at), sum(sizes)]`, zero-padded."""
        if type(self.module) in LAYERS:
            inputs = _level_inputs(self.module, self.level, self.direction, *pack_inputs(self.module, args))
            parts = [inputs[weight.parameter.split("_l")[0]][at] for weight in self.weights]
        elif type(self.module) in CELLS:
            state = args[1] if len(args) > 1 else None
            state = state[0] if isinstance(state, tuple | list) else state
            state = args[0].new_zeros(*args[0].shape[:-1], self.module.hidden_size) if state is None else state
            inputs = {"weight_ih": as_rows(args[0]), "weight_hh": as_rows(state)}
            parts = [inputs[weight.parameter][at] for weight in self.weights]
        elif type(self.module) is nn.MultiheadAttention:
            whole = self.weights[0].module is self.module
            parts = [
                torch.cat([as_rows(x) for x in (_distinct(args[:3]) if whole else [_attention_outputs(args)])])[at]
            ]
        elif _is_conv(self.module):
            parts = [_patches(self.module, _images(self.module, args[0]), at)]
        else:
            parts = [as_rows(args[0])[at]]
        padded = [F.pad(part, (0, size - part.shape[1])) for part, size in zip(parts, self.sizes, strict=True)]
        return padded[0] if len(padded) == 1 else torch.cat(padded, 1)


def products(module: Any, weights: list[Prunable]) -> list[Product]:
    """Return the observable products of a module's weights, in the order in which it computes them."""
    found = _products(module, weights)
    return [replace(each, bias=None) if _is_bias_frozen(each) else each for each in found]


def _is_bias_frozen(product: Product) -> bool:
    """Return whether the user froze a product's bias alone: it requires no gradient, and its weight does."""
    if product.bias is None:
        return False
    weight = product.weights[0]
    return weight.tensor.requires_grad and not getattr(weight.module, product.bias).requires_grad


def _products(module: Any, weights: list[Prunable]) -> list[Product]:
    """Return the products of `products`, with all of their biases."""
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
        is_known = list(by_name) == ["weight"]
        return [Product(module, (by_name["weight"],), "bias" if module.bias is not None else None)] if is_known else []
    cells = [(0, 0, "")] if kind in CELLS else []
    for level in range(getattr(module, "num_layers", 0)):
        cells += [(level, 0, f"_l{level}")] + [(level, 1, f"_l{level}_reverse")] * module.bidirectional
    # A GRU's gates do not add the products of inputs and states.
    groups = [("ih",), ("hh",)] if kind in (nn.GRU, nn.GRUCell) else [("ih", "hh")]
    result = []
    for level, direction, suffix in cells:
        for names in groups:
            chosen = tuple(by_name[f"weight_{n}{suffix}"] for n in names if f"weight_{n}{suffix}" in by_name)
            if chosen:
                bias = f"bias_{names[0]}{suffix}" if module.bias else None
                result.append(Product(module, chosen, bias, level, direction))
    return result


def by_called_module(model: nn.Module, weights: Iterable[Prunable]) -> dict[nn.Module, list[Prunable]]:
    """Group weights by the module whose call reveals their inputs; for attention, not the linear layer inside it."""
    attention = [module for module in model.modules() if type(module) is nn.MultiheadAttention]
    outer: dict[nn.Module, nn.Module] = {module.out_proj: module for module in attention}
    groups: dict[nn.Module, list[Prunable]] = {}
    for weight in weights:
        groups.setdefault(outer.get(weight.module, weight.module), []).append(weight)
    return groups


def why_unobserved(weight: Prunable) -> str:
    """Return the reason why no input of a weight was observed."""
    known = products(weight.module, [weight])
    return "no batch reaches it" if known else f"its inputs inside {type(weight.module).__name__} cannot be observed"


# -- attention ----------------------------------------------------------------------------------------------------


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors without repetitions of the same object."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _attention_outputs(call: Any) -> Tensor:
    """Return the inputs of `out_proj` of a MultiheadAttention, by a call with the identity in its place."""
    module, args, kwargs = call.module, call.args, call.kwargs
    copied: Any = copy.copy(module)
    copied._modules = dict(module._modules)
    weight = module.out_proj.weight
    copied.out_proj = nn.Linear(module.embed_dim, module.embed_dim, bias=False, device="meta")
    copied.out_proj.weight = nn.Parameter(torch.eye(module.embed_dim, dtype=weight.dtype, device=weight.device))
    return copied.forward(*args, **kwargs)[0]


# -- convolutions -------------------------------------------------------------------------------------------------


def _is_conv(module: nn.Module) -> bool:
    """Return whether a module is a convolution, possibly transposed."""
    return type(module) in CONVOLUTIONS or type(module) in TRANSPOSED


def _images(module: Any, x: Tensor) -> Tensor:
    """Return the images `[n, channels, *space]`, with the padding of a convolution."""
    x = x.detach() if x.dim() == len(module.kernel_size) + 2 else x.detach().unsqueeze(0)
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if type(module) in TRANSPOSED:
        return x
    return F.pad(x, margins(module), "constant" if module.padding_mode == "zeros" else module.padding_mode)


def _output_sizes(module: Any, x: Tensor) -> list[int]:
    """Return the spatial sizes of the output."""
    axes = zip(x.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True)
    if type(module) not in TRANSPOSED:
        return [(size - step * (taps - 1) - 1) // stride + 1 for size, taps, stride, step in axes]
    extras = [extra - 2 * pad for pad, extra in zip(module.padding, module.output_padding, strict=True)]
    return [
        (size - 1) * stride + step * (taps - 1) + 1 + extra
        for (size, taps, stride, step), extra in zip(axes, extras, strict=True)
    ]


def _patches(module: Any, x: Tensor, at: Tensor) -> Tensor:
    """Return the patches that the kernel multiplies at these positions of the output, `[len(at), channels * taps]`."""
    sizes, axes = _output_sizes(module, x), len(module.kernel_size)
    places = torch.unravel_index(at, (len(x), *sizes))
    index: list[Tensor] = [places[0].view(-1, *[1] * axes)]
    inside = x.new_ones([1] * (axes + 1))
    for axis, (place, taps) in enumerate(zip(places[1:], module.kernel_size, strict=True)):
        tap = torch.arange(taps, device=x.device) * module.dilation[axis]
        shape = [-1, *[taps if other == axis else 1 for other in range(axes)]]
        if type(module) in TRANSPOSED:
            scaled = place[:, None] + module.padding[axis] - tap
            source = scaled.div(module.stride[axis], rounding_mode="floor")
            valid = (scaled % module.stride[axis] == 0) & (source >= 0) & (source < x.shape[axis + 2])
            inside = inside * valid.view(shape)
            source = source.clamp(0, x.shape[axis + 2] - 1)
        else:
            source = place[:, None] * module.stride[axis] + tap
        index.append(source.view(shape))
    patches = x.movedim(1, -1)[tuple(index)] * inside.unsqueeze(-1)  # [len(at), *taps, channels]
    return patches.movedim(-1, 1).flatten(1)


# -- recurrent layers ---------------------------------------------------------------------------------------------

LAYERS, CELLS = (nn.LSTM, nn.GRU, nn.RNN), (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
States = tuple[Tensor, ...] | None


def pack_inputs(module: Any, args: tuple[Any, ...]) -> tuple[PackedSequence, States]:
    """Return the sequences, packed, and their initial states `[layers * directions, batch, ...]` in the same order."""
    x, state = args[0], args[1] if len(args) > 1 else None
    if state is not None:
        state = tuple(state) if isinstance(state, tuple | list) else (state,)
    if isinstance(x, PackedSequence):
        order = x.sorted_indices
        state = state if state is None or order is None else tuple(each[:, order] for each in state)
        return PackedSequence(x.data.detach(), x.batch_sizes), state
    if x.dim() == 2:
        x, state = x.unsqueeze(1), None if state is None else tuple(each.unsqueeze(1) for each in state)
    elif module.batch_first:
        x = x.transpose(0, 1)
    steps, batch = x.shape[:2]
    return PackedSequence(x.detach().flatten(0, 1), torch.full((steps,), batch, device="cpu")), state


def level_layer(module: Any, level: int, *, to_train: bool = False) -> Any:
    """Return a layer of one level of a recurrent layer, with the same parameters.

    On a CPU, a layer to train is ours, with dense weights: GRUs and RNNs train in half the time of PyTorch's or less.
    """
    first = getattr(module, f"weight_ih_l{level}")
    kind, inputs = type(module), first.shape[1]
    kind = RECURRENT.get(kind, kind) if to_train and first.is_cpu else kind
    names = ["hidden_size", "bias", "bidirectional"]
    names += ["proj_size"] * (type(module) is nn.LSTM) + ["nonlinearity"] * (type(module) is nn.RNN)
    layer = kind(inputs, **{name: getattr(module, name) for name in names}, device="meta")
    for key in [name for name, _ in layer.named_parameters()]:
        setattr(layer, key, getattr(module, key.replace("_l0", f"_l{level}")))
    return layer


def level_states(layer: Any, level: int, state: States) -> Any:
    """Return the initial states of one level, as its layer accepts them, given those of all levels."""
    if state is None:
        return None
    directions = 2 if layer.bidirectional else 1
    initial = tuple(each[level * directions : (level + 1) * directions] for each in state)
    return initial if len(initial) > 1 else initial[0]  # h and c of an LSTM


def run_level(module: Any, level: int, x: PackedSequence, state: States) -> PackedSequence:
    """Return the outputs of one level of a recurrent layer; `state` holds the initial states of all levels."""
    return level_layer(module, level)(x, level_states(module, level, state))[0]


def _level_inputs(module: Any, level: int, direction: int, x: PackedSequence, state: States) -> dict[str, Tensor]:
    """Return the inputs that each weight of a level and direction multiplies, `[rows, features]`, by time."""
    for lower in range(level):
        x = run_level(module, lower, x, state)
    sizes, directions = x.batch_sizes.tolist(), 2 if module.bidirectional else 1
    after = run_level(module, level, x, state).data.chunk(directions, 1)[direction].split(sizes)
    first = after[0].new_zeros(sizes[0], after[0].shape[1])
    first = first if state is None else state[0][level * directions + direction].to(first.dtype)
    before = []
    for t, size in enumerate(sizes):
        previous = after[t + 1 :][:1] if direction else after[:t][-1:]
        rows = previous[0] if previous else first[:0]
        before.append(torch.cat([rows, first[len(rows) :]])[:size])
    return {"weight_ih": as_rows(x.data), "weight_hh": as_rows(torch.cat(before))}
