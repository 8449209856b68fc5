"""The schedule of a compression: the density of each stage, and the fraction of the budget at which it ends."""

from __future__ import annotations

import math

# The last stage, at the target density, has at least this fraction of the budget.
LAST_SHARE = 0.7


def stage_densities(density: float) -> list[float]:
    """Return the density of each stage: about half of the one before, and `density` in the last stage."""
    count = max(1, round(-math.log2(density)))
    return [density ** ((stage + 1) / count) for stage in range(count)]


def stage_ends(count: int, begin: float = 0.0) -> list[float]:
    """Return the fraction of the budget at which each stage ends, from `begin` on; the last has 70 % of the budget."""
    early = [begin + (1 - LAST_SHARE - begin) * (stage + 1) / (count - 1) for stage in range(count - 1)]
    return [*(max(begin, end) for end in early), 1.0]
