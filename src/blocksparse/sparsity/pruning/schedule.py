"""How dense the weights are while they become sparse: the cubic schedule."""

from __future__ import annotations

from dataclasses import dataclass

from ...checked import integer, number


@dataclass(frozen=True)
class CubicSchedule:
    """The density after step t: 1 up to `begin`, `density` from `end` on, in between

        density + (1 - density) (1 - (t - begin) / (end - begin))^3

    It changes at `begin`, at each `every`-th step from there, and at `end`.

    Source: Zhu, Gupta, To prune, or not to prune (2017).
    """

    density: float
    begin: int
    end: int
    every: int

    def __post_init__(self) -> None:
        number("density", self.density, 0, 1)
        integer("begin", self.begin, 0)
        integer("end", self.end, self.begin + 1)
        integer("every", self.every, 1)

    def __call__(self, t: int) -> float:
        left = min(max((self.end - t) / (self.end - self.begin), 0.0), 1.0)
        return self.density + (1 - self.density) * left**3

    def due(self, t: int) -> bool:
        """Whether the pattern changes at step t."""
        return self.begin <= t <= self.end and ((t - self.begin) % self.every == 0 or t == self.end)
