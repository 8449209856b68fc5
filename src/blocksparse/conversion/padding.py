"""Weights that padding to whole blocks makes much larger, which are better left dense."""

from __future__ import annotations

from dataclasses import replace

from ..surgery.prunable import Prunable, Unexpected
from .selection import Plan, Weights

# A weight of a linear layer is too narrow for its blocks if they store more than this many times its parameters. A
# convolution is if they store more at all, since it multiplies padding at each pixel.
MUCH_LARGER = 1.5

# A warning reports a linear layer that is padded by more than this fraction of all blocks that are kept.
MOST_PADDING = 0.1


def smaller_than_a_block(weights: Weights) -> dict[str, Unexpected]:
    """Return why convolutions stay dense of which even one block stores more, unless there are no other weights."""
    small = {
        name: Unexpected(_comparison(weight.blocks.size, weight, " or more", ", so it stays dense"))
        for name, weight in weights.items()
        if weight.blocks.taps > 1 and _is_too_large(weight.blocks.size, weight)
    }
    return {} if len(small) == len(weights) else small


def leave_larger_dense(plan: Plan) -> Plan:
    """Leave the weights dense that padding makes much larger, unless there would be no other weights."""
    weights = plan.selection.weights
    larger = {
        name: _comparison(stored, weights[name], so=", so it stays dense")
        for name, stored in _larger_weights(plan).items()
    }
    if not larger or len(larger) == len(plan.layouts):
        return plan
    plan = plan.leave_dense(larger)
    plan = replace(plan, unexpected={**plan.unexpected, **larger})
    return replace(plan, layouts=plan.selection.layouts(plan.layouts))


def weights_with_large_blocks(plan: Plan) -> dict[str, str]:
    """Return the weights that padding makes much larger: convolutions, and what takes a tenth of all blocks kept."""
    weights = plan.selection.weights
    most = MOST_PADDING * plan.selection.target_density * sum(each.tensor.numel() for each in weights.values())
    return {
        name: _comparison(stored, weights[name])
        for name, stored in _larger_weights(plan).items()
        if weights[name].blocks.taps > 1 or stored - weights[name].tensor.numel() > most
    }


def _larger_weights(plan: Plan) -> dict[str, int]:
    """Return what the weights store that padding makes much larger, by name.

    In blocks of 32 x 32, a weight of 10 x 1024 stores up to three times its parameters.
    """
    if plan.selection.target_density == 1:
        return {}
    weights = plan.selection.weights
    stored = {name: layout.nnz * weights[name].blocks.size for name, layout in plan.layouts.items()}
    return {name: size for name, size in stored.items() if _is_too_large(size, weights[name])}


def _is_too_large(stored: int, weight: Prunable) -> bool:
    """Return whether this many stored parameters are too many for a weight."""
    return stored > weight.tensor.numel() * (1 if weight.blocks.taps > 1 else MUCH_LARGER)


def _comparison(stored: int, weight: Prunable, more: str = "", so: str = "") -> str:
    """Say that a weight takes more parameters in blocks."""
    return f"stores {stored:,} parameters{more}, {weight.tensor.numel():,} when dense{so}: use smaller blocks or skip="
