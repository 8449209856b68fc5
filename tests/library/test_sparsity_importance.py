"""Importance pruning by its formula, and `compact`, which does not change what a model computes."""

import numpy as np
import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse_lab.models.mlp import SparseMLP
from loops import update

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(model, optimizer, x):
    for _ in range(2):
        update(optimizer, model(x).square().sum())


# -- pruning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("percentile", [10, 20, 55.5])
@pytest.mark.parametrize(("sizes", "block"), [((60, 80), 1), ((61, 75), 8), ((60, 80), (1, 4))], ids=str)
def test_the_percentile_of_the_layer(sizes, block, percentile):
    layer = bs.nn.Linear(*sizes, density=0.3, block_size=block)
    height = layer.layout.block_shape[0]
    weight = bs.to_dense(layer.values.detach(), layer.layout).double()[: layer.out_features]
    # I_j = sum_i |w_ij|, and its mean over the neurons of a row of blocks.
    neurons = weight.abs().sum(1).split(height)
    expected = np.array([row.mean().item() for row in neurons])
    np.testing.assert_allclose(bs.sparsity.importance(layer).numpy(), expected, rtol=1e-6)
    keep = expected >= np.percentile(expected, percentile)
    optimizer = torch.optim.Adam(layer.parameters())
    nnz = layer.layout.nnz
    method = bs.sparsity.ImportancePruning(layer, optimizer, percentile=percentile, begin=0, every=1, keep_lines=False)
    assert method.step()
    pruned = bs.to_dense(layer.values.detach(), layer.layout)[: layer.out_features]
    rows = torch.from_numpy(keep.repeat(height))[: layer.out_features, None]
    assert torch.equal(pruned.double(), weight * rows)
    assert layer.layout.nnz < nnz
    assert (layer.layout.mask().any(1).numpy() <= keep).all()


def test_a_weight_of_nan_counts_as_the_most_important():
    layer = bs.nn.Linear(64, 64, density=0.5, block_size=8)
    layer.values.data[0, 0, 0] = torch.nan
    method = bs.sparsity.ImportancePruning(layer, percentile=50, begin=0, every=1, keep_lines=False)
    method.step()
    assert layer.layout.mask().any(1).sum() == 4
    assert layer.values.isnan().any()


def test_no_input_loses_its_last_connection():
    """The most important row of those that an input reaches stays as a whole."""
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [1, 0, 0, 1, 0]])
    kept = {}
    for keep_lines in (True, False):
        layer = bs.nn.Linear(10, 10, layout=bs.BlockLayout(mask, block_size=2))
        scale = torch.tensor([1.0, 2.0, 3.0, 9.0, 9.0])[torch.tensor(layer.layout.row_of_block)]
        layer.values.data = torch.ones(layer.layout.values_shape) * scale[:, None, None]
        method = bs.sparsity.ImportancePruning(layer, percentile=70, begin=0, every=1, keep_lines=keep_lines)
        method.step()
        kept[keep_lines] = layer.layout.mask().any(1).tolist()
    assert kept[False] == [False, False, False, True, True]
    assert kept[True] == [False, True, False, True, True]


def test_schedules_of_the_two_codes():
    for arguments, expected in (({}, [210, 220, 230, 240]), ({"percentile": 10, "every": 20}, [220, 240])):
        layer = bs.nn.Linear(10, 10, density=0.5, block_size=1)
        method = bs.sparsity.ImportancePruning(layer, **arguments)
        assert [epoch for epoch in range(1, 250) if method.step()] == expected


def test_nnz_shrinks_with_set_in_the_same_run():
    model = SparseMLP([30, 60, 60, 4], epsilon=5)
    optimizer = torch.optim.Adam(model.parameters())
    evolve = bs.sparsity.SET(model, optimizer, skip=model.output)
    prune = bs.sparsity.ImportancePruning(model, optimizer, begin=1, every=2, skip=model.output)
    counts = []
    for _ in range(6):
        trained(model, optimizer, torch.randn(8, 30))
        evolve.step()
        prune.step()
        counts.append(sum(layer.layout.nnz for layer in model.layers))
    assert counts[0] > counts[1] == counts[2] > counts[3] == counts[4] > counts[5]
    for layer in model.layers:
        assert optimizer.state[layer.values]["exp_avg"].shape == layer.values.shape


def test_convolutions():
    conv = bs.nn.Conv2d(16, 40, 3, density=0.8, block_size=4)
    bs.sparsity.ImportancePruning(conv, percentile=50, begin=0, every=1).step()
    assert conv.layout.mask().any(1).sum() == 5


