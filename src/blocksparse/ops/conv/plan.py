"""Where the taps of a convolution meet its images, axis by axis: pure, made once per geometry, free of channels.

A convolution ties positions of a `small` image to positions of a `big` one: position j of the small axis meets
position j * stride - padding + tap * dilation of the big axis. To gather is to compute the small image (a convolution),
to scatter is to compute the big one (a transposed convolution). What lies outside of an image takes no part: nothing is
padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ...errors import BlockSparseError
from ...layout import BlockLayout


@dataclass(frozen=True)
class Axis:
    """One axis of space: the sizes of both images, and how taps tie them."""

    big: int
    small: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    def tap(self, tap: int) -> tuple[int, int, int]:
        """(count, first position of the small axis, first one of the big axis): what the tap ties together.

        The positions go on in steps of 1 on the small axis, of `stride` on the big one.

        >>> Axis(big=5, small=3, kernel=3, stride=2, padding=1, dilation=1).tap(0)  # the first one lies outside
        (2, 1, 1)
        """
        offset = tap * self.dilation - self.padding
        first = max(0, -(offset // self.stride))
        last = min(self.small - 1, (self.big - 1 - offset) // self.stride)
        return max(0, last - first + 1), first, first * self.stride + offset


@dataclass(frozen=True)
class Segments:
    """The outputs along one axis, in runs whose outputs meet the same taps.

    Run i computes the outputs `first[i] + out_step * n`, n < `count[i]`. Its taps are
    `tap[tap_start[i] : tap_start[i + 1]]`, and each meets the inputs `at[...] + in_step * n`.
    """

    first: np.ndarray  # int64 [runs]
    count: np.ndarray  # int64 [runs]
    tap_start: np.ndarray  # int64 [runs + 1]
    tap: np.ndarray  # int64 [taps of all runs]
    at: np.ndarray  # int64 [taps of all runs]
    out_step: int
    in_step: int

    @cached_property
    def packed(self) -> np.ndarray:
        """All of it in one vector, for the compiled core."""
        head = [len(self.first), self.out_step, self.in_step]
        return np.concatenate([head, self.first, self.count, self.tap_start, self.tap, self.at]).astype(np.int64)


@lru_cache(maxsize=4096)
def segments(axis: Axis, scatter: bool) -> Segments:
    """The outputs of an axis, in runs that meet the same taps.

    >>> found = segments(Axis(big=5, small=5, kernel=3, stride=1, padding=1, dilation=1), scatter=False)
    >>> found.first, found.count, np.diff(found.tap_start)  # the left border, the middle, the right border
    (array([0, 1, 4]), array([1, 3, 1]), array([2, 3, 2]))
    """
    if not scatter:
        runs = _cut(axis.small, [(t, *axis.tap(t)) for t in range(axis.kernel)], axis.stride)
        return _segments(runs, out_step=1, in_step=axis.stride)
    runs = []
    for phase in range(min(axis.stride, axis.big)):
        # The taps that reach outputs phase, phase + stride, ..., and the input at which each reaches the n-th of them.
        outputs = -(-(axis.big - phase) // axis.stride)
        reaching = []
        for t in range(axis.kernel):
            shift, rest = divmod(phase + axis.padding - t * axis.dilation, axis.stride)
            if rest == 0:
                begin, end = max(0, -shift), min(outputs, axis.small - shift)
                reaching.append((t, max(0, end - begin), begin, begin + shift))
        runs += [(phase + axis.stride * first, *rest) for first, *rest in _cut(outputs, reaching, 1)]
    return _segments(runs, out_step=axis.stride, in_step=1)


def _cut(size: int, taps: Sequence[tuple[int, int, int, int]], in_step: int) -> list[tuple[int, int, list]]:
    """Cuts 0..size where a tap begins or ends; each tap is (tap, count, first output, its input)."""
    taps = [tap for tap in taps if tap[1] > 0]
    cuts = sorted({0, size, *(first for _, _, first, _ in taps), *(first + count for _, count, first, _ in taps)})
    return [
        (begin, end - begin, [(t, at + (begin - f) * in_step) for t, n, f, at in taps if f <= begin and end <= f + n])
        for begin, end in itertools.pairwise(cuts)
    ]


def _segments(runs: Sequence[tuple[int, int, list]], out_step: int, in_step: int) -> Segments:
    def vector(numbers) -> np.ndarray:
        return np.array(list(numbers), dtype=np.int64)

    return Segments(
        first=vector(first for first, _, _ in runs),
        count=vector(count for _, count, _ in runs),
        tap_start=vector([0, *np.cumsum([len(taps) for _, _, taps in runs])]),
        tap=vector(tap for _, _, taps in runs for tap, _ in taps),
        at=vector(at for _, _, taps in runs for _, at in taps),
        out_step=out_step,
        in_step=in_step,
    )


@lru_cache(maxsize=4096)
def packed_taps(axis: Axis) -> np.ndarray:
    """What each tap ties together, in one vector for the compiled core."""
    counts = zip(*(axis.tap(t) for t in range(axis.kernel)), strict=True)
    return np.concatenate([[axis.kernel, axis.stride], *counts]).astype(np.int64)


@dataclass(frozen=True)
class ChannelPlan:
    """The blocks by row of outputs, those of the most blocks first: nothing of space is in it."""

    start: np.ndarray  # int64 [rows + 1], where each row's blocks start in `col` and `block`
    col: np.ndarray  # int32 [nnz], the block of inputs
    block: np.ndarray  # int64 [nnz], the position in `values`
    order: np.ndarray  # int32 [rows]


def channel_plan(layout: BlockLayout, transpose: bool) -> ChannelPlan:
    """The plan of a convolution with this layout, or with the transposed one.

    >>> import blocksparse as bs
    >>> channel_plan(bs.BlockLayout([[True, False], [True, True]], 8), transpose=False).order
    array([1, 0], dtype=int32)
    """

    def build() -> ChannelPlan:
        rows = layout.T if transpose else layout
        return ChannelPlan(
            start=rows.row_start.astype(np.int64),
            col=rows.col_of_block.astype(np.int32, copy=False),
            block=layout.transpose_order if transpose else np.arange(layout.nnz, dtype=np.int64),
            order=np.argsort(-np.diff(rows.row_start.astype(np.int64)), kind="stable").astype(np.int32),
        )

    return layout.derived(("conv channels", transpose), build)


def axes_of(
    big: Sequence[int],
    small: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Axis, ...]:
    """The axes of a convolution; a BlockSparseError for lists of unequal length, or steps that are not positive."""
    lists = (big, small, kernel, stride, padding, dilation)
    if len({len(numbers) for numbers in lists}) != 1:
        raise BlockSparseError.expected("sizes, kernel, stride, padding, dilation", "one number per axis each", lists)
    axes = tuple(Axis(*map(int, numbers)) for numbers in zip(*lists, strict=True))
    for axis in axes:
        if min(axis.stride, axis.dilation, axis.kernel) < 1 or min(axis.big, axis.small) < 0:
            raise BlockSparseError.expected("stride, dilation and kernel", "positive ints, and sizes from 0 on", axis)
    return axes
