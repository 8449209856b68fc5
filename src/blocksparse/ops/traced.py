"""Graphs compiled for a GPU see through the operations to their kernels: they hold launches in place of an op.

What kernels need of a layout is its schedule, a few index tensors on their device. A compiled graph has no layout: it
brings the schedule along, behind the layout's own index tensors. Exported graphs keep the ops, and so do those for any
pattern, those of CPUs, of GPUs and dtypes that the kernels refuse, those within `use_backend`, and operations that say
so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from ..errors import BlockSparseError
from ..layout import BlockLayout
from .gpu.tiles import MAX_TOKENS, MIN_TOKENS
from .operands import OperandLayout
from .registry import LIBRARY, LayoutOp, is_forced

# Graphs for devices of this type hold the launches of kernels.
SEEN_THROUGH = "cuda"


class TracedLayout(NamedTuple):
    """What a graph that is being traced knows of a layout."""

    grid: tuple[int, int]
    block_shape: tuple[int, int]
    nnz: int
    schedule: Sequence[Tensor]

    @property
    def shape(self) -> tuple[int, int]:
        return self.grid[0] * self.block_shape[0], self.grid[1] * self.block_shape[1]

    @property
    def values_shape(self) -> tuple[int, int, int]:
        return self.nnz, *self.block_shape

    @property
    def density(self) -> float:
        return self.nnz / (self.grid[0] * self.grid[1])

    @property
    def T(self) -> TracedLayout:
        """The transposed layout, but for its schedule."""
        return TracedLayout(self.grid[::-1], self.block_shape[::-1], self.nnz, ())


def wants_schedule(layout: BlockLayout, x: Tensor) -> bool:
    """Whether a call with x is part of a graph that is to bring the layout's schedule along: not one with a number of
    rows that is found out when it runs."""
    traced = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
    seen = traced and x.device.type == SEEN_THROUGH and not isinstance(layout, OperandLayout) and not is_forced()
    return seen and all(_is_known(size == 0) for size in x.shape)


def has_bucket(tokens: int) -> bool:
    """Whether it is known while a graph is traced which schedule this number of tokens wants.

    The comparisons are those of `bucket`, so that sizes are not bound any further.
    """
    size = MIN_TOKENS
    while size < MAX_TOKENS and _is_known(tokens > size) and tokens > size:
        size *= 2
    return size == MAX_TOKENS or _is_known(tokens > size)


def _is_known(condition: bool) -> bool:
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return bool(guard_or_false(condition) == guard_or_true(condition))


def traced_layout(indices: Sequence[Tensor], in_blocks: int, block: Sequence[int]) -> TracedLayout:
    """The layout of a graph's index tensors with a schedule behind them."""
    crow, col, *schedule = indices
    # Sizes of a layout are constants, whatever sizes of x the tracer takes for dynamic.
    grid = int(crow.shape[0]) - 1, int(in_blocks)
    return TracedLayout(grid, (int(block[0]), int(block[1])), int(col.shape[0]), schedule)


def see_through(op: LayoutOp, launched: Callable[..., Any]) -> None:
    """Replaces the op by launches of its kernels in a graph with a schedule, as `torch.library.triton_op` does.

    `launched` takes what the op takes, and returns what it returns, or NotImplemented where the graph is to keep it.
    """

    def rule(mode: Any, torch_op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        indices = args[len(op.operands)]
        # Exported graphs keep the op, so that they are self-contained.
        if len(indices) > 2 and torch._functorch.config.decompose_custom_triton_ops and _by_kernels(op, args[0]):
            with mode:
                result = launched(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return mode.__torch_dispatch__(torch_op, types, args, kwargs)

    torch.library.register_torch_dispatch(f"blocksparse::{op.name}", FunctionalTensorMode, rule, lib=LIBRARY)


def _by_kernels(op: LayoutOp, x: Tensor) -> bool:
    """Whether the op launches Triton's kernels. Where nothing serves it, the op is kept, and says so when it runs."""
    try:
        return op.on(x.device, x.dtype) is op.backends["triton"]
    except BlockSparseError:
        return False
