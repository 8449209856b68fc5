"""Which blocks stay: those with the highest scores, of each weight or of all together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...checked import number
from ...errors import BlockSparseError
from ...surgery.blocks import Blocks

SCOPES = ("global", "layer")


def check_density(density: float, blocks: Mapping[str, Blocks], scope: str) -> None:
    """Raises a BlockSparseError unless each weight can keep a block."""
    if scope not in SCOPES:
        raise BlockSparseError.expected("scope", f"one of {', '.join(SCOPES)}", repr(scope))
    counts = {name: each.grid[0] * each.grid[1] for name, each in blocks.items()}
    if scope == "layer":
        name, least = max(((name, 0.5 / count) for name, count in counts.items()), key=lambda found: found[1])
        where = f"that leaves {name} one of its {counts[name]} blocks"
    else:
        total = sum(count * blocks[name].size for name, count in counts.items())
        least, where = sum(each.size for each in blocks.values()) / total, "that leaves each weight a block"
    if density < least:
        raise BlockSparseError.expected("density", f"{least:.3g} or more, {where}", f"{density:g}")


def strongest(
    scores: Mapping[str, Tensor], blocks: Mapping[str, Blocks], density: float, scope: str
) -> dict[str, Tensor]:
    """Marks the blocks with the highest scores, bool `[out_blocks, in_blocks]` for each weight, to the nearest block.

    In the scope "layer" that part of each weight's blocks; in "global" of all weights' numbers, for which they compete.
    The best block of each weight is always kept.
    """
    groups = [list(scores)] if scope == "global" else [[name] for name in scores]
    return {name: mask for group in groups for name, mask in _strongest(group, scores, blocks, density).items()}


@dataclass(frozen=True)
class Cap:
    """An upper bound for the density that a penalty leaves, as its strength does not determine one; None for any."""

    density: float | None
    scope: str
    blocks: Mapping[str, Blocks]

    def __post_init__(self) -> None:
        density = 1.0 if self.density is None else number("density", self.density, 0, 1)
        check_density(density, self.blocks, self.scope)

    def __call__(self, kept: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of `kept`, of all or as many with the highest scores; all `[out_blocks, in_blocks]` by weight."""
        if self.density is None:
            return dict(kept)
        ranked = {name: scores[name].masked_fill(~keep, -torch.inf) for name, keep in kept.items()}
        best = strongest(ranked, self.blocks, self.density, self.scope)
        return {name: keep & best[name] for name, keep in kept.items()}


def _strongest(
    names: list[str], scores: Mapping[str, Tensor], blocks: Mapping[str, Blocks], density: float
) -> dict[str, Tensor]:
    device = scores[names[0]].device
    flat = [scores[name].flatten().to(device, torch.float64) for name in names]
    sizes = torch.cat([torch.full_like(each, blocks[name].size) for name, each in zip(names, flat, strict=True)])
    ranked = torch.cat([each.index_fill(0, each.argmax(), torch.inf) for each in flat])
    order = ranked.argsort(stable=True)  # stable, so that among equal ones every run removes the same
    # A block goes where more than half of it is above what may stay.
    gone = sizes[order].cumsum(0) - sizes[order] / 2 <= (1 - density) * sizes.sum()
    gone &= ranked[order] < torch.inf
    keep = torch.ones_like(order, dtype=torch.bool)
    keep[order[gone]] = False
    parts = keep.split([each.numel() for each in flat])
    return {name: part.view(blocks[name].grid).to(scores[name].device) for name, part in zip(names, parts, strict=True)}
