"""Gates: a scale for each stored block, whose zeros are left out in inference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import BlockSparseError
from ..indices import LARGE
from ..layout import BlockLayout
from . import workspace
from .registry import can_bypass_dispatcher, needs_grad

# How many gates a layout caches, the newest ones: several weights may share a layout.
REMEMBERED = 8


class _Open(NamedTuple):
    """What a gate leaves of a layout."""

    layout: BlockLayout | None  # None for all of it
    blocks: Tensor  # int64, the positions of the blocks whose gate is not 0
    scale: Tensor | None  # their gates; None where all are 1


def gated(values: Tensor, layout: BlockLayout, gate: Tensor) -> tuple[Tensor, BlockLayout]:
    """The values times their gates, and the blocks that these are.

    What has a gradient is multiplied, all of it. In inference on the CPU the blocks whose gate is 0 are left out. That
    needs the gate's numbers: on other devices reading them would make the host wait, and in a graph that is traced
    they are not there yet.
    """
    _check(values, layout, gate)
    values, gate = values.resolve_neg(), gate.resolve_neg()
    readable = gate.device.type == "cpu" and layout.nnz < LARGE and can_bypass_dispatcher(values, gate)
    if not readable or needs_grad(values, gate):
        if readable:
            _refuse_nan(gate)
        return values * _beside(gate, values), layout
    numbers = gate.detach().contiguous().view(torch.uint8).numpy().tobytes()
    # Compared by content, as version counters miss what `.data` and fused optimizers write. For the same reason the
    # values times their gates cannot be cached between calls.
    remembered: dict[object, _Open] = layout.derived("gates", dict)
    found = remembered.get((gate.dtype, numbers))
    if found is None:
        found = _read(gate.detach(), layout, remembered)
        if len(remembered) >= REMEMBERED:
            oldest, *_ = remembered
            remembered.pop(oldest, None)  # another thread may have removed it
        remembered[gate.dtype, numbers] = found
    return _kept(values.detach(), found), found.layout or layout


def _read(gate: Tensor, layout: BlockLayout, remembered: dict[object, _Open]) -> _Open:
    _refuse_nan(gate)
    keep = gate != 0
    blocks, scale = keep.nonzero().squeeze(1), gate[keep]
    smaller = None if keep.all() else layout.select(keep)
    for known in list(remembered.values()):
        if known.layout == smaller:  # which has its plan already
            smaller = known.layout
    return _Open(smaller, blocks, None if (scale == 1).all() else scale)


def _kept(values: Tensor, found: _Open) -> Tensor:
    if found.layout is None:
        return values if found.scale is None else values * _beside(found.scale, values)
    kept = workspace.empty((found.blocks.numel(), *values.shape[1:]), values.dtype, values.device)
    torch.index_select(values, 0, found.blocks, out=kept)
    return kept if found.scale is None else kept.mul_(_beside(found.scale, kept))


def _beside(gate: Tensor, values: Tensor) -> Tensor:
    return gate.view(-1, *[1] * (values.dim() - 1))


def _check(values: Tensor, layout: BlockLayout, gate: Tensor) -> None:
    layout.check_values(values)
    if tuple(gate.shape) != (layout.nnz,):
        raise BlockSparseError.expected("gate", f"[{layout.nnz}] for {layout!r}", list(gate.shape))
    if gate.dtype != values.dtype:
        raise BlockSparseError.expected("gate", f"the dtype of values, {values.dtype}", gate.dtype)
    if gate.device != values.device:
        raise BlockSparseError.expected("gate", f"the device of values, {values.device}", gate.device)


def _refuse_nan(gate: Tensor) -> None:
    finite = gate.detach().isfinite()
    if not finite.all():
        worst = int((~finite).nonzero()[0])
        raise BlockSparseError.expected("gate", "finite numbers", f"{gate[worst].item()} for block {worst}")
