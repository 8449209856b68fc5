"""Formulas for PyTorch's FlopCounterMode: two operations for each number of a stored block and each place it is used.

Its module imports triton, so that the formulas wait until somebody else imports it.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch

from ..import_hook import when_imported

_COUNTER = "torch.utils.flop_counter"


def linear(x: Any, values: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Of `blocksparse::linear`."""
    return int(2 * x[0] * math.prod(values))


def linear_wgrad(grad: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Of `blocksparse::linear_wgrad`."""
    return int(2 * grad[0] * math.prod(out_shape))


def expert_linear(
    values: Any, x: Any, indices: Any, in_blocks: int, starts: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Of `blocksparse::expert_linear`, as if all experts had as many rows, or as many blocks."""
    return int(2 * x[0] * math.prod(values) // (starts[0] - 1))


def expert_linear_wgrad(
    grad: Any, x: Any, indices: Any, in_blocks: int, starts: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Of `blocksparse::expert_linear_wgrad`, counted in the same way."""
    return int(2 * x[0] * math.prod(out_shape) // (starts[0] - 1))


def conv(
    x: Any, values: Any, bias: Any, indices: Any, in_blocks: int, transpose: bool, transposed: bool, size: Any,
    *args: Any, out_shape: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    """Of `blocksparse::conv`; taps that lie in the padding count, as in PyTorch's own formula."""
    places = x[1:-1] if transposed else size
    return int(2 * x[0] * math.prod(places) * math.prod(values))


def conv_wgrad(
    grad: Any, x: Any, indices: Any, in_blocks: int, transposed: bool, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Of `blocksparse::conv_wgrad`."""
    places = (x if transposed else grad)[1:-1]
    return int(2 * x[0] * math.prod(places) * math.prod(out_shape))


def _register(counter: ModuleType) -> None:
    for formula in (linear, linear_wgrad, expert_linear, expert_linear_wgrad, conv, conv_wgrad):
        target = getattr(torch.ops.blocksparse, formula.__name__)
        if target not in counter.flop_registry:
            counter.register_flop_formula(target)(formula)


def count_flops() -> None:
    """Has FlopCounterMode count the library's operations."""
    when_imported(_COUNTER, _register)
