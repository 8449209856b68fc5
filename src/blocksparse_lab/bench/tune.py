"""Search for a GPU's fastest tiles, from those of the rule to faster neighbours step by step.

Each tile is checked against float64 before it is timed in alternation with the best so far, on copies of the weights
that take turns. After each case, the result is written to the file of this GPU model.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from blocksparse.checked import number
from blocksparse.errors import BlockSparseError
from blocksparse.measure import Call, Samples, Spread
from blocksparse.ops.gpu import tiles
from blocksparse.ops.gpu.tiles import Gpu, Tile, Work
from blocksparse.ops.registry import use_backend

from ..machine import machine
from .case import OURS
from .device import Device
from .linear import LinearBench, LinearCase
from .linear_specs import DTYPES as ALL_DTYPES
from .linear_specs import LinearSpec
from .report import duration, short

# Default cases: a layer in training and in generation. "tf32" is float32 with PyTorch's TF32 switch on.
DTYPES = ("bfloat16", "float32")
BLOCKS = (16, 32, 64, 128)
TOKENS = (32, 8192)
DENSITIES = (0.1, 0.5)
HIDDEN = 8192

# A tile must be faster by this fraction to be preferred; smaller differences are noise.
GAIN = 0.01
# Accumulators that a thread can keep in registers.
SUMS = 128


@dataclass(frozen=True)
class Case:
    """One product to tune a tile for."""

    spec: LinearSpec
    tf32: bool = False

    def __str__(self) -> str:
        spec, dtype = self.spec, "tf32" if self.tf32 else self.spec.dtype
        return f"{spec.pass_} {dtype}, block {spec.block}, {spec.tokens} tokens, density {spec.density:g}"

    @contextmanager
    def tf32_switch(self) -> Iterator[None]:
        """Set PyTorch's TF32 switch for this case, and restore it afterwards."""
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "tf32" if self.tf32 else "ieee"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.fp32_precision = before


def cases(
    dtypes: Sequence[str] = DTYPES,
    blocks: Sequence[int] = BLOCKS,
    passes: Sequence[str] = tiles.PASSES,
    tokens: Sequence[int] = TOKENS,
    densities: Sequence[float] = DENSITIES,
    hidden: int = HIDDEN,
) -> list[Case]:
    """Return all combinations; cases that differ only in density are neighbours, so that the first gives the second's
    start.

    >>> len(cases()), str(cases()[0])
    (96, 'forward bfloat16, block 16, 32 tokens, density 0.1')
    """
    arguments = {"dtypes": dtypes, "blocks": blocks, "passes": passes, "tokens": tokens, "density": densities}
    for name, values in arguments.items():
        if not values:
            raise BlockSparseError.expected(name, "at least one", "none")
    for density in densities:
        if not number("density", density, 0, 1):
            raise BlockSparseError.expected("density", "a number above 0", density)
    for name, values, known in (("dtypes", dtypes, (*ALL_DTYPES, "tf32")), ("passes", passes, tiles.PASSES)):
        for value in values:
            if value not in known:
                raise BlockSparseError.expected(name, f"some of {', '.join(known)}", repr(value))
    grid = itertools.product(dtypes, tokens, blocks, passes, densities)
    return [
        Case(LinearSpec(hidden, hidden, n, block, density, dtype.replace("tf32", "float32"), pass_), dtype == "tf32")
        for dtype, n, block, pass_, density in grid
    ]


# -- tiles ------------------------------------------------------------------------------------------------------


def is_valid(tile: Tile, work: Work, gpu: Gpu) -> bool:
    """Return whether a kernel can run with this tile: its sizes fit the work, its sums the registers, its buffers the
    memory.
    """
    wgrad, nvidia = work.pass_ == "wgrad", gpu.kind.startswith("sm")
    height = work.block[1] if work.pass_ == "dgrad" else work.block[0]
    largest = tiles.power_of_two(height)
    sums = (tile.block_k if wgrad else tile.block_m) * tile.block_n * (2 if tile.pairs else 1)
    return (
        16 <= tile.block_m <= min(work.tokens, 128 if wgrad else 256)
        and (8 if nvidia and largest == 8 else 16) <= tile.block_n <= max(largest, 16)
        and 16 <= tile.block_k <= 256
        and 2 <= tile.warps <= 8
        and (2 <= tile.stages <= 8 if nvidia else tile.stages <= 2)
        and (tile.group_m == 1 or (not wgrad and tile.group_m * tile.block_m <= work.tokens))
        and not (tile.pairs and wgrad)
        and sums <= SUMS * 32 * tile.warps
        and tiles.shared_memory(tile, work) <= gpu.shared_memory
    )


