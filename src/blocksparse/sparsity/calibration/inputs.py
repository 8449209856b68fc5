"""What the weights of a layer are multiplied with in a call, for some of its rows: patches, and states of an LSTM."""

from __future__ import annotations

import math
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
        weights: of the same module and the same outputs.
        bias: the name of the parameter that is added to the product, if there is one.
        level, direction: of an LSTM's weights.
    """

    weights: tuple[Prunable, ...]
    bias: str | None
    level: int = 0
    direction: int = 0

    @property
    def module(self) -> Any:
        """That has the weights."""
        return self.weights[0].module

    @property
    def sizes(self) -> list[int]:
        """Inputs of each weight, a convolution's times its taps, padded to whole blocks."""
        return [weight.shape[1] * weight.blocks.taps for weight in self.weights]

    @property
    def block(self) -> tuple[int, int]:
        """(rows, columns) of the weights' blocks, the columns times the taps."""
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
            bias, parts = getattr(self.module, self.bias), self.weights[0].blocks.parts
            shift = shift.unflatten(0, (parts, -1))[:, : len(bias) // parts].flatten()
            bias.copy_(getattr(other.module, self.bias) + shift)

    def rows(self, args: tuple[Any, ...]) -> int:
        """How many rows of outputs a call has: tokens, positions, or steps of all sequences."""
        if type(self.module) is nn.LSTM:
            return len(packed(self.module, args)[0].data)
        if _is_conv(self.module):
            x = _images(self.module, args[0])
            return len(x) * math.prod(_sizes(self.module, x))
        return args[0].numel() // args[0].shape[-1]

    def inputs(self, args: tuple[Any, ...], at: Tensor) -> Tensor:
        """The inputs of all weights side by side for these rows of a call: `[len(at), sum(sizes)]`, zero-padded."""
        if type(self.module) is nn.LSTM:
            known = _states(self.module, self.level, self.direction, *packed(self.module, args))
            parts = [known[weight.parameter.split("_l")[0]][at] for weight in self.weights]
        elif _is_conv(self.module):
            parts = [_patches(self.module, _images(self.module, args[0]), at)]
        else:
            parts = [as_rows(args[0])[at]]
        padded = [F.pad(part, (0, size - part.shape[1])) for part, size in zip(parts, self.sizes, strict=True)]
        return padded[0] if len(padded) == 1 else torch.cat(padded, 1)


def products(module: Any, weights: list[Prunable]) -> list[Product]:
    """How a module's weights are multiplied, in the order in which it does that; none that cannot be observed."""
    if type(module) is not nn.LSTM:
        seen = len(weights) == 1 and weights[0].parameter == "weight"
        return [Product(tuple(weights), "bias" if module.bias is not None else None)] if seen else []
    found, by_name = [], {weight.parameter: weight for weight in weights}
    for level in range(module.num_layers):
        for direction in range(2 if module.bidirectional else 1):
            suffix = f"_l{level}{'_reverse' if direction else ''}"
            for names, bias in ((("weight_ih", "weight_hh"), f"bias_ih{suffix}"), (("weight_hr",), None)):
                chosen = tuple(by_name[name + suffix] for name in names if name + suffix in by_name)
                if chosen:
                    found.append(Product(chosen, bias if module.bias else None, level, direction))
    return found


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


# -- LSTMs --------------------------------------------------------------------------------------------------------

State = tuple[Tensor, Tensor] | None


def packed(module: nn.LSTM, args: tuple[Any, ...]) -> tuple[PackedSequence, State]:
    """The sequences by time, the longest first, and their initial states `[layers * directions, batch, ...]`."""
    x, state = args[0], args[1] if len(args) > 1 else None
    if isinstance(x, PackedSequence):
        order = x.sorted_indices
        state = state if state is None or order is None else (state[0][:, order], state[1][:, order])
        return PackedSequence(x.data.detach(), x.batch_sizes), state
    if x.dim() == 2:
        x = x.unsqueeze(1)
        state = None if state is None else (state[0].unsqueeze(1), state[1].unsqueeze(1))
    elif module.batch_first:
        x = x.transpose(0, 1)
    steps, batch = x.shape[:2]
    return PackedSequence(x.detach().flatten(0, 1), torch.full((steps,), batch)), state


def above(module: nn.LSTM, level: int, x: PackedSequence, state: State) -> PackedSequence:
    """What a level of it makes of its inputs, with the initial states of all levels."""
    directions = 2 if module.bidirectional else 1
    names = ("hidden_size", "bias", "bidirectional", "proj_size")
    layer = nn.LSTM(x.data.shape[1], **{name: getattr(module, name) for name in names}, device="meta")
    for key in [name for name, _ in layer.named_parameters()]:
        setattr(layer, key, getattr(module, key.replace("_l0", f"_l{level}")))
    part = slice(level * directions, (level + 1) * directions)
    return layer(x, None if state is None else (state[0][part], state[1][part]))[0]


def _states(module: Any, level: int, direction: int, x: PackedSequence, state: State) -> dict[str, Tensor]:
    """What each weight of a level and direction is multiplied with, `[rows, features]` by time."""
    for lower in range(level):
        x = above(module, lower, x, state)
    suffix = f"_l{level}{'_reverse' if direction else ''}"
    sizes = x.batch_sizes.tolist()
    at = level * (2 if module.bidirectional else 1) + direction
    recurrent, projection = getattr(module, f"weight_hh{suffix}"), getattr(module, f"weight_hr{suffix}", None)
    if state is None:
        h, c = (x.data.new_zeros(sizes[0], size) for size in (recurrent.shape[1], module.hidden_size))
    else:
        h, c = state[0][at].clone(), state[1][at].clone()
    bias = getattr(module, f"bias_ih{suffix}") + getattr(module, f"bias_hh{suffix}") if module.bias else None
    inputs = F.linear(x.data, getattr(module, f"weight_ih{suffix}"), bias).split(sizes)
    before, raw = [h] * len(sizes), [h] * len(sizes)
    for t in reversed(range(len(sizes))) if direction else range(len(sizes)):
        here = slice(sizes[t])
        before[t] = h[here].clone()
        i, f, g, o = (inputs[t] + before[t] @ recurrent.T).chunk(4, 1)
        c[here] = f.sigmoid() * c[here] + i.sigmoid() * g.tanh()
        raw[t] = o.sigmoid() * c[here].tanh()
        h[here] = raw[t] if projection is None else raw[t] @ projection.T
    found = {"weight_ih": x.data, "weight_hh": torch.cat(before), "weight_hr": torch.cat(raw)}
    return {name: as_rows(rows) for name, rows in found.items()}
