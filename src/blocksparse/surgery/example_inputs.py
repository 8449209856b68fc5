"""Finds inputs that a model accepts, by calls without values."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, signature
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BlockSparseError, first_line
from .model_tools import copy_model, parameter_device
from .prunable import CONV1D, CONVOLUTIONS, TRANSPOSED, qualified

# Sizes of images to try, the usual ones first: with others, `flatten` and a linear layer may not fit together.
SIDES = tuple(dict.fromkeys([32, 28, 64, 224, 96, 128, 227, 256, 299, 384, 512, *range(1, 257), 1024, 8000, 16000]))
MAX_CALLS = 5000


@torch.no_grad()
def find_inputs(model: nn.Module) -> tuple[Tensor, ...]:
    """Return random inputs of two samples that a model accepts, for its required arguments.

    Shapes that a layer of the model accepts are tried by calls on the meta device.

    Raises:
        BlockSparseError: the model accepts none of these inputs.

    >>> import torch
    >>> from blocksparse.surgery.example_inputs import find_inputs
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 10 * 10, 8))
    >>> [tuple(x.shape) for x in find_inputs(model)]
    [(2, 3, 12, 12)]
    """
    required = [each for each in signature(model.forward).parameters.values() if each.default is Parameter.empty]
    count = sum(each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for each in required)
    empty, error = copy_model(model).to("meta").eval(), None
    for candidate in islice(_candidates(model, max(1, count)), MAX_CALLS):
        try:
            empty(*(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in candidate))
        except Exception as raised:  # the user's module may raise anything
            error = error or raised
            continue
        device = parameter_device(model)
        return tuple(
            torch.randn(shape, dtype=dtype, device=device)
            if dtype.is_floating_point
            else torch.zeros(shape, dtype=dtype, device=device)
            for shape, dtype in candidate
        )
    got = "" if error is None else f" ({type(error).__name__}: {first_line(error)[:200]})"
    raise BlockSparseError(f"model: no inputs were found that it accepts{got}: pass example=, inputs to run it on.")


Spec = tuple[tuple[int, ...], torch.dtype]


def _candidates(model: nn.Module, count: int) -> Iterator[tuple[Spec, ...]]:
    """Yield shapes and dtypes of arguments once each, those of earlier layers first."""
    modules, seen = list(model.modules()), set[tuple[Spec, ...]]()
    for side in SIDES:
        specs = dict.fromkeys(spec for module in modules for spec in _inputs_of(module, side))
        for candidate in product(specs, repeat=count):
            if candidate not in seen:
                seen.add(candidate)
                yield candidate


def _inputs_of(module: Any, side: int) -> list[Spec]:
    """Return shapes and dtypes of inputs that a layer accepts."""
    if isinstance(module, nn.Embedding):
        return [((2, 8), torch.int64)]
    if type(module) in (*CONVOLUTIONS, *TRANSPOSED):
        return [((2, module.in_channels, *[side] * len(module.kernel_size)), module.weight.dtype)]
    for key in ("in_features", "input_size", "embed_dim", "nx"):
        is_layer = isinstance(module, nn.Linear | nn.RNNBase | nn.MultiheadAttention)
        if (is_layer or qualified(type(module)) == CONV1D) and isinstance(size := getattr(module, key, None), int):
            dtype = next(iter(module.parameters())).dtype
            return [((2, size), dtype), ((2, 5, size), dtype)]
    return []
