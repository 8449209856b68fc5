"""Which features each tensor-parallel process has, balanced by the blocks that are stored for them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from ...checked import integer
from ...errors import BlockSparseError
from ..balance import balanced_cuts


@dataclass(frozen=True)
class Cut:
    """The hidden features of each process, shared by all layers that write or read them.

    Args:
        features: the number of features in all.
        unit: the number of features that stay together, a multiple of the block size. The last unit may be incomplete.
        parts: the units of each process, in ascending order.

    Raises:
        BlockSparseError: a unit that no part or several parts have, or another invalid argument.

    A layer with r times the features has units of r times the size. Queries of grouped-query attention are an example.

    >>> Cut(100, 32, ((0, 3), (1, 2))).features_of(0, 100)
    array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15, 16,
           17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 96, 97,
           98, 99])
    """

    features: int
    unit: int
    parts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        units = math.ceil(integer("features", self.features, 1) / integer("unit", self.unit, 1))
        is_ascending = all(list(part) == sorted(part) for part in self.parts)
        if not is_ascending or sorted(itertools.chain(*self.parts)) != list(range(units)):
            expected = f"the units 0 to {units - 1}, each in one part, in ascending order"
            raise BlockSparseError.expected("parts", expected, self.parts)

    @classmethod
    def even(cls, features: int, unit: int, ranks: int) -> Cut:
        """Return ranges of about equally many features, in order.

        Raises:
            BlockSparseError: fewer units than processes.

        >>> Cut.even(160, 32, 2)
        Cut(features=160, unit=32, parts=((0, 1, 2), (3, 4)))
        """
        units = np.array_split(np.arange(_count_units(features, unit, ranks)), ranks)
        return cls(features, unit, tuple(tuple(part.tolist()) for part in units))

    @classmethod
    def balanced(cls, features: int, unit: int, ranks: int, stored: np.ndarray, in_order: bool = False) -> Cut:
        """Return parts with about equally many stored values of every weight.

        Args:
            features, unit: as in the class.
            ranks: the number of processes.
            stored: `[weights, units]`, the number of values that each weight stores for a unit.
            in_order: whether parts must be consecutive ranges, which balance worse.

        Raises:
            BlockSparseError: fewer units than processes.

        >>> Cut.balanced(6, 1, 2, np.array([[9, 5, 4, 3, 2, 1]])).parts
        ((0, 3), (1, 2, 4, 5))
        >>> Cut.balanced(6, 1, 2, np.array([[9, 5, 4, 3, 2, 1]]), in_order=True).parts
        ((0, 1), (2, 3, 4, 5))
        """
        units = _count_units(features, unit, ranks)
        # A unit without blocks still has activations: the small weight makes the parts of an empty layout even.
        fractions = stored / np.maximum(stored.sum(1, keepdims=True), 1)
        loads = np.vstack([fractions, np.full(units, 1e-3 / units)])
        if in_order:
            bounds = balanced_cuts(stored.sum(0) / max(stored.sum(), 1) + loads[-1], ranks)
            parts = [list(range(begin, end)) for begin, end in itertools.pairwise(bounds)]
        else:
            parts = _pack(loads, ranks)
        return cls(features, unit, tuple(tuple(sorted(part)) for part in parts))

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return len(self.parts)

    def fits(self, features: int, block: int) -> bool:
        """Return whether a layer with this many features in blocks of this size can have this cut."""
        ratio, rest = divmod(features, self.features)
        return rest == 0 and (self.unit * ratio) % block == 0

    def features_of(self, rank: int, features: int) -> np.ndarray:
        """Return a process's features in a layer with this many features, int64, in ascending order."""
        unit = self.unit * (features // self.features)
        index = (np.array(self.parts[rank], dtype=np.int64)[:, None] * unit + np.arange(unit)).ravel()
        return index[index < features]

    def lines_of(self, rank: int, features: int, block: int) -> np.ndarray:
        """Return a process's rows or columns of blocks in a layer, int64, in ascending order."""
        return np.unique(self.features_of(rank, features) // block)


def _count_units(features: int, unit: int, ranks: int) -> int:
    """Return how many units of `unit` features there are, after a check that each rank gets one."""
    units = math.ceil(features / unit)
    if units < ranks:
        expected = f"at least {ranks}, one for each process"
        got = f"{units}: {features} features, of which {unit} stay together (blocks, heads)"
        raise BlockSparseError.expected("parts that a weight can be cut into", expected, got)
    return units


def _pack(loads: np.ndarray, ranks: int) -> list[list[int]]:
    """Assign units to ranks, the heaviest first, each to the rank whose loads so far overlap least with the unit's.

    Args:
        loads: `[weights, units]`, the fraction of each weight's values that a unit has.
        ranks: the number of ranks.

    Source: Graham, Bounds on multiprocessing timing anomalies (1969), with the dot product of Panigrahy et al.,
    Heuristics for vector bin packing (2011), for several weights at once.
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    assigned = np.zeros((ranks, len(loads)))
    for unit in np.argsort(-loads.max(0), kind="stable").tolist():
        rank = int(np.argmin(assigned @ loads[:, unit]))
        parts[rank].append(unit)
        assigned[rank] += loads[:, unit]
    return parts
