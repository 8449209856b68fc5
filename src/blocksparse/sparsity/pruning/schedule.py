"""The schedules of densities and of thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ...checked import integer, number, positive_fraction
from ...surgery.blocks import Blocks
from ..lines import Lines
from ..selection import top_blocks


@dataclass(frozen=True)
class CubicSchedule:
    """A density that falls from `initial`, 1 by default, at step `begin` to `density` at step `end`; in between it is

        density + (initial - density) (1 - (t - begin) / (end - begin))^3

    It is applied at `begin`, at each `every`-th step from there, and at `end`.

    Source: Zhu, Gupta, To prune, or not to prune (2017).
    """

    density: float
    begin: int
    end: int
    every: int
    initial: float = 1.0

    def __post_init__(self) -> None:
        positive_fraction("density", self.density)
        number("initial_density", self.initial, self.density, 1)
        integer("begin", self.begin, 0)
        integer("end", self.end, self.begin + 1)
        integer("every", self.every, 1)

    def __call__(self, t: int) -> float:
        """Return the density at step t."""
        return self.density + (self.initial - self.density) * self._curve(self._remaining(t))

    def _remaining(self, t: int) -> float:
        """Return the fraction of the steps that is left, 0 to 1."""
        return min(max((self.end - t) / (self.end - self.begin), 0.0), 1.0)

    def _curve(self, remaining: float) -> float:
        """Return the fraction of the way from `density` to `initial`."""
        return remaining**3

    def select(
        self,
        t: int,
        scores: Mapping[str, Tensor],
        blocks: Mapping[str, Blocks],
        scope: str,
        seed: int,
        lines: Mapping[str, Lines] | None,
    ) -> dict[str, Tensor]:
        """Return a mask of the blocks that weights keep at step t; see `top_blocks` for the arguments."""
        if not scores:
            return {}
        return top_blocks(scores, blocks, self(t), scope, seed=seed, lines=lines, final_density=self.density)

    def due(self, t: int) -> bool:
        """Return whether to prune at step t."""
        return self.begin <= t <= self.end and ((t - self.begin) % self.every == 0 or t == self.end)


@dataclass(frozen=True)
class SigmoidSchedule(CubicSchedule):
    """A density that falls slowly, fast, then slowly, by a sigmoid over -6 to 6 that is scaled to reach both ends:

        density + (initial - density) ((sigmoid(6 (1 - 2 u)) - 1/2) / (2 sigmoid(6) - 1) + 1/2)

    where u = (t - begin) / (end - begin). Otherwise as `CubicSchedule`.

    Source: Zhang et al., Brain network science modelling of sparse neural networks (2025): CHTss.
    """

    def _curve(self, remaining: float) -> float:
        def sigmoid(x: float) -> float:
            return 1 / (1 + math.exp(-x))

        return (sigmoid(6 * (2 * remaining - 1)) - 0.5) / (2 * sigmoid(6) - 1) + 0.5


SCHEDULES = {"cubic": CubicSchedule, "sigmoid": SigmoidSchedule}


@dataclass(frozen=True)
class Ramp:
    """A threshold that rises with slope theta from step `begin` on, and with 1.5 theta from step `ramp` on:

        theta (t - begin + 1) / every                                              for t < ramp
        (theta (ramp - begin + 1) + 1.5 theta (t - ramp + 1)) / every              for t >= ramp

    It is applied at each step from `begin` to `end` that is a multiple of `every`.
    """

    begin: int
    ramp: int
    end: int
    every: int = 100

    def __post_init__(self) -> None:
        integer("begin", self.begin, 0)
        integer("ramp", self.ramp, self.begin)
        integer("end", self.end, self.ramp + 1)
        integer("every", self.every, 1)

    def theta(self, q: float) -> float:
        """Return the slope that ends near the threshold q: 2 q every / (2 (ramp - begin) + 3 (end - ramp))."""
        return 2 * q * self.every / (2 * (self.ramp - self.begin) + 3 * (self.end - self.ramp))

    def threshold(self, t: int, theta: float) -> float:
        """Return the threshold at step t for a slope theta."""
        if t < self.ramp:
            return theta * (t - self.begin + 1) / self.every
        return (theta * (self.ramp - self.begin + 1) + 1.5 * theta * (t - self.ramp + 1)) / self.every

    def due(self, t: int) -> bool:
        """Return whether to prune at step t."""
        return self.begin <= t <= self.end and t % self.every == 0
