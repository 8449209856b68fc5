"""Gradual magnitude pruning: its schedule, its choice, and removed blocks that stay 0 with any optimizer."""

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.sparsity import GradualBlockPruning, GradualPruning
from blocksparse.sparsity.selection import dense_norms
from loops import update

pytestmark = pytest.mark.usefixtures("one_thread")


def train(model, optimizer, method, steps, each):
    for _ in range(steps):
        update(optimizer, model(torch.randn(8, model[0].in_features)).square().sum())
        each(method.step())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    ],
    ids=["momentum", "adam", "adamw"],
)
def test_removed_blocks_stay_zero(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    optimizer = make(model.parameters())
    method = GradualPruning(model, optimizer, 0.2, begin=2, end=11, every=3, block_size=8)
    kept, changed = [], []

    def look(due):
        changed.append(due)
        blocks = {name: dense_norms(method.blocks[name], dense, "max") > 0 for name, dense in method.dense.items()}
        assert all(torch.equal(blocks[name], keep) for name, keep in method.keep.items()), (
            "zeros are where they must be"
        )
        if kept:
            assert all((was | ~now).all() for was, now in zip(kept[-1], blocks.values(), strict=True)), (
                "none comes back"
            )
        kept.append(list(blocks.values()))

    train(model, optimizer, method, 14, look)
    # 36 blocks; by hand 0.2 + 0.8 (1 - (t - 2) / 9)^3 at t = 2, 5, 8, 11: 1, 0.437, 0.2296, 0.2.
    counts = [sum(int(mask.sum()) for mask in masks) for masks in kept]
    assert counts == [36] * 4 + [16] * 3 + [8] * 3 + [7] * 4
    assert [t for t, due in enumerate(changed, 1) if due] == [2, 5, 8, 11]
    assert method.density == 7 / 36
    model = method.finish()
    assert [layer.layout.nnz for layer in (model[0], model[2])] == [int(mask.sum()) for mask in kept[-1]]


@pytest.mark.parametrize(("norm", "expected"), [("l2", [1, 1, 0]), ("mean", [1, 0, 1]), ("max", [0, 1, 1])])
def test_norms(norm, expected):
    layer = nn.Linear(12, 1, bias=False)
    # l2 2.2, 2.3, 2.06; mean |w| 1.1, 0.9, 1.03; largest 1.1, 2, 1.2.
    layer.weight.data = torch.tensor([[1.1, 1.1, -1.1, 1.1, -2.0, 1.0, 0.5, 0.1, 1.2, 1.1, 1.0, -0.82]])
    method = GradualPruning(layer, density=2 / 3, end=1, block_size=(1, 4), norm=norm)
    assert method.step()
    assert method.finish().layout.mask().int().tolist() == [expected]


def test_one_shot_keeps_the_largest_norms():
    torch.manual_seed(0)
    weights, alone = (torch.randn(64, 64), 0.1 * torch.randn(32, 64)), {"keep_lines": False}
    for scope, counts in (("global", [24, 1]), ("layer", [16, 8])):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
        for layer, weight in zip(model, weights, strict=True):
            layer.weight.data = weight.clone()
        method = GradualPruning(
            model, density=0.25 if scope == "layer" else 25 / 96, end=1, block_size=8, scope=scope, **alone
        )
        method.step()
        for layer, weight, count in zip(method.finish(), weights, counts, strict=True):
            norms = weight.view(-1, 8, 8, 8).norm(dim=(1, 3))
            assert torch.equal(layer.layout.mask(), norms >= norms.flatten().sort(descending=True).values[count - 1])
            assert torch.equal(layer.values, bs.from_dense(weight, layer.layout))


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("kind", ["normal", "rank one", "zero"])
@pytest.mark.parametrize("lines", [1, 1.3, 3], ids=["just enough", "few", "more"])
def test_no_line_gets_empty_if_the_density_suffices(lines, kind, scope):
    """This holds over several changes, since a removed block does not come back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 128), nn.Linear(128, 67))
    density = lines * 16 / (16 * 9)  # of the wider weight, the grid of blocks is 16 x 12
    method = GradualPruning(model, density=density, end=10, every=2, block_size=8, scope=scope)
    for _ in range(10):
        with torch.no_grad():
            for layer in model:
                out, in_ = layer.weight.shape
                one = torch.rand(out, 1) ** 4 * torch.rand(1, in_) ** 4
                layer.weight.copy_({"normal": torch.randn(out, in_), "rank one": one, "zero": 0 * one}[kind])
        method.step()
    assert method.density == pytest.approx(density, abs=0.005)
    for layout in method.layouts().values():
        assert all(bool((degree > 0).all()) for degree in bs.topology.degrees(layout))


def test_frozen_weights_stay_dense():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].requires_grad_(False)
    with pytest.warns(bs.errors.SparsityWarning, match=r"GradualPruning leaves frozen weights dense: 0\.weight\."):
        method = GradualPruning(model, density=0.25, end=2, every=1, block_size=8)
    assert not method.step() or method.step()
    kept = method.layouts()["2.weight"]
    model[2].weight.requires_grad_(False)
    method.step()
    assert method.layouts()["2.weight"] == kept, "frozen later"
    assert method.layouts()["1.weight"].nnz < 16
    with pytest.raises(bs.BlockSparseError, match=r"frozen ones: weight"):
        GradualPruning(nn.Linear(8, 8).requires_grad_(False), density=0.25, end=2, block_size=4)


def test_inputs_as_blocks():
    torch.manual_seed(0)
    layer = nn.Linear(20, 7)
    weight = layer.weight.detach().clone()
    method = GradualPruning(layer, density=0.25, end=1, block_size=(7, 1))
    method.step()
    best = weight.norm(dim=0).argsort()[-5:].sort().values
    sparse = method.finish()
    assert sparse.layout.col_indices().tolist() == best.tolist()
    x = torch.randn(3, 20)
    torch.testing.assert_close(sparse(x), x[:, best] @ weight[:, best].T + layer.bias)


def test_blocks_regrow_where_the_dense_gradient_is_largest():
    torch.manual_seed(0)
    layer = bs.nn.Linear(64, 64, block_size=8, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)
    method = GradualBlockPruning(layer, optimizer, 0.25, end=4, every=2, regrow=0.5, keep_lines=False)
    update(optimizer, layer(torch.randn(16, 64)).square().sum(), method)
    before, x, target = layer.values.detach().clone(), torch.randn(16, 64), torch.randn(16, 64)
    gradient = (2 * (layer(x) - target)).detach().T @ x
    update(optimizer, (layer(x) - target).square().sum(), method)
    # 22 of 64 blocks are left at density 0.25 + 0.75 (1 - 2/4)^3, and 5 of them move: 0.5 / 2 (1 + cos(pi 2/4)).
    order = before.norm(dim=(1, 2)).argsort(descending=True)
    stays = torch.zeros(64, dtype=torch.bool).index_fill(0, order[:17], True)
    norms = gradient.view(8, 8, 8, 8).norm(dim=(1, 3)).flatten().masked_fill(stays, -1)
    expected = stays.clone().index_fill(0, norms.topk(5).indices, True)
    assert torch.equal(layer.layout.mask().flatten(), expected)
    old = order[:22]  # blocks that would be dropped and grown again keep their values, and no weight moves
    for values, place in zip(layer.values, expected.nonzero().flatten(), strict=True):
        assert torch.equal(values, before[place] if place in old else torch.zeros(8, 8))
    momentum = optimizer.state[layer.values]["momentum_buffer"]
    assert momentum.shape == layer.values.shape
    for _ in range(2):
        update(optimizer, layer(x).square().sum(), method)
    assert layer.layout.density == 0.25, "nothing regrows in the last call"
    assert method.fraction(4) == 0


def test_regrowth_needs_gradients():
    with pytest.raises(bs.BlockSparseError, match=r"or a convolution .*, got a recurrent .*growth=.random"):
        GradualBlockPruning(bs.nn.LSTM(16, 16, density=0.9, block_size=8), end=4, density=0.5, regrow=0.3)
    with pytest.raises(bs.BlockSparseError, match="regrow"):
        GradualBlockPruning(bs.nn.Linear(16, 16, block_size=8), end=4, density=0.5, regrow=2)
    layer = bs.nn.Linear(16, 16, block_size=8)
    method = GradualBlockPruning(layer, end=4, every=1, density=0.5, regrow=0.3)
    with pytest.raises(bs.BlockSparseError, match=r"^GradualBlockPruning.step\(\): no gradient went through"):
        method.step()


def test_a_density_above_that_of_the_layers_is_warned_of():
    layer = bs.nn.Linear(64, 64, density=0.25, block_size=8)
    with pytest.warns(bs.SparsityWarning, match="will drop no block: the layers have density 0.25, which is below 0.5"):
        GradualBlockPruning(layer, density=0.5, end=4)


def test_growth_without_regrowing_is_refused():
    with pytest.raises(bs.BlockSparseError, match="regrow: expected more than 0, so that growth='topology' has an eff"):
        GradualBlockPruning(bs.nn.Linear(64, 64, block_size=8), density=0.5, end=4, growth="topology")
