"""Alternating timing, A B A B ... in one process, so that other load on the machine affects all calls equally."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch

__all__ = ["Samples", "Spread", "alternate", "cuda_clock", "geometric_mean", "host_clock"]

Call = Callable[[], object]
Clock = Callable[[Call, int], float]

# Defaults of `alternate`: the maximum number of rounds, and seconds for all calls together.
ROUNDS, BUDGET = 21, 4.0

# Seconds. A shorter call is repeated up to this, so that the clock and the wake-up of threads do not dominate.
SHORTEST_SAMPLE = 1e-3


def host_clock(call: Call, repeat: int) -> float:
    """Measure seconds per call over `repeat` calls in a row, by the host's clock."""
    start = perf_counter()
    for _ in range(repeat):
        call()
    return (perf_counter() - start) / repeat


def cuda_clock(call: Call, repeat: int) -> float:
    """Measure seconds per call over `repeat` calls in a row, by events of the current GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        call()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / repeat


@dataclass(frozen=True)
class Spread:
    """The median, the quartiles and the number of samples.

    >>> Spread.of([1.0, 2.0, 3.0, 4.0, 100.0])
    Spread(median=3.0, low=2.0, high=4.0, count=5)
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Compute the spread of `samples`."""
        low, median, high = (float(value) for value in np.percentile(samples, (25, 50, 75)))
        return cls(median, low, high, len(samples))


@dataclass
class Samples:
    """The result of `alternate`: seconds per call by name and round; NaN for a round that a call skipped."""

    seconds: dict[str, list[float]]
    repeat: dict[str, int]
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = list(self.seconds)

    def time(self, name: str) -> Spread:
        """Return the spread of the seconds of one call."""
        return Spread.of([value for value in self.seconds[name] if not math.isnan(value)])

    def least(self, name: str) -> float:
        """Return the seconds of the fastest round; other load on the machine can only add to it."""
        return min(value for value in self.seconds[name] if not math.isnan(value))

    def ratio(self, name: str, base: str) -> Spread:
        """Return how many times longer `name` takes than `base`, over the rounds with both."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return Spread.of([a / b for a, b in pairs if not math.isnan(a / b)])

    def per(self, counts: Mapping[str, int]) -> Samples:
        """Return the samples divided by `counts`: seconds per unit of work if a call does several units."""
        seconds = {name: [value / counts[name] for value in values] for name, values in self.seconds.items()}
        return Samples(seconds, self.repeat)


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean, in which 2 and 1/2 cancel.

    >>> geometric_mean([2.0, 0.5, 8.0])
    2.0
    """
    return math.exp(math.fsum(math.log(ratio) for ratio in ratios) / len(ratios))


def alternate(
    calls: Mapping[str, Call], *, rounds: int = ROUNDS, budget: float = BUDGET, clock: Clock = host_clock
) -> Samples:
    """Time several calls in turn, A B C A B C ...

    Args:
        calls: the calls to time, by name. The first is the baseline and takes part in every round.
        rounds: the maximum number of rounds.
        budget: seconds for all calls together. Each has an equal share and skips further rounds once it has used it,
            after at least one round. Timing ends when all calls but the first skip, because the first alone would have
            the caches to itself.
        clock: `clock(call, repeat)` measures the seconds per call: `host_clock` or `cuda_clock`.

    >>> samples = alternate({"ours": lambda: sum(range(100)), "theirs": lambda: sum(range(10_000))}, rounds=3)
    >>> samples.ratio("theirs", "ours").median > 1
    True
    """
    share = budget / len(calls)
    first_name, *peers = calls
    repeat = {}
    for name, call in calls.items():
        first = clock(call, 1)  # the first call makes plans, caches and threads
        once = first if first > share / 8 else clock(call, 1)
        repeat[name] = max(1, math.ceil(SHORTEST_SAMPLE / max(once, 1e-9)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for nth in range(rounds):
            running = [name for name in peers or [first_name] if nth == 0 or spent[name] < share]
            if not running:
                break
            for name, call in calls.items():
                if name != first_name and name not in running:
                    seconds[name].append(math.nan)
                    continue
                seconds[name].append(clock(call, repeat[name]))
                spent[name] += seconds[name][-1] * repeat[name]
    finally:
        if collecting:
            gc.enable()
    return Samples(seconds, repeat)
