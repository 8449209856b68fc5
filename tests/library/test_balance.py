"""Balanced cuts, compared with every possible cut."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocksparse.distributed.balance import balanced_cuts
from blocksparse.errors import BlockSparseError

COSTS = st.one_of(st.integers(0, 9), st.floats(0, 1e9), st.floats(0, 1))


@given(st.lists(COSTS, min_size=1, max_size=9), st.integers(1, 5), st.integers(1, 3))
def test_no_cut_has_a_smaller_largest_part(costs, parts, multiple):
    inner = range(multiple, len(costs), multiple)
    if len(inner) + 1 < parts:
        with pytest.raises(BlockSparseError, match="lines to cut"):
            balanced_cuts(costs, parts, multiple)
        return

    def largest(cuts):
        return max(sum(costs[i:j]) for i, j in pairwise(cuts))

    cuts = balanced_cuts(costs, parts, multiple)
    assert cuts[0] == 0
    assert cuts[-1] == len(costs)
    assert len(cuts) == parts + 1
    assert all(i < j for i, j in pairwise(cuts))
    assert all(cut % multiple == 0 for cut in cuts[:-1])
    least = min(largest((0, *between, len(costs))) for between in combinations(inner, parts - 1))
    assert largest(cuts) <= least * (1 + 1e-9) + 1e-9 * sum(costs)


def test_a_quarter_of_a_million_lines():
    costs = np.random.default_rng(0).zipf(2.5, 250_000).clip(max=1000)
    cuts = balanced_cuts(costs, 1000)
    shares = np.add.reduceat(costs, cuts[:-1])
    assert shares.sum() == costs.sum()
    assert shares.max() <= costs.sum() / 1000 + costs.max()


def test_the_search_ends_for_any_floats():
    """For some costs, rounding keeps the two bounds of the bisection apart."""
    random = np.random.default_rng(0)
    for case in range(2000):
        costs = random.random(random.integers(5, 60)) * 10.0 ** random.integers(-12, 12)
        parts = int(random.integers(1, 6))
        cuts = balanced_cuts(costs, parts)
        shares = np.add.reduceat(costs, cuts[:-1])
        assert len(cuts) == parts + 1, case
        assert shares.max() <= (costs.sum() / parts + costs.max()) * (1 + 1e-9), case


def test_invalid_costs():
    with pytest.raises(BlockSparseError, match=r"finite numbers >= 0, got -1\.0"):
        balanced_cuts([1, -1], 1)
    with pytest.raises(BlockSparseError, match="finite numbers >= 0, got nan"):
        balanced_cuts([1, float("nan")], 1)
    with pytest.raises(BlockSparseError, match="got 0"):
        balanced_cuts([], 1)


@pytest.mark.parametrize(("parts", "multiple"), [(0, 1), (2.0, 1), (1, 0)])
def test_invalid_numbers_of_parts(parts, multiple):
    with pytest.raises(BlockSparseError, match=r"(parts|multiple): expected an int, 1 or more, got"):
        balanced_cuts([1, 1], parts, multiple)
