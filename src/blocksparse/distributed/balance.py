"""Contiguous parts of about equal cost, for tensor-parallel ranks and pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..checked import integer
from ..errors import BlockSparseError


def balanced_cuts(costs: Sequence[float] | np.ndarray, parts: int, multiple: int = 1) -> tuple[int, ...]:
    """Cut a sequence of lines into contiguous parts so that the most expensive part costs as little as possible.

    Args:
        costs: the cost of each line, not negative.
        parts: the number of parts; each has at least one line.
        multiple: all cuts except the last are at multiples of this number of lines.

    Returns:
        The `parts + 1` boundaries, from 0 to the number of lines. The cost of the largest part is the exact optimum.

    Raises:
        BlockSparseError: fewer lines (or groups of `multiple` lines) than parts, or a cost that is negative, infinite
            or not a number.

    >>> balanced_cuts([1, 1, 1, 5, 1, 1], 3)
    (0, 3, 4, 6)
    >>> balanced_cuts([4, 1, 1, 1, 1], 2, multiple=2)
    (0, 2, 5)
    """
    costs = np.asarray(costs, np.float64)
    parts, multiple = integer("parts", parts, 1), integer("multiple", multiple, 1)
    if not (np.isfinite(costs) & (costs >= 0)).all():
        raise BlockSparseError.expected("costs", "finite numbers >= 0", costs[~(np.isfinite(costs) & (costs >= 0))][0])
    ends = np.append(np.arange(multiple, len(costs), multiple), len(costs)) if len(costs) else np.zeros(0, np.int64)
    if len(ends) < parts:
        groups = f" in groups of {multiple}" if multiple > 1 else ""
        raise BlockSparseError.expected("lines to cut", f"at least {parts}, one for each part", f"{len(costs)}{groups}")
    total = np.append(0.0, np.append(0.0, np.cumsum(costs))[ends])  # cost of the first n groups

    # Bisect the bound: `low` never exceeds the optimum, and `high` is the cost of a cut that exists. Both are costs of
    # some part, so that they meet.
    low, high, best = max(total[-1] / parts, np.diff(total).max()), np.inf, np.zeros(0, np.int64)
    bound = low
    for _ in range(100):  # rounding may keep them apart
        if low >= high:
            break
        cuts = _greedy(total, parts, bound)
        if cuts[-1] == len(ends):
            high, best = float(np.diff(total[cuts]).max()), cuts
        else:  # the optimum is at least the smallest bound that makes one of these parts longer
            low = float((total[cuts[1:] + 1] - total[cuts[:-1]]).min())
        bound = min(low + (high - low) / 2, 2 * low) if low < high else low
    return (0, *(int(end) for end in ends[best[1:] - 1]))


def _greedy(total: np.ndarray, parts: int, bound: float) -> np.ndarray:
    """Return cuts into parts as long as a bound allows, leaving one group for each later part.

    The last part may end before the last group: then no cut keeps the bound.
    """
    cuts = [0]
    for part in range(1, parts + 1):
        longest = int(np.searchsorted(total, total[cuts[-1]] + bound, side="right")) - 1
        cuts.append(min(max(longest, cuts[-1] + 1), len(total) - 1 - (parts - part)))
    return np.array(cuts)
