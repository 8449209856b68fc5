"""The outputs of a convolution in phases, for the programs of a GPU, computed once per geometry."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .plan import Axis


@dataclass(frozen=True)
class Phase:
    """Outputs `first + step * n`, n < `count`, that meet the same taps along one axis.

    These taps are `tap + i * tap_step`, i < `taps`; tap i meets input `n * in_step + shift + i * shift_step`.
    """

    first: int
    count: int
    tap: int
    tap_step: int
    taps: int
    shift: int
    shift_step: int


def phases(axis: Axis, transposed: bool) -> list[Phase]:
    """Return the phases of one axis: one for a convolution, up to `stride` for a transposed convolution.

    >>> axis = Axis(input=8, output=4, kernel=3, stride=2, padding=1, dilation=1)
    >>> phases(axis, transposed=False)
    [Phase(first=0, count=4, tap=0, tap_step=1, taps=3, shift=-1, shift_step=1)]
    >>> for phase in phases(axis, transposed=True):  # even outputs meet the middle tap, odd ones the two outer ones
    ...     print(phase)
    Phase(first=0, count=4, tap=1, tap_step=2, taps=1, shift=0, shift_step=-1)
    Phase(first=1, count=4, tap=0, tap_step=2, taps=2, shift=1, shift_step=-1)
    """
    if not transposed:
        return [Phase(0, axis.output, 0, 1, axis.kernel, -axis.padding, axis.dilation)]
    # Output P meets tap t if P + padding - t * dilation is a multiple of the stride.
    tap_step = axis.stride // math.gcd(axis.stride, axis.dilation)
    result = []
    for first in range(min(axis.stride, axis.input)):
        count = -(-(axis.input - first) // axis.stride)
        reach = [t for t in range(axis.kernel) if (first + axis.padding - t * axis.dilation) % axis.stride == 0]
        tap = reach[0] if reach else 0
        shift = (first + axis.padding - tap * axis.dilation) // axis.stride
        result.append(Phase(first, count, tap, tap_step, len(reach), shift, -tap_step * axis.dilation // axis.stride))
    return result
