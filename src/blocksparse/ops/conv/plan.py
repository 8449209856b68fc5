"""The geometry of a convolution: which positions of its images each tap connects, axis by axis, without channels.

A convolution maps its `input` image to its `output`: output position j meets input position
j * stride - padding + tap * dilation. The transposed convolution maps the `output` back to the `input`; the names stay
those of the convolution. Positions outside of an image are skipped; nothing is padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..cpu_plan import check_int32


class Axis(NamedTuple):
    """One axis of space: the sizes of both images, and the parameters that connect them."""

    input: int
    output: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    def tap(self, tap: int) -> tuple[int, int, int]:
        """Return (count, first output position, first input position) of the pairs that a tap connects.

        Output positions advance by 1, input positions by `stride`.

        >>> Axis(input=5, output=3, kernel=3, stride=2, padding=1, dilation=1).tap(0)  # the first one lies outside
        (2, 1, 1)
        """
        offset = tap * self.dilation - self.padding
        first = max(0, -(offset // self.stride))
        last = min(self.output - 1, (self.input - 1 - offset) // self.stride)
        return (last - first + 1, first, first * self.stride + offset) if first <= last else (0, 0, 0)


@dataclass(frozen=True)
class Runs:
    """The outputs along one axis, in runs of constant step.

    Run i computes the outputs `first[i] + out_step * n`, n < `count[i]`. Its taps are the entries `tap_start[i]` to
    `tap_start[i + 1]` of the other arrays: `tap` meets the inputs `at + in_step * n` for n in [begin, end).
    """

    first: np.ndarray  # int64 [runs]
    count: np.ndarray  # int64 [runs]
    tap_start: np.ndarray  # int64 [runs + 1]
    tap: np.ndarray  # int64 [taps of all runs], as are those below
    at: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    out_step: int
    in_step: int
    packed: np.ndarray = field(init=False)  # all fields in one vector, for the compiled core

    def __post_init__(self) -> None:
        head = [len(self.first), self.out_step, self.in_step]
        lists = self.first, self.count, self.tap_start, self.tap, self.at, self.begin, self.end
        object.__setattr__(self, "packed", np.concatenate([head, *lists]).astype(np.int64))


@lru_cache(maxsize=4096)
def runs(axis: Axis, transposed: bool, cut: bool) -> Runs:
    """Return the outputs of an axis in runs; with `cut`, all outputs of a run meet the same taps.

    >>> axis = Axis(input=5, output=5, kernel=3, stride=1, padding=1, dilation=1)
    >>> pieces = runs(axis, transposed=False, cut=True)
    >>> pieces.first, pieces.count, np.diff(pieces.tap_start)  # the left border, the middle, the right border
    (array([0, 1, 4]), array([1, 3, 1]), array([2, 3, 2]))
    >>> pieces = runs(axis, transposed=False, cut=False)
    >>> pieces.count, pieces.begin, pieces.end
    (array([5]), array([1, 0, 0]), array([5, 5, 4]))
    """
    out_step, in_step = (axis.stride, 1) if transposed else (1, axis.stride)
    whole: list[Run] = []
    if transposed:
        for phase in range(min(axis.stride, axis.input)):
            # The taps that reach outputs phase, phase + stride, ..., and the input from which each reaches the first.
            count, taps = -(-(axis.input - phase) // axis.stride), []
            for t in range(axis.kernel):
                shift, rest = divmod(phase + axis.padding - t * axis.dilation, axis.stride)
                if rest == 0:
                    taps.append((t, shift, max(0, -shift), min(count, axis.output - shift)))
            whole.append((phase, count, taps))
    else:
        maps = [(t, *axis.tap(t)) for t in range(axis.kernel)]
        taps = [(t, input - output * in_step, output, output + count) for t, count, output, input in maps]
        whole.append((0, axis.output, taps))
    whole = [(first, count, [tap for tap in taps if tap[2] < tap[3]]) for first, count, taps in whole if count]
    return _as_arrays(
        [piece for run in whole for piece in _cut(run, out_step, in_step)] if cut else whole, out_step, in_step
    )


# (first output, count, [(tap, at, begin, end), ...])
Run = tuple[int, int, list[tuple[int, int, int, int]]]


def _cut(run: Run, out_step: int, in_step: int) -> list[Run]:
    """Return the pieces of a run, cut where a tap begins or ends."""
    first, count, taps = run
    cuts = sorted({0, count, *(begin for *_, begin, _ in taps), *(end for *_, end in taps)})
    return [
        (
            first + begin * out_step,
            end - begin,
            [(t, at + begin * in_step, 0, end - begin) for t, at, b, e in taps if b <= begin and end <= e],
        )
        for begin, end in itertools.pairwise(cuts)
    ]


def _as_arrays(pieces: Sequence[Run], out_step: int, in_step: int) -> Runs:
    """Store runs of output positions and their taps as flat int64 arrays for the C++ core."""

    def vector(numbers: Iterable[int]) -> np.ndarray:
        return np.array(list(numbers), dtype=np.int64)

    taps = [tap for _, _, taps in pieces for tap in taps]
    return Runs(
        first=vector(first for first, _, _ in pieces),
        count=vector(count for _, count, _ in pieces),
        tap_start=vector([0, *np.cumsum([len(taps) for _, _, taps in pieces])]),
        tap=vector(tap for tap, *_ in taps),
        at=vector(at for _, at, _, _ in taps),
        begin=vector(begin for *_, begin, _ in taps),
        end=vector(end for *_, end in taps),
        out_step=out_step,
        in_step=in_step,
    )


@lru_cache(maxsize=4096)
def packed_taps(axis: Axis) -> np.ndarray:
    """Return the positions that each tap connects, as one vector for the compiled core."""
    counts = zip(*(axis.tap(t) for t in range(axis.kernel)), strict=True)
    return np.concatenate([[axis.kernel, axis.stride], *counts]).astype(np.int64)


@dataclass(frozen=True)
class ChannelPlan:
    """The blocks of each row of outputs, and the order of rows, longest first; it does not depend on space."""

    start: np.ndarray  # int64 [rows + 1], where each row's blocks start in `col` and `block`
    col: np.ndarray  # int32 [nnz], the block of inputs
    block: np.ndarray  # int64 [nnz], the position in `values`
    order: np.ndarray  # int32 [rows]


def channel_plan(layout: BlockLayout, transpose: bool) -> ChannelPlan:
    """Return the plan of a convolution with this layout, or with the transposed one.

    >>> import blocksparse as bs
    >>> channel_plan(bs.BlockLayout([[True, False], [True, True]], 8), transpose=False).order
    array([1, 0], dtype=int32)
    """

    def build() -> ChannelPlan:
        check_int32(layout)
        rows = layout.T if transpose else layout
        return ChannelPlan(
            start=rows.row_start.astype(np.int64),
            col=rows.col_of_block.astype(np.int32, copy=False),
            block=layout.transpose_order if transpose else np.arange(layout.nnz, dtype=np.int64),
            order=np.argsort(-np.diff(rows.row_start.astype(np.int64)), kind="stable").astype(np.int32),
        )

    return layout.derived(("conv channels", transpose), build)


def axes_of(
    input: Sequence[int],
    output: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Axis, ...]:
    """Return the axes of a convolution; refuse lists of unequal length and numbers out of range."""
    return _axes_of(*map(tuple, (input, output, kernel, stride, padding, dilation)))


@lru_cache(maxsize=4096)
def _axes_of(*lists: tuple[int, ...]) -> tuple[Axis, ...]:
    if len({len(numbers) for numbers in lists}) != 1:
        raise BlockSparseError.expected("sizes, kernel, stride, padding, dilation", "one number per axis each", lists)
    axes = tuple(Axis(*map(int, numbers)) for numbers in zip(*lists, strict=True))
    for axis in axes:
        if min(axis.stride, axis.dilation, axis.kernel) < 1 or min(axis.input, axis.output) < 0:
            raise BlockSparseError.expected(
                "stride, dilation and kernel", "positive ints, and sizes of 0 or more", axis
            )
        if max(axis.stride, axis.dilation, abs(axis.padding)) >= 2**31:  # their products must fit int64
            raise BlockSparseError.expected("stride, dilation and padding", "less than 2^31 each", axis)
    return axes


def is_linear(axes: Sequence[Axis]) -> bool:
    """Return whether each position depends only on itself; the convolution is then one linear product."""
    return all(axis.kernel == axis.stride == 1 and axis.padding == 0 and axis.input == axis.output for axis in axes)


class Sizes(NamedTuple):
    """The sizes of both images and of the kernel, axis by axis."""

    input: tuple[int, ...]
    output: tuple[int, ...]
    kernel: tuple[int, ...]

    @classmethod
    def of(cls, axes: Sequence[Axis]) -> Sizes:
        return cls(*zip(*(axis[:3] for axis in axes), strict=True))


class CorePlan(NamedTuple):
    """A convolution's axes as the compiled core takes them: always three, those that are missing have one position."""

    sizes: Sizes  # of the axes that there are
    three: Sizes
    runs: list[np.ndarray]  # for products: of the three axes with `cut`, then of the three without
    taps: list[np.ndarray]  # for gradients of the values


@lru_cache(maxsize=4096)
def core_plan(axes: tuple[Axis, ...], transposed: bool) -> CorePlan:
    """Return the plan of these axes for the compiled core, made once."""
    three = three_axes(axes)
    return CorePlan(
        Sizes.of(axes),
        Sizes.of(three),
        [runs(axis, transposed, cut).packed for cut in (True, False) for axis in three],
        [packed_taps(axis) for axis in three],
    )


def three_axes(axes: Sequence[Axis]) -> list[Axis]:
    """Return three axes, the first ones with one position if there are fewer: kernels need three."""
    one = Axis(input=1, output=1, kernel=1, stride=1, padding=0, dilation=1)
    return [one] * (3 - len(axes)) + list(axes)
