"""Which blocks stay: those with the highest scores, of each weight or of all together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...checked import number
from ...errors import BlockSparseError
from ...surgery.blocks import Blocks
from .lines import Lines, cover, covered

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
        got = f"{density:g} (or pass a smaller block_size, or skip small weights)"
        raise BlockSparseError.expected("density", f"{least:.3g} or more, {where}", got)


def strongest(
    scores: Mapping[str, Tensor],
    blocks: Mapping[str, Blocks],
    density: float,
    scope: str,
    *,
    seed: int = 0,
    lines: Mapping[str, Lines] | None = None,
    end: float | None = None,
) -> dict[str, Tensor]:
    """Marks the blocks with the highest scores, bool `[out_blocks, in_blocks]` for each weight, to the nearest block.

    In the scope "layer" that part of each weight's blocks; in "global" of all weights' numbers, for which they compete.
    The best block of each weight is always kept. Of blocks with equal scores random ones are, by the seed.

    Args:
        lines: of each weight the rows and columns of blocks that keep a block if the density suffices for one in each;
            None for no such rule. A score of -inf is that of a block that is not there any more.
        end: the density that is left in the end, which those blocks are to suffice for; by default `density`.
    """
    limits = density, density if end is None else end
    groups = [list(scores)] if scope == "global" else [[name] for name in scores]
    marks: dict[str, Tensor] = {}
    for number_of_group, names in enumerate(groups):
        marks |= _strongest(names, scores, blocks, limits, seed + number_of_group, lines)
    return marks


def ranks(scores: Tensor, seed: int = 0) -> Tensor:
    """The place of each score among all in rising order, int64 in their shape; equals are in a random order."""
    order = _order(scores.flatten(), seed)
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device)).view_as(scores)


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
    names: list[str],
    scores: Mapping[str, Tensor],
    blocks: Mapping[str, Blocks],
    limits: tuple[float, float],
    seed: int,
    lines: Mapping[str, Lines] | None,
) -> dict[str, Tensor]:
    device = scores[names[0]].device
    flat = [scores[name].flatten().to(device, torch.float64) for name in names]
    sizes = torch.cat([torch.full_like(each, blocks[name].size) for name, each in zip(names, flat, strict=True)])
    order = _order(torch.cat(flat), seed)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    rank = rank.masked_fill(torch.cat(flat) == -torch.inf, -1)
    levels = torch.cat(
        [
            _levels(mine.view(blocks[name].grid), None if lines is None else lines[name], limits)
            for name, mine in zip(names, rank.split([each.numel() for each in flat]), strict=True)
        ]
    )
    order = torch.cat([order[levels[order] == level] for level in range(3)])
    # A block goes where more than half of it is above what may stay.
    gone = sizes[order].cumsum(0) - sizes[order] / 2 <= (1 - limits[0]) * sizes.sum()
    gone &= levels[order] < 2
    keep = torch.ones_like(order, dtype=torch.bool)
    keep[order[gone]] = False
    parts = keep.split([each.numel() for each in flat])
    return {name: part.view(blocks[name].grid).to(scores[name].device) for name, part in zip(names, parts, strict=True)}


def _levels(rank: Tensor, lines: Lines | None, limits: tuple[float, float]) -> Tensor:
    """What goes last of the blocks of a weight, flat: 1 for blocks that lines need, 2 for one that always stays."""
    needed = torch.zeros_like(rank, dtype=torch.bool)
    if lines is not None:
        now, end = (_count(rank.numel(), density) for density in limits)
        mine = covered(lines, now)
        needed = cover(rank, mine, max(end, *(side.size for side in mine)))
    best = rank.masked_fill(~needed, -2).argmax() if needed.any() else rank.argmax()
    return needed.flatten().to(torch.uint8).index_fill(0, best, 2)


def _order(scores: Tensor, seed: int) -> Tensor:
    """The positions of scores in rising order, of equal ones in a random order, the same on every device."""
    order = scores.argsort(stable=True)
    ranked = scores[order]
    same = (ranked[1:] == ranked[:-1]) & ranked[1:].isfinite()
    if same.any():
        outside = same.new_zeros(1)
        tied = torch.cat([same, outside]) | torch.cat([outside, same])
        run = torch.cat([outside, ~same]).cumsum(0)[tied]
        shuffled = torch.randperm(len(run), generator=torch.Generator().manual_seed(seed), device="cpu")
        shuffled = shuffled.to(order.device)
        order[tied] = order[tied][shuffled[run[shuffled].argsort(stable=True)]]
    return order


def _count(blocks: int, density: float) -> int:
    """How many of the blocks of one weight stay at this density."""
    return blocks - math.floor((1 - density) * blocks + 0.5)
