"""Measures how many times faster a layer is block-sparse than dense, on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..measure import Clock, alternate, cuda_clock, host_clock
from ..nn.linear import Linear
from ..nn.module import BlockSparseModule, Weight
from ..nn.recurrent import Recurrent
from ..ops.linear import LINEAR
from ..surgery.prunable import Prunable, prunable
from ..surgery.replace import sparse_module
from .densify import densify

# Layers that agree in all of this are assumed to be equally fast.
_measured: dict[tuple[Any, ...], float] = {}


def speed_up_of_weight(weight: Prunable, layout: BlockLayout, tokens: int) -> float:
    """The same for a weight that is still dense; its module is left as it is."""
    if isinstance(weight.module, nn.LSTM | Recurrent):
        alone = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        alone.weight = nn.Parameter(weight.padded().detach())
        (weight,) = prunable(alone, layout.block_shape, empty=True)
    module, chosen = weight.module, [(weight, layout)]
    return _speed_up(_key(module, layout, weight.tensor, tokens), lambda: module, lambda: sparse_module(chosen), tokens)


def speed_up_of_module(module: BlockSparseModule, tokens: int) -> float:
    """Returns time of the dense layer / time of this one, forward, without gradients; above 1 block-sparse is faster.

    Args:
        module: a block-sparse layer; or a weight of a recurrent layer, of which the product of one step is measured.
        tokens: rows of the input; of a convolution about this many positions of the output.
    """
    if isinstance(module, Weight):
        layer = Linear(*module.layout.shape[::-1], layout=module.layout, bias=False, device="meta")
        layer.values = module.values
        module = layer
    key = _key(module, module.layout, module.values, tokens)
    return _speed_up(key, lambda: densify(module), lambda: module, tokens)


def _key(module: Any, layout: BlockLayout, weight: Tensor, tokens: int) -> tuple[Any, ...]:
    names = ("kernel_size", "stride", "padding", "dilation", "padding_mode", "activation")
    settings = tuple(str(getattr(module, name, None)) for name in names)
    density = round(math.log(max(layout.nnz, 1) / math.prod(layout.grid), 1.1))
    here = weight.dtype, weight.device, torch.get_num_threads()
    return (
        type(module).__name__,
        module.bias is not None,
        settings,
        layout.shape,
        layout.block_shape,
        density,
        tokens,
        here,
    )


def _speed_up(
    key: tuple[Any, ...], dense: Callable[[], nn.Module], sparse: Callable[[], nn.Module], tokens: int
) -> float:
    made: Any = None
    try:
        made = sparse()
        backend = LINEAR.on(made.values.device, made.values.dtype).__name__
    except BlockSparseError:
        return 0.0  # no backend serves it here
    if (*key, backend) not in _measured:
        _measured[*key, backend] = _measure(dense(), made, tokens)
    return _measured[*key, backend]


@torch.no_grad()
def _measure(dense: nn.Module, sparse: Any, tokens: int) -> float:
    x = _input(sparse, tokens)
    calls = {"sparse": lambda: sparse(x), "dense": lambda: dense(x)}
    return alternate(calls, rounds=7, budget=0.1, clock=_clock(x.device)).ratio("dense", "sparse").median


def _input(layer: Any, tokens: int) -> Tensor:
    like = {"device": layer.values.device, "dtype": layer.values.dtype}
    if isinstance(layer, Linear):
        return torch.randn(tokens, layer.in_features, **like)
    side = math.ceil(tokens ** (1 / layer.axes))
    reach = [step * (taps - 1) + 1 for step, taps in zip(layer.dilation, layer.kernel_size, strict=True)]
    sizes = [max(side * stride, least) for stride, least in zip(layer.stride, reach, strict=True)]
    return torch.randn(1, layer.in_channels, *sizes, **like)


def _clock(device: torch.device) -> Clock:
    return cuda_clock if device.type == "cuda" else host_clock
