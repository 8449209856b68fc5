"""Proposals of layouts for a budget of parameters, with their measures."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import patterns
from ..checked import integer, is_int, number
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..patterns.sizes import checked_square
from .summary import Summary, summary

# The cost of an output in addition to its blocks, in multiply-adds per token, which is about 4 blocks of 32 x 32 for
# each row of blocks. Fitted to benchmarks/results/linear-forward-float32-h12288-b32-t32.json and
# linear-train-float32-h4096-b32-t1024.json.
OUTPUT_COST = 128

REWIRES = (0.05, 0.2, 0.5)

# Up to EXACT blocks of features, paths are searched from all; above, from a sample of SAMPLED.
EXACT = 2_000
SAMPLED = 300


@dataclass(frozen=True)
class Proposal:
    """A layout within the budget, with its measures."""

    pattern: str
    """The function of `bs.patterns` that builds the layout."""
    options: dict[str, Any]
    """Its keyword arguments in addition to size and block."""
    layout: BlockLayout
    measures: Summary
    """Measures on block level."""
    time: float
    """Predicted time of a training step, as a fraction of that of a dense weight; see `predicted_time`."""
    why: str
    """The measures in which it is the best proposal, or its number of components."""

    @property
    def params(self) -> int:
        """The number of stored weights."""
        return math.prod(self.layout.values_shape)

    @property
    def name(self) -> str:
        """The call that builds it, with rounded numbers."""
        return f"{self.pattern}({', '.join(f'{key}={value:.4g}' for key, value in self.options.items())})"

    def as_dict(self) -> dict[str, Any]:
        """Return all fields except the layout, ready for JSON."""
        fields = {"pattern": self.pattern, "options": self.options, "params": self.params, "time": self.time}
        return fields | {"why": self.why, "measures": self.measures.as_dict()}


@dataclass(frozen=True)
class _Measure:
    """A column of the table.

    Attributes:
        head: title.
        key: sort key of a layout, less is better.
        form: format of the displayed value.
        best: name of the best value.
        sign: displayed value / sort key, 1 or -1.
    """

    head: str
    key: Callable[[Summary, float], float]
    form: str
    best: str
    sign: int = 1


def _steps_key(measures: Summary, time: float) -> float:
    """Return the steps to mix, infinite if some units never reach others."""
    return math.inf if measures.steps_to_mix is None else measures.steps_to_mix


def _path_key(measures: Summary, time: float) -> float:
    """Return the mean path, infinite for disconnected graphs."""
    return math.inf if measures.path_length is None or _is_disconnected(measures) else measures.path_length


MEASURES = {
    "mixing": _Measure("steps to mix", _steps_key, "{:.0f}", "mixes fastest"),
    "path": _Measure("mean path", _path_key, "{:.3f}", "shortest paths"),
    "clustering": _Measure("clustering", lambda found, time: -found.clustering, "{:.3f}", "most clustered", -1),
    "balance": _Measure("hub load", lambda found, time: found.hub_load, "{:.2f}", "most even load"),
    "time": _Measure("time / dense", lambda found, time: time, "{:.4f}", "least time"),
}


class Proposals(list[Proposal]):
    """A list of proposals, the best first, which prints as a table."""

    def table(self, width: int | None = None) -> str:
        """Return the table; if it needs more than `width` columns, words and numbers are on separate lines."""
        heads = ["pattern", "params", *(measure.head for measure in MEASURES.values()), "why"]
        lines = [heads]
        for one in self:
            values = [measure.sign * measure.key(one.measures, one.time) for measure in MEASURES.values()]
            shown = [
                m.form.format(v) if math.isfinite(v) else "-" for m, v in zip(MEASURES.values(), values, strict=True)
            ]
            lines.append([one.name, f"{one.params:,}", *shown, one.why])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        name, *numbers, why = zip(*lines, strict=True)
        right = ["  ".join(map(str.rjust, line, widths[1:-1])) for line in zip(*numbers, strict=True)]
        if width is not None and sum(widths) + 2 * len(widths) - 2 > width:
            words = [f"{one}: {reason}" if reason else one for one, reason in zip(name, why, strict=True)]
            return "\n".join([right[0], *(f"{one}\n{two}" for one, two in zip(words[1:], right[1:], strict=True))])
        rows = zip(name, right, why, strict=True)
        return "\n".join(f"{one.ljust(widths[0])}  {two}  {reason}".rstrip() for one, two, reason in rows)

    def __str__(self) -> str:
        return self.table()

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        return Proposals(item) if isinstance(index, slice) else item


def design(
    features: int,
    params: int,
    block_size: int = 32,
    objective: str = "mixing",
    *,
    tolerance: float = 0.1,
    workers: int = 8,
    seed: int = 0,
) -> Proposals:
    """Propose square layouts for a budget of parameters, measured and sorted; they print as a table.

    For each pattern in `bs.patterns`, the options are chosen that come nearest to the budget; layouts within the
    tolerance are proposed. A proposal has `pattern`, `options`, `layout`, `params`, `measures` (see
    `bs.topology.summary`; sampled above 2,000 blocks of features), `time` (predicted, see `Proposal`) and `why`. Steps
    to mix follow connections from inputs to outputs. Mean paths follow them in both directions, which shortens paths of
    asymmetric patterns.

    Args:
        features: size of the square weight, a multiple of the block.
        params: number of weights to store.
        block_size: size of the square blocks, 32 by default.
        objective: the order. Ties are sorted by the other objectives, and disconnected graphs come last.
            "mixing" (default): the fewest steps until every unit has reached every other.
            "path": the shortest mean path.
            "clustering": the highest clustering.
            "balance": the fewest blocks in the fullest row or column.
            "time": the shortest predicted time.
        tolerance: fraction of the budget by which a proposal may miss it, 0.1 by default.
        workers: cores, or units of a GPU, that share the rows in the predicted time; 8 by default.
        seed: seed of random patterns, 0 by default.

    Raises:
        BlockSparseError: a budget below one block per row or above all blocks; features that are no multiple of the
            block; an unknown objective; numbers out of range; scipy is missing (`pip install scipy`).

    >>> import blocksparse as bs
    >>> found = bs.topology.design(4096, params=1_200_000, block_size=32, objective="mixing")
    >>> found[1].pattern, found[1].options, found[1].params, found[1].measures.steps_to_mix
    ('barabasi_albert', {'m': 4, 'seed': 0}, 1159168, 4)
    >>> print(found[:2])
    pattern                              params  steps to mix  mean path  clustering  hub load  time / dense  why
    random(density=0.07153, seed=0)   1,200,128             4      1.932       0.139      1.75        0.0905  mixes ...
    barabasi_albert(m=4, seed=0)      1,159,168             4      2.430       0.170      5.09        0.0881  mixes ...
    """
    if objective not in MEASURES:
        raise BlockSparseError.expected("objective", f"one of {', '.join(MEASURES)}", repr(objective))
    integer("workers", workers, 1)
    number("tolerance", tolerance, 0, below=1)
    nodes, block = checked_square(features, block_size) if is_int(features) and features > 0 else (0, (1, 1))
    if nodes < 2:
        raise BlockSparseError.expected("features", "an int, two blocks or more", repr(features))
    each = block[0] ** 2
    if not is_int(params) or not nodes * each <= params <= nodes * nodes * each:
        expected = f"from {nodes * each:,} (a block for each of {nodes} rows) to {nodes * nodes * each:,} (all blocks)"
        raise BlockSparseError.expected("params", expected, f"{params:,}" if is_int(params) else repr(params))
    blocks = params / each
    layouts = []
    for pattern, options in _candidates(nodes, blocks, seed):
        layout = _build(pattern, features, block_size, options)
        if abs(layout.nnz - blocks) <= max(tolerance * blocks, 0.5):
            measures = summary(layout, sources=SAMPLED if nodes > EXACT else None, seed=seed)
            layouts.append((pattern, options, layout, measures, predicted_time(layout, workers)))
    reasons = _reasons([(measures, time) for *_, measures, time in layouts])
    found = [Proposal(*one, why) for one, why in zip(layouts, reasons, strict=True)]
    order = [objective, *(name for name in MEASURES if name != objective)]
    found.sort(
        key=lambda one: [
            _is_disconnected(one.measures),
            *(MEASURES[name].key(one.measures, one.time) for name in order),
        ]
    )
    return Proposals(found)


def predicted_time(layout: BlockLayout, workers: int = 8) -> float:
    """Predict the time of a training step's three products, as a fraction of that of a dense weight of this shape.

    A block costs its multiply-adds, and each output another 128 (in the gradient of the inputs, each input), as
    measured on one CPU for blocks of 32. Workers share the rows, so the time is that of a mean worker or of the fullest
    row, whichever is longer; the gradient of the values is shared evenly. The model ignores caches, kernels that split
    full rows, and the lower speed of smaller blocks.

    Args:
        layout: a layout of any shape.
        workers: cores, or units of a GPU; 8 by default.

    >>> import blocksparse as bs
    >>> from blocksparse.topology.proposals import predicted_time
    >>> predicted_time(bs.patterns.dense((1024, 1024)))
    1.0
    >>> round(predicted_time(bs.patterns.random((4096, 4096), density=0.1)), 3)
    0.118
    """
    counts = np.diff(layout.row_start), np.bincount(layout.col_of_block, minlength=layout.grid[1])
    full = np.full(layout.grid[0], layout.grid[1]), np.full(layout.grid[1], layout.grid[0])
    return _time(counts, layout.block_shape, workers) / _time(full, layout.block_shape, workers)


def _time(counts: tuple[np.ndarray, np.ndarray], block: tuple[int, int], workers: int) -> float:
    """Return the cost of a training step for these numbers of blocks per row and per column."""
    height, width = block
    total = counts[0].sum() * height * width / workers
    for count, outputs in zip(counts, block, strict=True):
        cost = count * height * width + OUTPUT_COST * outputs
        total += max(cost.sum() / workers, cost.max())
    return float(total)


def _candidates(nodes: int, target: float, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each pattern with the options that make its number of blocks nearest to the target."""

    def nearest(choices: Any, blocks: Callable[[int], float]) -> int:
        return min(choices, key=lambda choice: abs(blocks(choice) - target))

    def torus(neighbors: int) -> int:
        return patterns.watts_strogatz_2d(nodes, 1, neighbors, rewire=0).nnz

    yield "random", {"density": target / nodes**2, "seed": seed}
    if nodes > 2:
        m = nearest(range(1, nodes), lambda m: 2 * m * (nodes - m) + nodes + m * (m - 1))
        yield "barabasi_albert", {"m": m, "seed": seed}
        even = range(2, nodes, 2)
        neighbors = nearest(even, lambda k: nodes * (k + 1))
        for rewire in REWIRES:
            yield "watts_strogatz", {"neighbors": neighbors, "rewire": rewire, "seed": seed}
        # The pattern includes all neighbors at equal distances, so a block may have more than `neighbors`.
        even = range(2, max(min(int(target / nodes) + 1, nodes), 3), 2)
        at = bisect_left(even, target, key=torus)
        neighbors = nearest(even[max(at - 1, 0) : at + 1], torus)
        for rewire in REWIRES:
            yield "watts_strogatz_2d", {"neighbors": neighbors, "rewire": rewire, "seed": seed}
    yield "banded", {"bandwidth": nearest(range(nodes), lambda w: nodes * (2 * w + 1) - w * (w + 1))}
    yield "butterfly", {}
    divisors = [g for g in range(1, nodes + 1) if nodes % g == 0]
    yield "shuffled_block_diagonal", {"groups": nearest(divisors, lambda g: nodes**2 / g)}


def _build(pattern: str, features: int, block_size: int, options: dict[str, Any]) -> BlockLayout:
    """Return the layout of a pattern with these options."""
    square = pattern in ("barabasi_albert", "watts_strogatz", "watts_strogatz_2d")
    return getattr(patterns, pattern)(features if square else (features, features), block_size, **options)


def _reasons(measured: list[tuple[Summary, float]]) -> list[str]:
    """Return the `why` of each (measures, predicted time).

    It lists the measures that the layout wins among connected layouts, or says "N components" if it is disconnected.
    """
    connected = [one for one in measured if not _is_disconnected(one[0])] or measured
    best = {name: min(measure.key(*one) for one in connected) for name, measure in MEASURES.items()}
    reasons = []
    for measures, time in measured:
        good = [m.best for name, m in MEASURES.items() if m.key(measures, time) == best[name] < math.inf]
        reasons.append(f"{measures.components} components" if _is_disconnected(measures) else ", ".join(good))
    return reasons


def _is_disconnected(measures: Summary) -> bool:
    return measures.components > 1
