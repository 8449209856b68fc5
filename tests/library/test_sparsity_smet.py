"""SMET: its schedule, its choice, its clock, and learning rates by density; rows that keep their number of blocks."""

import copy
import math

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.checked import BLOCK_AGE
from blocksparse.surgery.optimizer import has_block_clock
from loops import update

pytestmark = pytest.mark.usefixtures("one_thread")


def layer_and_optimizer(block_size=8, density=0.25):
    torch.manual_seed(0)
    layer = bs.nn.Linear(64, 64, density=density, block_size=block_size)
    return layer, torch.optim.AdamW(layer.parameters(), lr=0.01)


@pytest.mark.parametrize("block_size", [1, 8])
def test_the_smallest_blocks_go_and_zeros_grow(block_size):
    layer, optimizer = layer_and_optimizer(block_size)
    method = bs.sparsity.SMET(layer, optimizer, end=6, every=2, keep_lines=False)
    for call in range(1, 9):
        update(optimizer, (layer(torch.randn(16, 64)) - 1).square().mean())
        norms, before = layer.values.detach().flatten(1).norm(dim=1), layer.layout.keys_of_blocks()
        assert method.step() == (call in (2, 4))
        if call not in (2, 4):
            continue
        fraction = 0.005 + 0.195 * (1 + math.cos(math.pi * call / 6)) / 2
        assert method.fraction(call) == pytest.approx(fraction)
        count, nnz = round(fraction * len(before)), len(before)
        assert layer.layout.nnz == nnz
        small = set(before[norms.argsort()[:count].numpy()].tolist())
        after = set(layer.layout.keys_of_blocks().tolist())
        assert set(before.tolist()) - after <= small
        new = [key in after - set(before.tolist()) for key in sorted(after)]
        assert 0 < sum(new) <= count
        assert layer.values.detach()[torch.tensor(new)].abs().max() == 0
        assert optimizer.state[layer.values][BLOCK_AGE][torch.tensor(new)].max() == 0


def test_it_adds_a_clock_unless_there_is_one():
    layer, optimizer = layer_and_optimizer()
    method = bs.sparsity.SMET(layer, optimizer, end=9, every=3, warmup=7)
    assert method.optimizer.warmup == 7
    assert has_block_clock(optimizer)
    assert bs.sparsity.SMET(layer, method.optimizer, end=9, every=3, warmup=8).optimizer.warmup == 7
    other = torch.optim.AdamW(layer.parameters())
    method.use_optimizer(other)
    assert has_block_clock(other)
    copied = copy.deepcopy(method)
    assert has_block_clock(copied.optimizer.optimizer)
    plain = torch.optim.RMSprop(layer.parameters())
    assert not has_block_clock(bs.sparsity.SMET(layer, plain, end=9, every=3, warmup=None).optimizer)
    with pytest.raises(bs.BlockSparseError, match=r"a BlockClock supports .* not RMSprop"):
        bs.sparsity.SMET(layer, plain, end=9, every=3)


def test_rates_by_density():
    model = nn.Sequential(
        bs.nn.Linear(64, 64, layout=bs.patterns.block_diagonal((64, 64), 8)),
        nn.Linear(64, 64),
        bs.nn.Linear(64, 64, layout=bs.patterns.banded((64, 64), 32), bias=False),
    )
    groups = bs.sparsity.rates_by_density(model, 0.5)
    expected = [(0.5, [model[0].bias, model[1].weight, model[1].bias, model[2].values]), (4.0, [model[0].values])]
    assert [group["lr"] for group in groups] == [lr for lr, _ in expected]
    for group, (_, parameters) in zip(groups, expected, strict=True):
        assert {id(each) for each in group["params"]} == {id(each) for each in parameters}
    torch.optim.AdamW(groups)
    with pytest.raises(bs.BlockSparseError, match="lr: expected a finite number, 0 or more"):
        bs.sparsity.rates_by_density(model, -1)
    with pytest.raises(bs.BlockSparseError, match="one with block-sparse weights"):
        bs.sparsity.rates_by_density(nn.Linear(2, 2), 1)


METHODS = {
    "CHTs": lambda layer, optimizer: bs.sparsity.CHTs(
        layer, optimizer, end=50, every=1, alpha=0.5, constant_fan_in=True
    ),
    "RigL": lambda layer, optimizer: bs.sparsity.RigL(layer, optimizer, end=50, every=1, constant_fan_in=True),
    "SET": lambda layer, optimizer: bs.sparsity.SET(layer, optimizer, constant_fan_in=True),
    "SMET": lambda layer, optimizer: bs.sparsity.SMET(layer, optimizer, end=50, every=1, constant_fan_in=True),
}


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("name", METHODS)
def test_rows_keep_their_numbers_of_blocks(name, block_size):
    torch.manual_seed(0)
    layout = bs.patterns.constant_fan_in((64, 64), block_size, density=0.3)
    layer = bs.nn.Linear(64, 64, layout=layout)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    method = METHODS[name](layer, optimizer)
    rows = layer.layout.mask().sum(1)
    assert rows.unique().numel() == 1
    for _ in range(6):
        before = layer.layout
        update(optimizer, (layer(torch.randn(16, 64)) - 1).square().mean(), method)
        assert torch.equal(layer.layout.mask().sum(1), rows)
        assert layer.layout != before


