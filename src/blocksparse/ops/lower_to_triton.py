"""Lowering to Triton: graphs compiled for a GPU hold the launches of an operation's kernels instead of its op.

Kernels need the schedule of a layout, a few index tensors on their device. A compiled graph has no layout; it carries
the schedule behind the layout's own index tensors. Some graphs keep the ops: exported graphs, graphs that serve every
layout, graphs for CPUs, for GPUs and dtypes that the kernels refuse, graphs within `use_backend`, and those for which
the operation declines.
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
from .graph_layout import DynamicLayout
from .registry import LayoutOp, is_forced
from .torch_op import LIBRARY

# The device type whose graphs hold launches of kernels.
LOWERED_DEVICE = "cuda"


class TracedLayout(NamedTuple):
    """The properties of a layout that are known while a graph is traced."""

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
        """The transposed layout, without a schedule."""
        return TracedLayout(self.grid[::-1], self.block_shape[::-1], self.nnz, ())


def needs_schedule(layout: BlockLayout, x: Tensor) -> bool:
    """Return whether the graph that is being traced needs the layout's schedule for a call with x.

    A graph does not need it if the number of rows of x becomes known only when it runs.
    """
    # PyTorch 2.10 and 2.11 cannot compile a training step with launches. There, is_exporting() is true in every graph.
    traced = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
    lowered = traced and x.device.type == LOWERED_DEVICE and not isinstance(layout, DynamicLayout) and not is_forced()
    return lowered and all(_is_known(size == 0) for size in x.shape)


def is_bucket_known(tokens: int) -> bool:
    """Return whether the `bucket` of this number of tokens is known while the graph is traced.

    This makes the comparisons of `bucket` only, so a traced size gets no other bounds.
    """
    size = MIN_TOKENS
    while size < MAX_TOKENS and _is_known(tokens > size) and tokens > size:
        size *= 2
    return size == MAX_TOKENS or _is_known(tokens > size)


def _is_known(condition: bool) -> bool:
    """Return whether a condition on symbolic sizes is decided while tracing."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return bool(guard_or_false(condition) == guard_or_true(condition))


def traced_layout(indices: Sequence[Tensor], in_blocks: int, block: Sequence[int]) -> TracedLayout:
    """Return the layout of a graph's index tensors, which include a schedule."""
    crow, col, *schedule = indices
    # `int`: sizes of a layout are constants, even where the tracer takes an equal size of x for dynamic.
    grid = int(crow.shape[0]) - 1, int(in_blocks)
    return TracedLayout(grid, (int(block[0]), int(block[1])), int(col.shape[0]), schedule)


def lower_to_triton(op: LayoutOp, launch: Callable[..., Any]) -> None:
    """Replace an op by launches of its kernels in graphs that have a schedule, as `torch.library.triton_op` does.

    `launch` has the arguments and the result of PyTorch's op, or returns NotImplemented if the graph must keep the op.
    """

    def rule(mode: Any, torch_op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        indices = args[len(op.tensor_names)]
        # An exported graph must keep the op, or it would not be self-contained.
        if len(indices) > 2 and torch._functorch.config.decompose_custom_triton_ops and _runs_triton(op, args[0]):
            with mode:
                result = launch(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return mode.__torch_dispatch__(torch_op, types, args, kwargs)

    torch.library.register_torch_dispatch(f"blocksparse::{op.name}", FunctionalTensorMode, rule, lib=LIBRARY)


def _runs_triton(op: LayoutOp, x: Tensor) -> bool:
    """Return whether the op runs Triton kernels. If no backend serves it, the graph keeps the op, which raises."""
    try:
        return op.on(x.device, x.dtype) is op.backends["triton"]
    except BlockSparseError:
        return False