def neighbours(tile: Tile, work: Work, gpu: Gpu) -> list[Tile]:
    """Return the valid tiles one step away, the most important first.

    >>> gpu = Gpu("H200", "sm90", 132, 227 * 1024)
    >>> work = Work("forward", torch.bfloat16, (32, 32), 32, 0.1)
    >>> len(neighbours(tiles.rule(work, gpu), work, gpu)) > 5
    True
    """
    steps = [
        replace(tile, **{name: size})
        for name in ("block_k", "block_m", "warps", "block_n")
        for size in (2 * getattr(tile, name), max(getattr(tile, name) // 2, 1))
    ]
    steps += [replace(tile, stages=max(tile.stages + step, 1)) for step in (-2, 2, -1, 1)]
    # Keep the sums per thread and change the proportions: one of the two steps alone may not help.
    steps += [replace(tile, block_m=2 * tile.block_m, warps=2 * tile.warps)]
    steps += [replace(tile, block_m=max(tile.block_m // 2, 1), warps=max(tile.warps // 2, 1))]
    steps += [replace(tile, pairs=not tile.pairs)]
    steps += [replace(tile, pairs=not tile.pairs, block_m=max(tile.block_m // 2, 1))]
    steps += [replace(tile, group_m=group) for group in (4 * tile.group_m, tile.group_m // 4) if group]
    return [step for step in dict.fromkeys(steps) if step != tile and is_valid(step, work, gpu)]


# -- the search -------------------------------------------------------------------------------------------------


def search(
    starts: Sequence[Tile],
    around: Callable[[Tile], Sequence[Tile]],
    race: Callable[[Tile, Tile], float],
    in_time: Callable[[], bool],
) -> Tile:
    """Search from the starts through the neighbours of the best tile so far, and return the best.

    The first start is the initial best. `race(tile, best)` is the tile's time divided by that of the best so far.
    """
    best, *others = starts
    queue, seen = deque([*others, *around(best)]), {best}
    while queue and in_time():
        tile = queue.popleft()
        if tile in seen:
            continue
        seen.add(tile)
        if race(tile, best) < 1 - GAIN:
            best = tile
            queue.extendleft(reversed(around(best)))
    return best


HEAD = ("case", "tile", "rule", "tuned", "faster by", "tried")


@dataclass(frozen=True)
class Result:
    """The result of a case: the rule's tile, the best one, their times, the number of tiles tried, and refusals with
    reasons.
    """

    case: Case
    work: Work
    rule: Tile
    tile: Tile
    rule_time: Spread
    time: Spread
    tried: int
    refused: Mapping[Tile, str]

    @property
    def cells(self) -> list[str]:
        """The case's cells in a table with the columns HEAD."""
        tile, times = self.tile, (self.rule_time.median, self.time.median)
        size = f"{tile.block_m}x{tile.block_n}x{tile.block_k}, {tile.warps} warps, {tile.stages} stages"
        size += f", group {tile.group_m}" * (tile.group_m > 1) + ", pairs" * tile.pairs
        refused = f" ({len(self.refused)} refused)" if self.refused else ""
        return [f"{self.case}", size, *map(duration, times), short(times[0] / times[1]), f"{self.tried}{refused}"]


class Tuner:
    """Tunes cases on one device and writes the file of this GPU model into a folder, by default the one that is
    searched later.

    Raises:
        BlockSparseError: there is no such device, or the file exists and is not one of ours.
    """

    def __init__(self, device: str | Device = "cuda", folder: Path | None = None, seed: int = 0):
        self.bench = LinearBench((), budget=1.0, seed=seed, device=device)
        self.device = self.bench.device
        self.gpu = tiles.gpu_of(self.device.torch)
        self.path = (folder or tiles.user_folder()) / f"{tiles.slug(self.gpu.name)}.json"
        self.found = tiles.read(self.path) if self.path.exists() else {}

    def run(self, cases: Sequence[Case], seconds: float) -> Iterator[Result]:
        """Yield the results one by one after writing them; time that a case does not use goes to the others.

        Raises:
            BlockSparseError: the tile of the rule cannot run or gives wrong results.
        """
        end = perf_counter() + seconds
        for done, case in enumerate(cases):
            share = (end - perf_counter()) / (len(cases) - done)
            with case.tf32_switch(), use_backend("triton"):
                result = self.tune(case, share)
            self.found[result.work] = result.tile
            tiles.write(self.path, self.gpu, self.found, {"machine": machine(self.device.torch.type)})
            tiles.forget_tuned()
            yield result

    def tune(self, case: Case, seconds: float) -> Result:
        """Find the best tile for a case within about `seconds`."""
        end = perf_counter() + seconds
        problem = self.bench.case(case.spec)
        layout, dtype = problem.layout, case.spec.torch_dtype
        work = Work(case.spec.pass_, dtype, layout.block_shape, tiles.bucket(case.spec.tokens), layout.density)
        rule = tiles.fit(tiles.rule(work, self.gpu), work, self.gpu)
        ready = {rule: self._prepare(problem, rule)}
        refused: dict[Tile, str] = {}
        tried = 0

        def race(tile: Tile, best: Tile) -> float:
            nonlocal tried
            tried += 1
            try:
                call = self._prepare(problem, tile)
            except Exception as error:  # from the compiler, the driver or our check: others are still tried
                refused[tile] = " ".join(f"{type(error).__name__}: {error}".split())
                return math.inf
            ratio = self._times({"tile": call, "best": ready[best]}, rounds=5).ratio("tile", "best").median
            if ratio < 1 - GAIN:  # the new best; besides it only the rule's call is needed again
                for old in ready.keys() - {rule}:
                    del ready[old]
                ready[tile] = call
            return ratio

        known = tiles.nearest(work, self.found)
        starts = [rule] if known is None or not is_valid(known, work, self.gpu) else list(dict.fromkeys([rule, known]))
        best = search(starts, lambda tile: neighbours(tile, work, self.gpu), race, lambda: perf_counter() < end)
        times = self._times({"rule": ready[rule], "best": ready[best]}, rounds=11)
        return Result(case, work, rule, best, times.time("rule"), times.time("best"), tried, refused)

    def _prepare(self, problem: LinearCase, tile: Tile) -> tuple[Call, int]:
        """Check the product with this tile; return a call that runs it several times."""
        forced = {problem.spec.pass_: tile}
        counts: dict[str, int] = {}
        with tiles.use_tiles(**forced):
            problem.check(self.bench.seed)
            call = self.bench.prepare(problem, OURS, counts)

        def product() -> None:
            with tiles.use_tiles(**forced):
                call()

        return product, counts[OURS]

    def _times(self, calls: Mapping[str, tuple[Call, int]], rounds: int) -> Samples:
        counts = {name: count for name, (_, count) in calls.items()}
        return self.bench.alternate({name: call for name, (call, _) in calls.items()}, counts, rounds)
