"""The schedule of a compression: the density of each stage, and the fraction of the budget at which it ends."""

from __future__ import annotations

import math

# A stage keeps at least this fraction of the blocks of the stage before.
MIN_KEPT = 0.25

# Each stage but the last has this fraction of the budget: most of the training has to be at the target density.
EARLY_SHARE = 0.1


def stage_densities(density: float) -> list[float]:
    """Return the density of each stage: two stages or more with equal ratios, or one for a density above 0.5."""
    count = 1 if density > 0.5 else max(2, math.ceil(math.log(density, MIN_KEPT)))
    return [density ** ((stage + 1) / count) for stage in range(count)]


def stage_ends(count: int, begin: float = 0.0) -> list[float]:
    """Return the fraction of the budget at which each stage ends, from `begin` on."""
    early = [begin + min(EARLY_SHARE, (1 - begin) / count) * (stage + 1) for stage in range(count - 1)]
    return [*early, 1.0]
