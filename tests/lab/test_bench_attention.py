"""Benchmark of attention: its results are checked, and a row says whether time falls with density."""

import json

import pytest
import torch

import blocksparse as bs
from blocksparse.measure import Samples
from targets import attention, experts, windows
from targets.attention import AttentionProblem, AttentionSpec

SPEC = AttentionSpec(tokens=64, d=8, block=8)


def test_rows_on_small_sizes():
    threads = torch.get_num_threads()
    rows = list(attention.rows(0.05, quick=True))
    assert torch.get_num_threads() == threads
    # In each pass, the first row says whether time falls, and the second, a dense layout, has no target.
    assert [row.target == "-" for row in rows] == 2 * [False, True, *4 * [False]] + 6 * [False]
    assert all(row.details["error"] < 1e-5 for row in rows if "error" in row.details)
    assert "causal attention forward + backward, 4 heads, 256 tokens, d 16, small world of density" in rows[-1].work
    assert json.dumps([row.details for row in rows])


def test_rows_of_windows():
    works = [row.work for row in windows.rows(0.05, quick=True)]
    assert works[0] == "attention forward, window 64 of 256 tokens, 8 heads on 1, d 16, batch 1"
    assert [work.split(",")[0] for work in works] == [
        "attention forward",
        "memory of attention forward + backward",
        "choose 4 of 32 blocks",
    ]


def test_rows_of_decoding():
    rows = list(windows.decoding_rows(0.05, quick=True))
    assert len(rows) == 6
    assert all(row.work.startswith("decode one token") for row in rows)


def test_rows_of_experts():
    rows = list(experts.rows(0.05, quick=True))
    assert [row.target for row in rows] == [">= 3x a loop of dense experts", ">= 0.8x a dense layer", "-", "-"]
    assert rows[0].work == ("2 of 6 experts of 32 units, 24 tokens of 64, forward + backward, density 0.5, block 16")


@pytest.mark.parametrize(("seconds", "met"), [([3, 2, 1], True), ([3, 1, 2], False), ([2, 2, 1], False)])
def test_row_says_whether_time_falls(seconds, met):
    names = ["density 1", "density 0.5", "density 0.1"]
    samples = Samples({name: [float(t)] * 3 for name, t in zip(names, seconds, strict=True)}, {})
    row = attention.falls_row("attention", names, samples)
    assert row.met is met
    assert row.measured.startswith("1.00, ")


def test_wrong_results_raise(monkeypatch):
    problem = AttentionProblem(SPEC, {"half": bs.patterns.random((64, 64), 8, 0.5)}, causal=True)
    assert 0 < problem.check()["half"] < 1e-5
    monkeypatch.setattr(attention, "attention", lambda *of, **how: 1.01 * bs.nn.attention(*of, **how))
    with pytest.raises(bs.BlockSparseError, match="half of 'attention': expected a relative L2 error of at most 1e-05"):
        problem.check()