# -- smaller layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [None, "silu"])
@pytest.mark.parametrize(("sizes", "block"), [((20, 40, 30), 1), ((21, 43, 30), 4), ((24, 45, 30), (4, 8))], ids=str)
def test_compact_computes_the_same(sizes, block, fused):
    torch.manual_seed(0)
    second_block = block if isinstance(block, int) else block[::-1]
    first = bs.nn.Linear(*sizes[:2], density=0.3, block_size=block, activation=fused, dtype=torch.float64)
    second = bs.nn.Linear(*sizes[1:], density=0.5, block_size=second_block, dtype=torch.float64)
    activation = bs.nn.AllReLU(0.6, layer=2)
    model = nn.Sequential(first, activation, second)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(7, sizes[0]).double()
    trained(model, optimizer, x)
    bs.sparsity.ImportancePruning(first, optimizer, percentile=40, begin=0, every=1).step()
    expected, parameters = model(x).detach(), list(model.parameters())
    height = first.layout.block_shape[0]
    alive = first.layout.mask().any(1).repeat_interleave(height)[: sizes[1]]
    state, bias = optimizer.state[first.bias]["exp_avg"].clone(), first.bias.detach().clone()
    columns = bs.to_dense(optimizer.state[second.values]["exp_avg"], second.layout)
    nnz = second.layout.nnz

    kept = bs.sparsity.compact(first, second, activation, optimizer)
    assert torch.equal(kept, alive.nonzero().squeeze(1))
    assert first.out_features == second.in_features == len(first.bias) == alive.sum() < sizes[1]
    assert first.layout.mask().any(1).all()
    assert second.layout.nnz < nnz
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    # The parameters are the same objects, and what the optimizer keeps went with them.
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(first.bias, bias[kept])
    assert torch.equal(optimizer.state[first.bias]["exp_avg"], state[kept])
    after = bs.to_dense(optimizer.state[second.values]["exp_avg"], second.layout)
    assert torch.equal(after[:, : len(kept)], columns[:, : sizes[1]][:, kept])
    trained(model, optimizer, x)
    bs.sparsity.SET(model, optimizer).step()
    for layer in (first, second):
        dense = bs.to_dense(layer.values.detach(), layer.layout)
        assert (dense[layer.out_features :] == 0).all()
        assert (dense[:, layer.in_features :] == 0).all()
    trained(model, optimizer, x)
    assert bs.sparsity.compact(second, bs.nn.Linear(30, 2, block_size=second.layout.block_shape[0])).numel() == 30


def test_compact_keeps_constant_units_without_a_bias():
    # Units 0 and 2 have no inputs: 0 is the constant relu(1), and counts; 2 is relu(-1) = 0, and does not.
    layout = bs.BlockLayout([[0] * 4, [1] * 4, [0] * 4], block_size=1)
    first = bs.nn.Linear(4, 3, layout=layout, activation="relu")
    first.bias.data = torch.tensor([1.0, 0.5, -1.0])
    second = bs.nn.Linear(3, 5, block_size=1, bias=False)
    x = torch.randn(6, 4)
    expected = second(first(x))
    assert bs.sparsity.compact(first, second).tolist() == [0, 1]
    torch.testing.assert_close(second(first(x)), expected)


def test_a_whole_network():
    torch.manual_seed(0)
    model = SparseMLP([30, 60, 50, 4], epsilon=6).double().eval()
    for layer in model.layers:
        nn.init.normal_(layer.bias)
    bs.sparsity.ImportancePruning(model, percentile=30, begin=0, every=1, skip=model.output).step()
    x = torch.randn(5, 30).double()
    expected, connections = model(x), sum(layer.layout.nnz for layer in model.layers)
    sizes = model.compact()
    assert sizes == model.sizes == [30, 42, 35, 4]
    assert sum(layer.layout.nnz for layer in model.layers) < connections
    torch.testing.assert_close(model(x), expected)
    again = SparseMLP(sizes).double().eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))


def layer(in_features=4, out_features=4, block_size=1, rows=None):
    grid = (out_features // block_size, in_features // block_size)
    rows = range(grid[0]) if rows is None else rows
    mask = torch.zeros(grid, dtype=torch.bool)
    mask[list(rows)] = True
    return bs.nn.Linear(in_features, out_features, layout=bs.BlockLayout(mask, block_size))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (nn.Linear(4, 4), layer(), "first: expected a bs.nn.Linear, got Linear"),
        (layer(), layer(8), "second: expected a layer with 4 inputs"),
        (layer(), layer(block_size=2), "second: expected blocks of 1 columns, the rows of the first"),
        (layer(rows=[]), layer(), "compact: no connections of .* would stay"),
        (layer(rows=[]), layer(rows=[]), "compact: no connections of .* would stay"),
    ],
)
def test_compact_refuses(first, second, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        bs.sparsity.compact(first, second)
