"""Schedules for a GPU, as plain numbers: every block is multiplied once, whatever the cutting and pairing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import blocksparse as bs
from blocksparse.ops.gpu import plan as gpu_plan
from blocksparse.ops.gpu.plan import linear_plan, matching, most_shared, pair_plan, share, wgrad_tasks
from strategies import layouts

both_ways = pytest.mark.parametrize("transpose", [False, True], ids=["forward", "dgrad"])


def blocks_of(layout, transpose):
    """(row, col, place in values) of every block, as the product sees it."""
    blocks = zip(layout.row_of_block.tolist(), layout.col_of_block.tolist(), range(layout.nnz), strict=True)
    return sorted((col, row, place) if transpose else (row, col, place) for row, col, place in blocks)


def place(plan, entry, which=None):
    if plan.block is None:
        return entry
    return int(plan.block[entry] if which is None else plan.block[entry, which])


@both_ways
@given(layout=layouts(max_grid=9), longest=st.sampled_from([None, 1, 2, 3, 100]))
def test_every_block_is_in_one_task(transpose, layout, longest):
    plan = linear_plan(layout, transpose, longest)
    done = [
        (row, int(plan.col[entry]), place(plan, entry))
        for row, first, last, _ in plan.tasks.tolist()
        for entry in range(first, last)
    ]
    assert sorted(done) == blocks_of(layout, transpose)
    lengths = plan.tasks[:, 2] - plan.tasks[:, 1]
    assert (np.diff(lengths) <= 0).all(), "the longest first"
    assert longest is None or lengths.max(initial=0) <= longest
    assert set(plan.tasks[:, 0].tolist()) == set(range(layout.grid[transpose])), "empty rows are written too"


@both_ways
@given(layout=layouts(max_grid=9), longest=st.sampled_from([1, 2, 3]))
def test_slots_add_up_to_the_rows_that_are_cut(transpose, layout, longest):
    plan = linear_plan(layout, transpose, longest)
    parts = {slot: row for row, _, _, slot in plan.tasks.tolist() if slot >= 0}
    assert sorted(parts) == list(range(len(plan.slots)))
    sums = [(row, first, end) for first, (row, end) in enumerate(plan.slots.tolist()) if end >= 0]
    assert [slot for _, first, end in sums for slot in range(first, end)] == sorted(parts)
    assert all(parts[slot] == row for row, first, end in sums for slot in range(first, end))
    whole = [row for row, _, _, slot in plan.tasks.tolist() if slot < 0]
    assert sorted([*whole, *(row for row, _, _ in sums)]) == list(range(layout.grid[transpose]))


@both_ways
@given(layout=layouts(max_grid=9))
def test_pairs_hold_every_block_once(transpose, layout):
    plan = pair_plan(layout, transpose)
    done = []
    for first, begin, end, slot, second in plan.tasks.tolist():
        assert slot == -1
        cols = plan.col[begin:end].tolist()
        assert cols == sorted(set(cols)), "no inputs twice"
        for seat, row in enumerate((first, second)):
            own = [(row, int(plan.col[entry]), place(plan, entry, seat)) for entry in range(begin, end)]
            done += [each for each in own if each[2] >= 0]
            assert row >= 0 or all(each[2] < 0 for each in own)
    assert sorted(done) == blocks_of(layout, transpose)
    assert (plan.block >= 0).any(axis=1).all(), "no inputs that nobody needs"
    assert (np.diff(plan.tasks[:, 2] - plan.tasks[:, 1]) <= 0).all(), "the longest first"
    rows = plan.tasks[:, [0, 4]].ravel()
    assert sorted(rows[rows >= 0].tolist()) == list(range(layout.grid[transpose]))


@both_ways
@given(layout=layouts(max_grid=9))
def test_no_pairs_share_more_than_the_bound(transpose, layout):
    assert 0 <= share(pair_plan(layout, transpose)) <= most_shared(layout, transpose) + 1e-6


def test_matching_finds_twins():
    mask = np.random.default_rng(0).random((8, 40)) < 0.3
    layout = bs.BlockLayout(np.concatenate([mask, mask[::-1]]), block_size=4)
    assert sorted(matching(layout)) == [(row, 15 - row) for row in range(8)]
    assert share(pair_plan(layout, transpose=False)) == most_shared(layout, transpose=False) == 0.5
    assert share(linear_plan(layout, transpose=False)) == 0


def test_pairing_stays_within_chunks(monkeypatch):
    monkeypatch.setattr(gpu_plan, "PAIRING_CHUNK", 4)
    pairs = matching(bs.patterns.dense((10, 4), block_size=1))
    assert sorted(row for pair in pairs for row in pair) == list(range(10))
    assert all(first // 4 == second // 4 for first, second in pairs)


@given(layout=layouts(max_grid=9), block_k=st.sampled_from([1, 4, 16, 64]))
def test_wgrad_tasks_cover_every_lane_of_every_row(layout, block_k):
    width = 1 << (layout.block_shape[1] - 1).bit_length()
    seen = {}
    for row, first, last, lane0 in wgrad_tasks(layout, block_k).tolist():
        assert (first, last) == tuple(layout.row_start[row : row + 2].tolist())
        seen.setdefault(row, []).append(lane0)
    for row, count in enumerate(np.diff(layout.row_start).tolist()):
        assert sorted(seen.get(row, [])) == list(range(0, count * width, block_k))
