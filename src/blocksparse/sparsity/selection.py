"""Norms of blocks, and the selection of blocks by their scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ..checked import positive_fraction
from ..errors import BlockSparseError
from ..surgery.blocks import Blocks, reduce_blocks
from ..surgery.weight_handle import WeightHandle
from .lines import Lines, cover, coverable

NORMS = ("l2", "mean", "max")
SCOPES = ("global", "layer")

TieBreak = Callable[[np.ndarray], np.ndarray]
"""Maps positions to sort keys, which order positions with equal scores."""

Norms = TypeVar("Norms", Tensor, np.ndarray)


def check_norm(norm: object) -> None:
    """Raise a BlockSparseError unless `norm` names a norm of blocks."""
    if norm not in NORMS:
        raise BlockSparseError.expected("norm", f"one of {', '.join(NORMS)}", repr(norm))


def check_density(density: float, blocks: Mapping[str, Blocks], scope: str) -> None:
    """Raise a BlockSparseError if the scope is unknown or a weight would keep no block at this density."""
    if scope not in SCOPES:
        raise BlockSparseError.expected("scope", f"one of {', '.join(SCOPES)}", repr(scope))
    counts = {name: each.grid[0] * each.grid[1] for name, each in blocks.items()}
    if scope == "layer":
        name, minimum = max(((name, 0.5 / count) for name, count in counts.items()), key=lambda pair: pair[1])
        reason = f"that leaves {name} one of its {counts[name]} blocks"
    else:
        minimum, reason = least_density(blocks), "that leaves each weight a block"
    if density < minimum:
        got = f"{density:g} (or pass a smaller block_size, or skip small weights)"
        raise BlockSparseError.expected("density", f"{minimum:.3g} or more, {reason}", got)


def least_density(blocks: Mapping[str, Blocks]) -> float:
    """Return the density of weights that keep one block each."""
    total = sum(each.grid[0] * each.grid[1] * each.size for each in blocks.values())
    return sum(each.size for each in blocks.values()) / total


def block_norms(values: Tensor, norm: str = "l2") -> Tensor:
    """Return the norm of each stored block, `[nnz]`; differentiable.

    Args:
        values: `[nnz, block_out, block_in]`, or `[nnz, block_out, block_in, *kernel]` of a convolution. Norms of 16-bit
            values are float32.
        norm: "l2" (default), or the "mean" or "max" of |w|.

    Raises:
        BlockSparseError: an unknown norm, or values of fewer than three dimensions.

    >>> import torch, blocksparse as bs
    >>> values = torch.tensor([[[3.0, -4.0]], [[1.0, 0.0]]])
    >>> bs.sparsity.block_norms(values), bs.sparsity.block_norms(values, "max")
    (tensor([5., 1.]), tensor([4., 1.]))

    Source: `blocksparse_norm` of openai/blocksparse (2017). The sum of the l2 norms is the penalty of the group lasso.
    """
    check_norm(norm)
    if not isinstance(values, Tensor) or values.dim() < 3:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise BlockSparseError.expected("values", "blocks [nnz, block_out, block_in, ...]", got)
    return norms_over(values, norm, tuple(range(1, values.dim())))


def norms_over(blocks: Tensor, norm: str, dims: tuple[int, ...]) -> Tensor:
    """Return the norm over these dimensions, in float32 or float64."""
    blocks = blocks if blocks.dtype in (torch.float32, torch.float64) else blocks.float()
    if norm == "mean":
        return blocks.abs().mean(dims)
    return torch.linalg.vector_norm(blocks, math.inf if norm == "max" else 2, dims)


def dense_norms(blocks: Blocks, dense: Tensor, norm: str = "l2") -> Tensor:
    """Return the norm of each block of a dense weight, `[out_blocks, in_blocks]`, without gradients."""
    return reduce_blocks(blocks, dense, lambda folded: norms_over(folded.detach(), norm, blocks.inside))


def stored_norms(weight: WeightHandle, norm: str = "l2") -> np.ndarray:
    """Return the norms of all stored blocks of a weight, `[nnz]`, the same on each process that stores it."""
    return weight.gather(block_norms(weight.local, norm)).cpu().numpy()


def normalize_by_size(norms: Norms, blocks: Blocks, norm: str) -> Norms:
    """Divide l2 norms by sqrt(block size): blocks of linear layers and of convolutions then compete as equals."""
    return norms / blocks.size**0.5 if norm == "l2" else norms


def hash_positions(positions: np.ndarray, seed: int = 0) -> np.ndarray:
    """Hash positions to random uint64 numbers that depend on the position and the seed only.

    They break ties, the same way on every process, whichever positions that process has.

    Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators (2014): SplitMix64.
    """
    x = positions.astype(np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: np.ndarray = x ^ (x >> np.uint64(31))
    return hashed


def mark_smallest(scores: np.ndarray, count: int, tie_break: TieBreak = hash_positions) -> np.ndarray:
    """Return a mask `[n]` of the `count` smallest scores, without a sort; `tie_break` decides among equal ones.

    NaN counts as the largest score.
    """
    if count <= 0:
        return np.zeros(scores.size, dtype=bool)
    bound = np.partition(scores, count - 1)[count - 1]
    if np.isnan(bound):
        marks = ~np.isnan(scores)
        equal = np.flatnonzero(~marks)
    else:
        marks, equal = scores < bound, np.flatnonzero(scores == bound)
    missing = count - np.count_nonzero(marks)
    if missing < equal.size:
        equal = equal[tie_break(equal).argsort()[:missing]]
    marks[equal] = True
    return marks


def rank_scores(scores: Tensor, seed: int = 0) -> Tensor:
    """Return the rank of each score, int64, 0 for the lowest; equal scores rank in a random order."""
    return _ranks(_argsort(scores.flatten(), seed)).view_as(scores)


def top_blocks(
    scores: Mapping[str, Tensor],
    blocks: Mapping[str, Blocks],
    density: float,
    scope: str,
    *,
    seed: int = 0,
    lines: Mapping[str, Lines] | None = None,
    final_density: float | None = None,
) -> dict[str, Tensor]:
    """Return a mask of the blocks with the highest scores, bool `[out_blocks, in_blocks]` for each weight.

    Each weight keeps at least its best block. The density is met to the nearest block.

    Args:
        scores: `[out_blocks, in_blocks]` by weight; -inf marks blocks that were removed before.
        blocks: how each weight is divided into blocks.
        density: fraction of the weights to keep.
        scope: "global", where the blocks of all weights compete, or "layer", where each weight gets this density.
        seed: seed of the random choice among equal scores.
        lines: rows and columns of blocks, by weight, that each keep a block if the density suffices for one in each;
            None for no such rule.
        final_density: density at the end of a schedule, at which the blocks kept for `lines` must fit. By default
            `density`.
    """
    limits = density, density if final_density is None else final_density
    groups = [list(scores)] if scope == "global" else [[name] for name in scores]
    marks: dict[str, Tensor] = {}
    for index, names in enumerate(groups):
        marks |= _top_blocks_of_group(names, scores, blocks, limits, seed + index, lines)
    return marks


@dataclass(frozen=True)
class DensityLimit:
    """An upper bound of the density that a penalty leaves; its strength alone determines none. None for no bound."""

    density: float | None
    scope: str
    blocks: Mapping[str, Blocks]

    def __post_init__(self) -> None:
        density = 1.0 if self.density is None else positive_fraction("density", self.density)
        check_density(density, self.blocks, self.scope)

    def __call__(self, masks: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the masks without the blocks of lowest scores, so that the density is within the bound."""
        if self.density is None:
            return dict(masks)
        masked = {name: scores[name].masked_fill(~mask, -torch.inf) for name, mask in masks.items()}
        best = top_blocks(masked, self.blocks, self.density, self.scope)
        return {name: mask & best[name] for name, mask in masks.items()}


