"""The linear product in 8 bits on the CPU: one call of the compiled core with addresses and a plan."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import astuple
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...layout import BlockLayout
from .. import cpu_core
from ..checks import contiguous_features
from ..conv.plan import Axis
from ..cpu_core import DTYPES, address
from ..cpu_plan import OUTPUT_STEP, row_plan

unsupported_reason = cpu_core.unsupported_reason


class _Packed(NamedTuple):
    """Weights in the order in which kernels read them, and the version of the tensors from which they were made."""

    values: Tensor  # int8 [nnz, steps, padded_out, 4]
    scales: Tensor  # float32 [nnz, padded_out]
    sums: Tensor  # int32 [nnz, padded_out], sum of each output's weights
    layout: BlockLayout
    by_row: bool  # whether an output has the same scale in all blocks
    source: weakref.ref[Tensor]  # the scales
    version: tuple[int, ...] | None


# Keyed by the values; an entry lives as long as they do.
_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()


def packed(values: Tensor, scales: Tensor, layout: BlockLayout) -> _Packed:
    """Return weights with four inputs of an output side by side and outputs padded to whole vectors, cached.

    The inputs of values `[nnz, block_out, block_in, *kernel]` are those of all taps, one tap after the other.
    """
    cached = not (values.is_inference() or scales.is_inference())  # inference tensors have no version counters
    version = (values._version, scales._version, values.data_ptr(), scales.data_ptr()) if cached else None
    entry: _Packed | None = _packed.get(values)
    if (
        cached
        and entry is not None
        and (entry.source() is scales and entry.version == version)
        and (entry.layout is layout or entry.layout == layout)
    ):
        return entry
    blocks = values.movedim(2, -1).flatten(2)
    out, in_ = blocks.shape[1:]
    padded = F.pad(blocks, (0, -in_ % 4, 0, -out % OUTPUT_STEP))
    nnz, padded_out, padded_in = padded.shape
    steps = padded.view(nnz, padded_out, padded_in // 4, 4).transpose(1, 2).contiguous()
    sums = padded.sum(-1, dtype=torch.int32)
    first = torch.from_numpy(layout.row_start[layout.row_of_block].astype("int64"))  # the first block of each row
    by_row = torch.equal(scales, scales[first])
    entry = _Packed(steps, F.pad(scales, (0, padded_out - out)), sums, layout, by_row, weakref.ref(scales), version)
    if cached:
        _packed[values] = entry
    return entry


def int8_linear(
    x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, layout: BlockLayout, activation: str | None
) -> Tensor:
    return product(contiguous_features(x), values, scales, bias, layout, activation, x.shape[0])


def product(
    x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, layout: BlockLayout, activation: str | None,
    tokens: int, axes: Sequence[Axis] = (),
) -> Tensor:  # fmt: skip
    """Return activation(x W^T + bias), `[tokens, in] -> [tokens, out]`.

    With three axes, x is the contiguous pixels `[pixels, channels]` of images, and a token is the patch of an output of
    a convolution: for each block of channels the inputs of all taps.
    """
    out_features, in_features = layout.shape
    bias = None if bias is None else bias.detach().contiguous()
    weights = packed(values, scales, layout)
    y, y_address = cpu_core.allocate((tokens, out_features), x)
    core, isa = cpu_core.core(), cpu_core.isa()
    if axes:
        input, output, kernel = (
            math.prod(getattr(axis, name) for axis in axes) for name in ("input", "output", "kernel")
        )
        channels = in_features // kernel
        rows = address("x", x, (tokens // output * input, channels), x.dtype), channels
    else:
        rows = cpu_core.row_addresses("x", x, (tokens, in_features), x.dtype)
    _, steps, padded_out, _ = weights.values.shape
    core.int8_linear(
        plan=row_plan(layout, False), isa=isa, dtype=DTYPES[x.dtype], activation=activation or "none", tokens=tokens,
        x=rows,
        values=address("values", weights.values, (layout.nnz, steps, padded_out, 4), torch.int8),
        scale=address("scales", weights.scales, (layout.nnz, padded_out), torch.float32),
        sum=address("sums", weights.sums, (layout.nnz, padded_out), torch.int32), padded_out=padded_out,
        bias=address("bias", bias, (out_features,), x.dtype), y=y_address, axes=[astuple(axis) for axis in axes],
        by_row=weights.by_row,
    )  # fmt: skip
    return y
