"""Threshold pruning: the threshold by its formula, the blocks that it removes, and percentiles."""

import numpy as np
import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.sparsity import GroupLasso, ThresholdPruning, percentiles
from blocksparse.sparsity.pruning.schedule import Ramp
from loops import update

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_threshold():
    ramp = Ramp(begin=200, ramp=1000, end=3000, every=100)
    # theta = 2 * 0.38 * 100 / (2 * 800 + 3 * 2000) = 0.01
    theta = ramp.theta(0.38)
    assert theta == pytest.approx(0.01, rel=1e-12)
    # 0.01 * 1 / 100; 0.01 * 301 / 100; (0.01 * 801 + 0.015 * 1) / 100; (0.01 * 801 + 0.015 * 2001) / 100.
    by_hand = {200: 0.0001, 500: 0.0301, 999: 0.08, 1000: 0.08025, 3000: 0.38025}
    assert {t: ramp.threshold(t, theta) for t in by_hand} == pytest.approx(by_hand, rel=1e-12)
    assert [t for t in range(4000) if ramp.due(t)] == list(range(200, 3001, 100))


def test_the_threshold_grows_with_the_fourth_root_of_the_block():
    model = nn.Sequential(nn.Linear(64, 64), nn.Conv2d(64, 64, 3))
    steps = {"begin": 0, "ramp": 10, "end": 20, "every": 1}
    method = ThresholdPruning(model, None, 0.38, **steps, block_size=32)
    theta = Ramp(**steps).theta(0.38)
    assert method.theta == pytest.approx({"0.weight": theta * 5.656854249, "1.weight": theta * 9216**0.25})
    assert method.threshold("0.weight", 3) == pytest.approx(4 * theta * 5.656854249)


def test_blocks_below_the_threshold_are_removed():
    layer = nn.Linear(6, 2, bias=False)
    method = ThresholdPruning(layer, None, 1.0, begin=0, ramp=0, end=2, every=1, block_size=(1, 2))
    bound = method.threshold("weight", 1)  # theta (1 + 1.5 * 2)
    assert bound == pytest.approx(2 / 6 * 2**0.25 * 4)
    bound = torch.tensor(bound).item()
    layer.weight.data = torch.tensor([[0.9, -0.9, 9, 0, 0, -2], [-2, 0, 1.5, 1.5, 0, bound]])
    layer.weight.data[1, 5] = torch.nextafter(layer.weight[1, 5], torch.tensor(9.0)).detach()
    assert method.step()
    assert method.layouts()["weight"].mask().tolist() == [[False, True, True], [True, False, True]]
    layer.weight.data.fill_(7)
    method.step()
    assert method.layouts()["weight"].nnz == 4, "none comes back"
    assert layer.weight[0].tolist() == [0, 0, 7, 7, 7, 7]
    layer.weight.data.fill_(0)
    assert not method.step(), "nothing goes after the end"
    assert method.finish().layout.nnz == 4


@pytest.mark.parametrize("percent", [0, 37.5, 90, 100])
def test_percentiles(percent):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 21), nn.LSTM(5, 6), nn.Linear(4, 4))
    found = percentiles(model, percent, skip="2")
    assert set(found) == {"0.weight", "1.weight_ih_l0", "1.weight_hh_l0"}
    weights = dict(model.named_parameters())
    for name, q in found.items():
        assert q == pytest.approx(np.percentile(weights[name].detach().abs().numpy(), percent))
    with pytest.raises(bs.BlockSparseError, match="percent: expected a number from 0 to 100, got 101"):
        percentiles(model, 101)


def test_a_larger_q_leaves_fewer_blocks():
    """With the 90th percentile of an untrained layer nearly all blocks are removed."""
    torch.manual_seed(0)
    densities = []
    for percent in (10, 50, 90):
        layer = nn.LSTM(32, 32)
        q = percentiles(layer, percent)
        method = ThresholdPruning(
            layer, None, q, begin=1, ramp=20, end=100, every=10, block_size=(1, 2), keep_lines=False
        )
        for _ in range(100):
            method.step()
        densities.append(method.density)
    assert 1 > densities[0] > densities[1] > densities[2]


def test_no_line_gets_empty_unless_it_is_one_block():
    torch.manual_seed(0)
    for block, empties in ((4, False), ((30, 1), True)):
        layer = nn.Linear(50, 30)
        method = ThresholdPruning(layer, None, 10.0, begin=1, ramp=2, end=4, every=1, block_size=block)
        for _ in range(4):
            method.step()
        rows, cols = bs.topology.degrees(method.layouts()["weight"])
        assert (rows > 0).all()
        assert bool((cols == 0).any()) == empties


def test_with_the_penalty_of_group_lasso():
    torch.manual_seed(0)
    model = nn.LSTM(12, 16).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    lasso = GroupLasso(model, optimizer, 1e-4, mode="penalty", block_size=4)
    method = ThresholdPruning(model, optimizer, 0.12, begin=1, ramp=10, end=30, every=5, block_size=4)
    x = torch.randn(6, 8, 12, dtype=torch.float64)
    for _ in range(30):
        update(optimizer, (model(x)[0][..., :12] - 0.5 * x).square().mean() + lasso.penalty(), lasso, method)
    before = model(x)[0]
    assert 0 < method.density < 0.9
    model = method.finish()
    assert type(model) is bs.nn.LSTM
    torch.testing.assert_close(model(x)[0], before)
