"""Rows of reports that compare training runs at equal seconds instead of equal steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import sub
from statistics import fmean
from typing import Any

from ..bench.report import chance, noted
from ..training.compare import Run
from .experiment import Column

MARGIN = 0.1  # largest fraction by which times count as equal

NOTE = (
    "At equal seconds, two runs of one seed are compared when the faster one ends. The slower one is interpolated "
    "between its evaluations. If learning rates decay, the slower run still has a high one then, which counts against "
    "it. Other programs slowed the runs unequally. '-': other instruction sets, other versions of the program, or no "
    "evaluation by then."
)


@dataclass(frozen=True)
class EqualSeconds(Column):
    """The difference of two contenders' held-out figures when the faster run of each seed ends.

    The column is left out unless the seconds of some contender differ from those of `against` by more than a tenth.

    Args:
        figure: computes what the report shows from a held-out figure.
    """

    of: str | Callable[[Run, Any], Any] = "held_out"
    digits: int | None = 3
    compared: Callable[[Any, Any], float] = sub
    figure: Callable[[float], float] = float

    def cells(
        self, contenders: Mapping[str, Any], runs: Mapping[str, Sequence[Run]], paired: bool = True
    ) -> list[str] | None:
        if self.against is None or self.against not in runs:
            return None
        base = {run.settings["seed"]: run for run in runs[self.against]}
        cells, differs = [], False
        for name, some in runs.items():
            pairs = [(run, base[run.settings["seed"]]) for run in some if run.settings["seed"] in base]
            pairs = [pair for pair in pairs if name != self.against and _comparable(*pair)]
            values = [both for pair in pairs if (both := self._at_equal_seconds(*pair))]
            if not values:
                cells.append("-")
                continue
            slowdown = fmean(run.seconds for run, _ in pairs) / fmean(other.seconds for _, other in pairs)
            differs |= max(slowdown, 1 / slowdown) > 1 + MARGIN
            coverage = "" if len(values) == len(some) else f"{len(values)} of {len(some)} seeds"
            if paired:
                differences = [self.compared(ours, theirs) for ours, theirs in values]
                cells.append(noted(self._cell(differences, "+"), coverage, chance(differences)))
            else:
                ours, theirs = (list(side) for side in zip(*values, strict=True))
                cells.append(self._independent(ours, theirs, coverage))
        return cells if differs else None

    def _at_equal_seconds(self, run: Run, other: Run) -> tuple[float, float] | None:
        """Return the figures of both when the faster one ends; None if the slower one was not evaluated by then."""
        end = min(run.seconds, other.seconds)
        ours, theirs = held_out_at(run, end), held_out_at(other, end)
        return None if ours is None or theirs is None else (self.figure(ours), self.figure(theirs))


def held_out_at(run: Run, seconds: float) -> float | None:
    """Return a run's held-out figure after some seconds of training, interpolated between its evaluations.

    None if the first evaluation was later, or there are fewer than four. An evaluation without a time took place after
    its fraction of the steps.
    """
    points = [(line.get("seconds", line["step"] * run.seconds / run.steps), line) for line in run.evaluations]
    if len(points) < 4 or seconds < points[0][0]:
        return None
    for (start, before), (stop, after) in pairwise(points):
        if seconds < stop:
            fraction = (seconds - start) / (stop - start)
            return float(before["held_out"] + fraction * (after["held_out"] - before["held_out"]))
    return float(points[-1][1]["held_out"])


def _comparable(run: Run, other: Run) -> bool:
    """Return whether two runs have one version of the program and one instruction set."""
    machine, another = ((one.result or {}).get("machine") or {} for one in (run, other))
    return all(machine.get(key) == another.get(key) for key in ("isa", "commit"))
