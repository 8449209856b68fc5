"""Recurrences in compiled and exported graphs: one op for all steps, so the number of steps may be dynamic.

The graph holds the layouts as index tensors, as for `registry.LayoutOp`. The backward pass computes the forward pass
again, because the graph does not hold the tensors that the forward pass keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import refuse_onnx
from ..graph_layout import pack_layouts, unpack_layouts
from ..torch_op import LIBRARY, define_op
from .recurrence import Recurrence, Times

# The recurrences by their names in graphs.
KINDS: dict[str, type[Recurrence]] = {}


def in_graph(recurrence: Recurrence, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the outputs of a recurrence whose steps are `Times`, through PyTorch's op."""
    refuse_onnx(type(recurrence).__name__)
    indices, sizes_of_layouts = pack_layouts(recurrence.layouts, tensors[0].device)  # type: ignore[union-attr]
    number, batch, sizes, reverse = recurrence.steps
    steps = type(recurrence).__name__, number, batch, list(sizes or ()), reverse
    present = [tensor for tensor in tensors if tensor is not None]  # autograd ignores lists that contain None
    given = [tensor is not None for tensor in tensors]
    return tuple(torch.ops.blocksparse.scan(present, given, indices, sizes_of_layouts, *steps))


def _recurrence(
    indices: Sequence[Tensor], sizes_of_layouts: Sequence[int], kind: str, number: int, batch: int,
    sizes: Sequence[int], reverse: bool,
) -> Recurrence:  # fmt: skip
    """Build the recurrence from the arguments of the op."""
    layouts = unpack_layouts(indices, sizes_of_layouts)
    return KINDS[kind](Times(number, batch, tuple(sizes) or None, reverse).to_steps(), *layouts)


def _with_none(tensors: Sequence[Tensor], given: Sequence[bool]) -> list[Tensor | None]:
    """Return the tensors in order, with None where `given` is False."""
    left = iter(tensors)
    return [next(left) if each else None for each in given]


def _scan(tensors: Sequence[Tensor], given: Sequence[bool], *pattern: Any) -> list[Tensor]:
    """Run a recurrence inside PyTorch's op; `pattern` describes it."""
    outputs, _ = _recurrence(*pattern).forward(*_with_none(tensors, given), keep=False)
    return list(outputs)


def _scan_backward(tensors: Sequence[Tensor], given: Sequence[bool], *arguments: Any) -> list[Tensor]:
    """Return the gradients that are needed; the forward pass is computed again."""
    *pattern, grads, needed = arguments
    recurrence, inputs, next_needed = _recurrence(*pattern), _with_none(tensors, given), iter(needed)
    needs = [each and next(next_needed) for each in given]
    _, saved = recurrence.forward(*inputs, keep=True)
    results = recurrence.backward(tuple(inputs), saved, tuple(grad.contiguous() for grad in grads), tuple(needs))
    # Clones, because outputs of an op must never be views of each other.
    return [
        torch.zeros_like(tensor) if grad is None else grad.clone(memory_format=torch.contiguous_format)
        for tensor, grad, need in zip(inputs, results, needs, strict=True)
        if need and tensor is not None
    ]


def _scan_meta(
    tensors: Any, given: Any, indices: Any, of_layouts: Any, kind: str, number: Any, batch: Any, sizes: Any, _: bool
) -> list[Tensor]:
    """Return empty results of the right shapes, for graphs."""
    inputs: Any = _with_none(tensors, given)
    states = [inputs[i] for i in KINDS[kind].states]
    rows = sum(sizes) if sizes else number * batch
    return [states[0].new_empty(rows, states[0].shape[1]), *(state.new_empty(state.shape) for state in states)]


def _scan_backward_meta(tensors: Any, *arguments: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor, need in zip(tensors, arguments[-1], strict=True) if need]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    """Save the tensors for the backward pass of a graph."""
    tensors, ctx.given, indices, *ctx.pattern = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *indices)


def _backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the gradients of the op's arguments by the op `scan_backward`."""
    saved = ctx.saved_tensors
    tensors, indices, needed = list(saved[: ctx.count]), list(saved[ctx.count :]), list(ctx.needs_input_grad[0])
    results = iter(torch.ops.blocksparse.scan_backward(tensors, ctx.given, indices, *ctx.pattern, list(grads), needed))
    # PyTorch treats an empty list as a list of tensors, whose gradient must be a list.
    rest: list[Any] = [[] if each == [] else None for each in ctx.pattern]
    return [next(results) if need else None for need in needed], None, [None] * len(indices), *rest


_LAYOUTS = "Tensor[] indices, int[] sizes_of_layouts"
_STEPS = "str kind, SymInt number, SymInt batch, SymInt[] sizes, bool reverse"
_ARGUMENTS = f"Tensor[] tensors, bool[] given, {_LAYOUTS}, {_STEPS}"
define_op(f"scan({_ARGUMENTS}) -> Tensor[]", _scan, _scan_meta)
define_op(
    f"scan_backward({_ARGUMENTS}, Tensor[] grads, bool[] needed) -> Tensor[]", _scan_backward, _scan_backward_meta
)
torch.library.register_autograd("blocksparse::scan", _backward, setup_context=_keep, lib=LIBRARY)