def test_rows_that_store_all_blocks_keep_them():
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[0], mask[1, :2] = True, True
    layer = bs.nn.Linear(12, 8, layout=bs.BlockLayout(mask, 2))
    method = bs.sparsity.SET(layer, zeta=0.9, constant_fan_in=True, keep_lines=False)
    for _ in range(5):
        method.step()
        assert layer.layout.mask().sum(1).tolist() == [6, 2, 0, 0]


@pytest.mark.parametrize("density", [0, 0.1, 0.5, 0.9, 1])
@pytest.mark.parametrize("grid", [(7, 13), (40, 8), (1, 9), (9, 1)])
def test_the_pattern_has_equal_rows_and_nearly_equal_columns(grid, density):
    layout = bs.patterns.constant_fan_in((2 * grid[0], 3 * grid[1]), (2, 3), density, seed=3)
    mask = layout.mask()
    assert mask.sum(1).tolist() == [max(1, round(density * grid[1]))] * grid[0]
    assert mask.sum(0).max() - mask.sum(0).min() <= 1
    assert layout == bs.patterns.constant_fan_in((2 * grid[0], 3 * grid[1]), (2, 3), density, seed=3)


@pytest.mark.parametrize("growth", ["gradient", "random", "topology"])
def test_rows_get_equal_numbers_of_blocks_while_the_density_falls(growth):
    torch.manual_seed(0)
    layer = bs.nn.Linear(64, 64, block_size=8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    method = bs.sparsity.GradualBlockPruning(
        layer, optimizer, 0.25, end=6, every=2, regrow=0.5, growth=growth, constant_fan_in=True
    )
    for call in range(1, 7):
        before = layer.layout
        update(optimizer, (layer(torch.randn(16, 64)) - 1).square().mean(), method)
        expected = round((0.25 + 0.75 * (1 - call // 2 * 2 / 6) ** 3) * 8)
        assert layer.layout.mask().sum(1).tolist() == [expected] * 8
        if call == 4 and growth == "random":
            assert (layer.layout.mask() & ~before.mask()).any(), "some blocks are new"


def test_rows_with_fewer_blocks_than_they_are_to_keep_are_refused():
    torch.manual_seed(0)
    layer = bs.nn.Linear(256, 256, density=0.5, block_size=8)
    expected = (
        r"at least 15 blocks per row of layer '0' .*got a row with \d+: start .*constant_fan_in\(\(256, 256\), \.\.\.\)"
    )
    with pytest.raises(bs.BlockSparseError, match=expected):
        bs.sparsity.GradualBlockPruning(nn.Sequential(layer), density=0.47, end=4, every=1, constant_fan_in=True)
    layer = bs.nn.Linear(256, 256, layout=bs.patterns.constant_fan_in((256, 256), 8, 0.5))
    method = bs.sparsity.GradualBlockPruning(
        layer, density=0.47, end=4, every=1, initial_density=0.5, constant_fan_in=True
    )
    for _ in range(4):
        method.step()
    assert layer.layout.mask().sum(1).tolist() == [15] * 32


SWITCHES = {
    "SET": {"keep_lines": 3},
    "SMET": {"end": 4, "constant_fan_in": "yes"},
    "CHTs": {"end": 4, "constant_fan_in": 1},
    "RigL": {"end": 4, "constant_fan_in": None},
    "ImportancePruning": {"keep_lines": "no"},
    "GradualBlockPruning": {"end": 4, "constant_fan_in": "yes"},
    "GradualPruning": {"end": 4, "keep_lines": 3, "block_size": 8},
    "ThresholdPruning": {"q": 0.1, "begin": 0, "ramp": 2, "end": 4, "keep_lines": 0, "block_size": 8},
    "MovementPruning": {"end": 4, "keep_lines": 3, "block_size": 8},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_are_bools(name):
    makes_sparse = "block_size" in SWITCHES[name]
    layer = nn.Linear(32, 32) if makes_sparse else bs.nn.Linear(32, 32, density=0.5, block_size=8)
    model = nn.Sequential(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(bs.BlockSparseError, match=r"(keep_lines|constant_fan_in): expected True or False, got "):
        getattr(bs.sparsity, name)(model, optimizer, **SWITCHES[name])
