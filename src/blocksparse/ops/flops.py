"""Formulas for PyTorch's FlopCounterMode: two operations per number of a stored block and per use of it.

PyTorch's module of the counter imports triton, so the formulas are registered only once something else imports it.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch

from ..import_hook import when_imported

_COUNTER = "torch.utils.flop_counter"


def linear(x: Any, values: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return the operations of `blocksparse::linear`."""
    return int(2 * x[0] * math.prod(values))


def linear_wgrad(grad: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return the operations of `blocksparse::linear_wgrad`."""
    return int(2 * grad[0] * math.prod(out_shape))


def expert_linear(
    values: Any, x: Any, indices: Any, in_blocks: int, starts: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Return the operations of `blocksparse::expert_linear`, assuming equal rows or equal blocks for all experts."""
    return int(2 * x[0] * math.prod(values) // (starts[0] - 1))


def expert_linear_wgrad(
    grad: Any, x: Any, indices: Any, in_blocks: int, starts: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Return the operations of `blocksparse::expert_linear_wgrad`, with the assumption of `expert_linear`."""
    return int(2 * x[0] * math.prod(out_shape) // (starts[0] - 1))


def conv(
    x: Any, values: Any, bias: Any, indices: Any, in_blocks: int, transpose: bool, transposed: bool, size: Any,
    *args: Any, out_shape: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    """Return the operations of `blocksparse::conv`; taps in the padding count, as in PyTorch's own formula."""
    places = x[1:-1] if transposed else size
    return int(2 * x[0] * math.prod(places) * math.prod(values))


def conv_wgrad(
    grad: Any, x: Any, indices: Any, in_blocks: int, transposed: bool, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Return the operations of `blocksparse::conv_wgrad`."""
    places = (x if transposed else grad)[1:-1]
    return int(2 * x[0] * math.prod(places) * math.prod(out_shape))


def _register(counter: ModuleType) -> None:
    """Register the formulas of the library's ops with torch.utils.flop_counter."""
    for formula in (linear, linear_wgrad, expert_linear, expert_linear_wgrad, conv, conv_wgrad):
        target = getattr(torch.ops.blocksparse, formula.__name__)
        if target not in counter.flop_registry:
            counter.register_flop_formula(target)(formula)


def count_flops() -> None:
    """Let FlopCounterMode count the library's operations."""
    when_imported(_COUNTER, _register)
