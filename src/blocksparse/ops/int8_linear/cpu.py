"""The linear product in 8 bits on the CPU: one call of the compiled core with addresses and a plan."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
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

# Sums of 8-bit products of this many inputs fit int32.
MAX_INPUTS = 1 << 16


class _Packed(NamedTuple):
    """Weights in the order in which kernels read them, and the version of the tensors from which they were made."""

    blocks: Tensor  # int8 [nnz, bytes]: weights [steps, padded_out, 4], then the block's scales if rows have none
    row_scales: Tensor | None  # [block rows, 2, padded_out] if an output has the same scale in all blocks
    padded_out: int
    layout: BlockLayout
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
    packed = padded.view(nnz, padded_out, padded_in // 4, 4).transpose(1, 2).flatten(1)
    sums = padded.sum(-1, dtype=torch.int32)
    # Kernels read a float32 scale and then an int32 sum of weights for each output.
    parts = torch.stack([F.pad(scales, (0, padded_out - out)).view(torch.int32), sums], 1)
    start = torch.from_numpy(layout.row_start.astype("int64"))
    rows = torch.repeat_interleave(start.diff())
    row_scales = None
    if torch.equal(scales, scales[start[rows]]) and int(start.diff().max()) * in_ <= MAX_INPUTS:
        row_scales = parts.new_zeros(layout.grid[0], 2, padded_out).index_add(0, rows, parts)
        row_scales[rows, 0] = parts[:, 0]
    else:
        packed = torch.cat([packed, parts.flatten(1).view(torch.int8)], 1)
    entry = _Packed(packed.contiguous(), row_scales, padded_out, layout, weakref.ref(scales), version)
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
    padded_out, row_scales = weights.padded_out, weights.row_scales
    block_bytes = padded_out * (-(-layout.block_shape[1] // 4) * 4 + (8 if row_scales is None else 0))
    core.int8_linear(
        plan=row_plan(layout, False), isa=isa, dtype=DTYPES[x.dtype], activation=activation or "none", tokens=tokens,
        x=rows, blocks=address("values", weights.blocks, (layout.nnz, block_bytes), torch.int8),
        row_scales=address("scales", row_scales, (layout.grid[0], 2, padded_out), torch.int32), padded_out=padded_out,
        bias=address("bias", bias, (out_features,), x.dtype), y=y_address, axes=list(axes),
    )  # fmt: skip
    return y
