"""CHTs: CH2-L3n scores against a count of paths, sampling of blocks, and the densities of its schedules."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.sparsity.pruning.schedule import CubicSchedule, SigmoidSchedule
from blocksparse.sparsity.sparse_training import chts, growth
from blocksparse.sparsity.sparse_training.chts import path_scores
from blocksparse.sparsity.sparse_training.growth import draw_by_score
from loops import update

pytestmark = pytest.mark.usefixtures("one_thread")


def counted(mask):
    """The scores of a pattern, path by path. In each, one of two nodes of one side is an end, and the other between."""
    rows, columns = mask.shape
    scores = np.zeros(mask.shape)
    for i, k in product(range(rows), range(columns)):
        for pattern, start, end in ((mask, i, k), (mask.T, k, i)):
            for between in range(len(pattern)):
                shared = {line for line in range(pattern.shape[1]) if pattern[start, line] and pattern[between, line]}
                if not shared or not pattern[between, end]:
                    continue
                others = {line for line in range(pattern.shape[1]) if pattern[between, line]} - shared - {end}
                inside = len(shared)
                scores[i, k] += (inside + 1) / (len(others) + 1)
    return scores


@pytest.mark.parametrize("grid", [(6, 9), (12, 5), (1, 4), (4, 1)])
def test_scores_are_those_of_paths(grid, monkeypatch):
    monkeypatch.setattr(chts, "ROWS_AT_ONCE", 5)
    for density in (0.1, 0.3, 0.7):
        mask = np.random.default_rng(int(10 * density)).random(grid) < density
        scores = path_scores(bs.BlockLayout(mask, 1), torch.float64).numpy()
        absent = ~mask
        np.testing.assert_allclose(scores[absent], counted(mask)[absent], rtol=1e-12)
        np.testing.assert_allclose(path_scores(bs.BlockLayout(mask, 1)).numpy(), scores, rtol=1e-5)


def test_a_path_by_hand():
    # Row 0 and row 1 share column 0, and row 1 has column 1: one path predicts (0, 1), over row 1 and over column 0.
    scores = path_scores(bs.BlockLayout([[1, 0], [1, 1]], 1))
    # Row 1 has no block besides the shared one and the predicted one, nor has column 0: (1 + 1) / (0 + 1) for each.
    assert scores[0, 1] == 4


def test_draws_follow_the_scores():
    generator, counts = np.random.default_rng(0), np.zeros(4)
    scores = np.array([1.0, 2.0, 5.0, 0.0])
    for _ in range(4000):
        counts[draw_by_score(scores, 1, generator)] += 1
    np.testing.assert_allclose(counts / 4000, scores / 8, atol=0.03)
    assert sorted(draw_by_score(scores, 4, generator)) == [0, 1, 2, 3]
    assert 3 not in draw_by_score(scores, 3, generator), "0 is drawn last"


@pytest.mark.parametrize("count", [1, 7, 60, 100])
def test_draws_do_not_depend_on_the_chunks(count, monkeypatch):
    scores = np.random.default_rng(1).random(100).astype(np.float32)
    drawn = []
    for chunk in (100, 9):
        monkeypatch.setattr(growth, "DRAW_CHUNK", chunk)
        drawn.append(draw_by_score(scores, count, np.random.default_rng(0)).tolist())
    assert drawn[0] == drawn[1] == sorted(set(drawn[0]))
    assert len(drawn[0]) == count


def test_blocks_grow_by_score_and_go_by_norm():
    torch.manual_seed(0)
    # Two communities: the scores of places between them are 0.
    mask = torch.zeros(16, 16, dtype=torch.bool)
    mask[:8, :8], mask[8:, 8:] = torch.rand(2, 8, 8) < 0.5
    mask[torch.arange(16), torch.arange(16)] = True
    layer = bs.nn.Linear(64, 64, layout=bs.BlockLayout(mask, 4))
    with torch.no_grad():
        layer.values[::5] *= 1e-3
    optimizer = torch.optim.AdamW(layer.parameters())
    method = bs.sparsity.CHTs(layer, optimizer, end=100, every=1, alpha=0.3, temperatures=(9, 9), keep_lines=False)
    before, small = layer.layout.keys_of_blocks(), layer.layout.keys_of_blocks()[::5]
    norms = dict(zip(before.tolist(), layer.values.detach(), strict=True))
    method.step()
    after = layer.layout.keys_of_blocks()
    assert len(after) == len(before)
    gone, new = np.setdiff1d(before, after), np.setdiff1d(after, before)
    assert len(gone) > 0.8 * int(method.fraction(1) * len(before)) * 0.8
    assert np.isin(gone, small).mean() > 0.6, "T = 9 mostly keeps the largest"
    assert not layer.layout.mask()[:8, 8:].any()
    assert not layer.layout.mask()[8:, :8].any()
    for key, values in zip(after.tolist(), layer.values.detach(), strict=True):
        assert torch.equal(values, torch.zeros(4, 4) if key in new else norms[key])


def test_fraction_and_temperature():
    method = bs.sparsity.CHTs(bs.nn.Linear(64, 64, density=0.3, block_size=8), None, end=10, every=5, alpha=0.3)
    assert [method.temperature(t) for t in (0, 5, 10)] == [1, 5, 9]
    assert method.fraction(5) == pytest.approx(0.15)
    assert method.fraction(10) == 0


def test_large_grids_are_refused(monkeypatch):
    monkeypatch.setattr(chts, "MAX_PLACES", 63)
    layer = bs.nn.Linear(64, 64, density=0.3, block_size=8)
    with pytest.raises(bs.BlockSparseError, match="topological growth: expected a grid of 63 blocks at most"):
        bs.sparsity.CHTs(layer, None, end=10, every=5)
    with pytest.raises(bs.BlockSparseError, match="topological growth: expected a grid of 63 blocks at most"):
        bs.sparsity.GradualBlockPruning(layer, None, 0.1, end=10, regrow=0.5, growth="topology")
    layer.values.requires_grad_(False)
    with pytest.warns(bs.SparsityWarning, match="while frozen"):  # it is not scored, and so not refused
        bs.sparsity.CHTs(nn.Sequential(layer, bs.nn.Linear(32, 32, density=0.3, block_size=8)), None, end=10, every=5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_can_be_drawn(value):
    layer = bs.nn.Linear(32, 32, density=0.4, block_size=4)
    layer.values.data[:20] = value
    method = bs.sparsity.CHTs(layer, None, end=50, every=1, alpha=0.3)
    nnz = layer.layout.nnz
    assert method.step()
    assert layer.layout.nnz == nnz


def test_padded_lines_and_columns_get_no_blocks():
    torch.manual_seed(0)
    model = nn.Sequential(bs.nn.Linear(30, 41, density=0.4, block_size=4), bs.nn.Linear(41, 30, block_size=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    method = bs.sparsity.CHTs(model, optimizer, end=20, every=1, alpha=0.6)
    for _ in range(6):
        update(optimizer, (model(torch.randn(8, 30)) - 1).square().mean(), method)
    for layer in model:
        dense = layer.dense_of(torch.ones_like(layer.values))
        assert dense.any(0).all()
        assert dense.any(1).all()


def test_schedules():
    cubic, sigmoid = (kind(0.1, 0, 100, 1, 0.5) for kind in (CubicSchedule, SigmoidSchedule))
    assert [cubic(0), cubic(100), sigmoid(0), sigmoid(100)] == pytest.approx([0.5, 0.1, 0.5, 0.1])
    assert cubic(50) == pytest.approx(0.1 + 0.4 / 8)
    assert sigmoid(50) == pytest.approx(0.3)

    def curve(x):
        return 1 / (1 + math.exp(-x))

    expected = 0.5 - 0.4 * ((curve(6 * (0.6 - 1)) - 0.5) / (curve(6) - curve(-6)) + 0.5)
    assert sigmoid(30) == pytest.approx(expected)
    assert CubicSchedule(0.1, 0, 100, 1)(0) == 1


@pytest.mark.parametrize("schedule", ["cubic", "sigmoid"])
@pytest.mark.parametrize("growth", ["random", "topology"])
def test_blocks_regrow_without_gradients_while_the_density_falls(growth, schedule):
    torch.manual_seed(0)
    model = nn.Sequential(
        bs.nn.Linear(64, 64, density=0.5, block_size=8), bs.nn.LSTM(64, 32, density=0.5, block_size=8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    method = bs.sparsity.GradualBlockPruning(
        model, optimizer, 0.2, end=10, every=2, regrow=0.5, growth=growth, schedule=schedule, initial_density=0.5
    )
    grown, densities = 0, []
    for _ in range(10):
        before = set(model[0].layout.keys_of_blocks().tolist())
        old = dict(zip(sorted(before), model[0].values.detach().clone(), strict=True))
        update(optimizer, model(torch.randn(3, 2, 64))[0].square().mean())
        moved = dict(zip(sorted(before), model[0].values.detach().clone(), strict=True))
        assert any(not torch.equal(old[key], moved[key]) for key in old), "weights move in each iteration"
        method.step()
        after = model[0].layout.keys_of_blocks().tolist()
        for key, values in zip(after, model[0].values.detach(), strict=True):
            assert torch.equal(values, moved.get(key, torch.zeros(8, 8))) or not values.any()
        grown += len(set(after) - before)
        layouts = [layer.layout for layer in method.modules.values()]
        densities.append(sum(each.nnz for each in layouts) / sum(each.grid[0] * each.grid[1] for each in layouts))
    assert grown > 3
    assert densities == sorted(densities, reverse=True)
    assert densities[-1] == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-42, torch.inf, torch.nan])
def test_layers_of_equal_or_infinite_norms_change(value):
    layer = bs.nn.Linear(64, 64, density=0.3, block_size=8)
    nn.init.constant_(layer.values, value)
    before = layer.layout
    assert bs.sparsity.CHTs(layer, None, end=50, every=1).step()
    assert layer.layout.nnz == before.nnz
    assert layer.layout != before