def _top_blocks_of_group(
    names: list[str],
    scores: Mapping[str, Tensor],
    blocks: Mapping[str, Blocks],
    limits: tuple[float, float],
    seed: int,
    lines: Mapping[str, Lines] | None,
) -> dict[str, Tensor]:
    """Return masks of the top blocks of weights that compete; see `top_blocks`.

    `limits` are the density now and at the end.
    """
    device = scores[names[0]].device
    flat = [scores[name].flatten().to(device, torch.float64) for name in names]
    counts = [each.numel() for each in flat]
    sizes = torch.cat([torch.full_like(each, blocks[name].size) for name, each in zip(names, flat, strict=True)])
    order = _argsort(torch.cat(flat), seed)
    rank = _ranks(order).masked_fill(torch.cat(flat) == -torch.inf, -1)
    priorities = torch.cat(
        [
            _priorities(rank_of_weight.view(blocks[name].grid), None if lines is None else lines[name], limits)
            for name, rank_of_weight in zip(names, rank.split(counts), strict=True)
        ]
    )
    order = torch.cat([order[priorities[order] == priority] for priority in range(3)])
    # A block is removed if more than half of it exceeds the density.
    removed = sizes[order].cumsum(0) - sizes[order] / 2 <= (1 - limits[0]) * sizes.sum()
    removed &= priorities[order] < 2
    keep = torch.ones_like(order, dtype=torch.bool)
    keep[order[removed]] = False
    return {
        name: mask.view(blocks[name].grid).to(scores[name].device)
        for name, mask in zip(names, keep.split(counts), strict=True)
    }


def _priorities(rank: Tensor, lines: Lines | None, limits: tuple[float, float]) -> Tensor:
    """Return priorities of a weight's blocks, flat: 2 for one that always stays, 1 if a line needs it, else 0."""
    needed = torch.zeros_like(rank, dtype=torch.bool)
    if lines is not None:
        count_now, count_at_end = (_count_at(density, rank.numel()) for density in limits)
        lines = coverable(lines, count_now)
        needed = cover(rank, lines, max(count_at_end, *(side.size for side in lines)))
    best = rank.masked_fill(~needed, -2).argmax() if needed.any() else rank.argmax()
    return needed.flatten().to(torch.uint8).index_fill(0, best, 2)


def _argsort(scores: Tensor, seed: int) -> Tensor:
    """Sort in rising order and equal scores in a random order, the same on every device; return the indices."""
    order = scores.argsort(stable=True)
    ranked = scores[order]
    equal_to_next = (ranked[1:] == ranked[:-1]) & ranked[1:].isfinite()
    if equal_to_next.any():
        false = equal_to_next.new_zeros(1)
        tied = torch.cat([equal_to_next, false]) | torch.cat([false, equal_to_next])
        run = torch.cat([false, ~equal_to_next]).cumsum(0)[tied]
        shuffled = torch.randperm(len(run), generator=torch.Generator().manual_seed(seed), device="cpu")
        shuffled = shuffled.to(order.device)
        order[tied] = order[tied][shuffled[run[shuffled].argsort(stable=True)]]
    return order


def _ranks(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def _count_at(density: float, blocks: int) -> int:
    """Return how many of a weight's blocks stay at this density."""
    return blocks - math.floor((1 - density) * blocks + 0.5)
