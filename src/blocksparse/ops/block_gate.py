"""Gates: one scale per stored block; in inference on the CPU, blocks with gate 0 are skipped."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint import bytes_of
from ..errors import BlockSparseError
from ..indices import LARGE
from ..layout import BlockLayout
from . import workspace
from .registry import can_bypass_dispatcher, needs_grad

# A layout caches its newest gates, up to this number: several weights may share a layout.
MAX_CACHED_GATES = 8


class _OpenBlocks(NamedTuple):
    """The blocks whose gate is not 0."""

    layout: BlockLayout | None  # None if all blocks are open
    blocks: Tensor  # int64, positions of the open blocks
    scale: Tensor | None  # their gates; None if all are 1


def apply_gate(values: Tensor, layout: BlockLayout, gate: Tensor) -> tuple[Tensor, BlockLayout]:
    """Return the values times their gates, and the layout of the result.

    In inference on the CPU the result has no blocks with gate 0. That requires reading the gate: on other devices the
    host would have to wait, and a traced graph has no numbers yet. In these cases, and if a gradient is needed, all
    blocks are multiplied.
    """
    _check(values, layout, gate)
    values, gate = values.resolve_neg(), gate.resolve_neg()
    readable = gate.device.type == "cpu" and layout.nnz < LARGE and can_bypass_dispatcher(values, gate)
    if not readable or needs_grad(values, gate):
        if readable:
            _check_finite(gate)
        return values * _per_block(gate, values), layout
    numbers = bytes_of(gate).tobytes()
    # Gates are compared by content, because version counters miss writes through `.data` and by fused optimizers. For
    # the same reason the product of values and gates cannot be cached between calls.
    cache: dict[object, _OpenBlocks] = layout.derived("gates", dict)
    entry = cache.get((gate.dtype, numbers))
    if entry is None:
        entry = _find_open_blocks(gate.detach(), layout, cache)
        if len(cache) >= MAX_CACHED_GATES:
            oldest, *_ = cache
            cache.pop(oldest, None)  # another thread may have removed it
        cache[gate.dtype, numbers] = entry
    return _open_values(values.detach(), entry), entry.layout or layout


def _find_open_blocks(gate: Tensor, layout: BlockLayout, cache: dict[object, _OpenBlocks]) -> _OpenBlocks:
    """Return the blocks whose gate is not 0; a cached equal layout is used again."""
    _check_finite(gate)
    keep = gate != 0
    blocks, scale = keep.nonzero().squeeze(1), gate[keep]
    smaller = None if keep.all() else layout.select(keep)
    for other in list(cache.values()):
        if other.layout == smaller:  # an equal layout that has its plans already
            smaller = other.layout
    return _OpenBlocks(smaller, blocks, None if (scale == 1).all() else scale)


def _open_values(values: Tensor, entry: _OpenBlocks) -> Tensor:
    """Return a copy of the open blocks times their gates; the values themselves if nothing changes."""
    if entry.layout is None:
        return values if entry.scale is None else values * _per_block(entry.scale, values)
    selected = workspace.empty((entry.blocks.numel(), *values.shape[1:]), values.dtype, values.device)
    torch.index_select(values, 0, entry.blocks, out=selected)
    return selected if entry.scale is None else selected.mul_(_per_block(entry.scale, selected))


def _per_block(gate: Tensor, values: Tensor) -> Tensor:
    """Return the gate in a shape that broadcasts to values."""
    return gate.view(-1, *[1] * (values.dim() - 1))


def _check(values: Tensor, layout: BlockLayout, gate: Tensor) -> None:
    """Check that values and gate fit the layout and each other."""
    layout.check_values(values)
    if tuple(gate.shape) != (layout.nnz,):
        raise BlockSparseError.expected("gate", f"[{layout.nnz}] for {layout!r}", list(gate.shape))
    if gate.dtype != values.dtype:
        raise BlockSparseError.expected("gate", f"the dtype of values, {values.dtype}", gate.dtype)
    if gate.device != values.device:
        raise BlockSparseError.expected("gate", f"the device of values, {values.device}", gate.device)


def _check_finite(gate: Tensor) -> None:
    """Raise a BlockSparseError if the gate has NaN or infinite numbers."""
    finite = gate.detach().isfinite()
    if not finite.all():
        worst = int((~finite).nonzero()[0])
        raise BlockSparseError.expected("gate", "finite numbers", f"{gate[worst].item()} for block {worst}")
