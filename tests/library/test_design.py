"""Layouts proposed for a budget."""

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

import blocksparse as bs
from blocksparse import BlockSparseError
from blocksparse.topology.proposals import MEASURES, predicted_time
from blocksparse_lab.cli import app


@pytest.mark.parametrize(("features", "params"), [(2048, 400_000), (2048, 64 * 64 * 1024), (96, 5000), (64, 2048)])
def test_proposals_are_within_the_budget_and_can_be_made_again(features, params):
    found = bs.topology.design(features, params, block_size=32, tolerance=0.05)
    assert found
    for one in found:
        assert one.layout.shape == (features, features)
        assert one.params == one.layout.nnz * 1024
        assert abs(one.params - params) <= max(0.05 * params, 512)
        square = one.pattern in ("barabasi_albert", "watts_strogatz", "watts_strogatz_2d")
        make = getattr(bs.patterns, one.pattern)
        assert make(features if square else (features, features), 32, **one.options) == one.layout
        assert json.dumps(one.as_dict())


@pytest.mark.parametrize("objective", MEASURES)
def test_the_objective_comes_first(objective):
    found = bs.topology.design(2048, 720_000, block_size=32, objective=objective)
    assert {one.pattern for one in found} >= {"random", "barabasi_albert", "watts_strogatz", "watts_strogatz_2d"}
    measures = {
        "mixing": lambda one: one.measures.steps_to_mix,
        "path": lambda one: one.measures.path_length,
        "clustering": lambda one: -one.measures.clustering,
        "balance": lambda one: one.measures.hub_load,
        "time": lambda one: one.time,
    }
    values = [measures[objective](one) for one in found]
    assert values == sorted(values)
    assert MEASURES[objective].best in found[0].why
    table = str(found).splitlines()
    assert len(table) == len(found) + 1
    assert table[1].startswith(found[0].name)
    assert f"{found[0].params:,}" in table[1]
    assert len(str(found[:2]).splitlines()) == 3
    narrow = found.table(80).splitlines()
    assert len(narrow) == 2 * len(found) + 1
    assert max(map(len, narrow)) <= 80


@pytest.mark.parametrize("objective", MEASURES)
def test_what_is_not_connected_comes_last(objective):
    found = bs.topology.design(64, 190, block_size=1, objective=objective)
    apart = [one.measures.components > 1 for one in found]
    assert apart == sorted(apart)
    assert not apart[0]
    assert apart[-1]
    assert f"{found[-1].measures.components} components" in found[-1].why
    assert " - " in str(found).splitlines()[-1]


def test_the_predicted_time_counts_blocks_rows_and_the_fullest_row():
    assert predicted_time(bs.patterns.dense((256, 512), 32)) == pytest.approx(1)
    thin, twice = (bs.patterns.banded((4096, 4096), 32, bandwidth=w) for w in (8, 17))
    assert 1.7 < predicted_time(twice) / predicted_time(thin) < twice.nnz / thin.nnz
    hub = np.eye(64, dtype=bool)
    hub[5] = True
    layout = bs.BlockLayout(hub, 32)
    assert predicted_time(layout, workers=1) == pytest.approx(
        (3 * 127 + 2 * 4 * 64) / (3 * 64 * 64 + 2 * 4 * 64), rel=1e-12
    )
    # With a worker for each row the full one is waited for in the forward pass: 64 blocks and the rest of its outputs.
    dense = 2 * (64 + 4) + 64
    assert predicted_time(layout, workers=64) == pytest.approx(((64 + 4) + (2 + 4) + 127 / 64) / dense, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (1024, 31 * 1024),
            r"params: expected from 32,768 \(a block for each of 32 rows\) to 1,048,576 \(all blocks\)",
        ),
        ((1024, 1024**2 + 1), "got 1,048,577"),
        ((1024, 1e5), "got 100000.0"),
        ((1000, 10**5), "features: expected a multiple of the block, 32, got 1000"),
        ((0, 10**5), "features: expected an int, two blocks or more, got 0"),
        ((1024, 10**5, 32, "beauty"), "objective: expected one of mixing, path, clustering, balance, time"),
    ],
    ids=["few", "many", "float", "multiple", "none", "objective"],
)
def test_what_cannot_be_met_is_said(arguments, message):
    with pytest.raises(BlockSparseError, match=message):
        bs.topology.design(*arguments)


def test_numbers_out_of_range_are_said():
    for name, value in (("tolerance", 1), ("tolerance", math.nan), ("workers", 0), ("seed", -1)):
        with pytest.raises(BlockSparseError, match=name):
            bs.topology.design(1024, 10**5, **{name: value})


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["layout", *map(str, arguments)])


def test_the_command_line_proposes_and_draws_the_first(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "first.png"
    done = run("design", "--features", 1024, "--params", "200k", "--objective", "path", "--out", picture)
    assert done.exit_code == 0
    assert done.output.startswith(str(bs.topology.design(1024, 200_000, objective="path")))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["design", "--features", 1024], "design: expected --features N --params N"),
        (["design", "--features", 1024, "--params", "5M"], "(all blocks), got 5,000,000"),
        (["design", "--features", 1024, "--params", "200k", "--m", 3], "--m: expected none: design chooses it"),
        (["dense", "--features", 1024, "--params", "200k"], "--params: expected the pattern design, got dense"),
    ],
    ids=["budget", "many", "option", "pattern"],
)
def test_mistakes_on_the_command_line_are_said(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 1
    assert message in done.output


def test_a_layout_of_many_blocks_is_measured_from_a_sample():
    done = run("random", "--features", 9000, "--block-size", 1, "--density", 0.001)
    assert done.exit_code == 0
    assert "from 500 blocks" in done.output
    assert "at least" in done.output


def test_blocks_are_square():
    with pytest.raises(bs.BlockSparseError, match="block_size: expected a square block"):
        bs.topology.design(1024, params=100_000, block_size=(16, 32))
