"""SET: the published drop rule, grown blocks, resuming."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.sparsity.lines import lines_of
from blocksparse.sparsity.selection import hash_positions
from blocksparse.sparsity.sparse_training.set import nearest_zero
from blocksparse.surgery.weight_handle import handle_of
from blocksparse_lab.models.mlp import SparseMLP

pytestmark = pytest.mark.usefixtures("one_thread")


def layer_with(values):
    """One row of single connections with these values, and the same number of free places."""
    layer = bs.nn.Linear(2 * len(values), 1, layout=bs.BlockLayout([[1] * len(values) + [0] * len(values)], 1))
    layer.values.data = torch.tensor(values).reshape(-1, 1, 1)
    return layer


@pytest.mark.parametrize("n", [12, 14, 30])
@pytest.mark.parametrize("grid", [(12, 12), (12, 9), (5, 12)], ids=str)
def test_no_line_gets_empty_if_the_density_suffices(grid, n):
    layer = bs.nn.Linear(2 * grid[1], 2 * grid[0], density=n / (grid[0] * grid[1]), block_size=2)
    method, before = bs.sparsity.SET(layer, zeta=0.7), layer.layout
    for _ in range(10):
        layer.values.data[layer.layout.row_of_block < 2] *= 1e-3  # these rows would go first
        assert method.step()
        assert layer.layout.nnz == n
        assert all(bool((degree > 0).all()) for degree in bs.topology.degrees(layer.layout))
    assert layer.layout != before


def test_new_blocks_fill_empty_lines_except_padding():
    mask = torch.zeros(24, 6, dtype=torch.bool)
    mask[:8, :4] = True
    layer = bs.nn.LSTM(70, 33, layouts={"weight_ih_l0": bs.BlockLayout(mask, (8, 12))}).weight_ih_l0
    rows, cols = lines_of(handle_of(layer))
    assert (rows.size, cols.size) == (20, 6)
    method = bs.sparsity.SET(layer, zeta=0.9)
    for _ in range(3):
        method.step()
    used = bs.topology.degrees(layer.layout)
    assert (used[0][rows] > 0).all()
    assert (used[1][cols] > 0).all()


def test_the_published_rule():
    # Ten positives and five negatives, zeta 0.4: the four smallest positives and the two negatives nearest zero.
    positives = [0.9, 0.1, 0.3, 0.8, 0.2, 0.7, 0.05, 0.6, 0.5, 0.4]
    negatives = [-0.02, -0.5, -0.01, -0.3, -0.4]
    layer = layer_with(positives + negatives)
    layer.weight_before = layer.values.detach().flatten()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9)
    layer(torch.randn(3, 30)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[layer.values]["momentum_buffer"].flatten().clone()
    sources = []
    method = bs.sparsity.SET(
        layer, optimizer, 0.4, init="zeros", on_layout_change=lambda _, source: sources.append(source)
    )
    assert method.step()
    assert layer.layout.nnz == 15
    source = sources[0]
    gone = set(range(15)) - set(source.tolist())
    assert {(positives + negatives)[i] for i in gone} == {0.1, 0.2, 0.05, 0.3, -0.01, -0.02}
    survivors = source >= 0
    assert torch.equal(layer.values.flatten()[survivors], layer.weight_before[source[survivors]])
    assert (layer.values.flatten()[~survivors] == 0).all()
    after = optimizer.state[layer.values]["momentum_buffer"].flatten()
    assert torch.equal(after[survivors], momentum[source[survivors]])
    assert (after[~survivors] == 0).all()


def test_zeros_are_dropped_and_none_at_zeta_0():
    layer = layer_with([0.5, 0.0, -0.5, 0.0])
    assert nearest_zero(handle_of(layer), 0.1, "l2", hash_positions).tolist() == [False, True, False, True]
    assert not nearest_zero(handle_of(layer), 0, "l2", hash_positions).any()
    assert nearest_zero(handle_of(layer), 1, "l2", hash_positions).all()


@pytest.mark.parametrize("norm", ["l2", "mean"])
def test_blocks_go_by_magnitude(norm):
    layer = bs.nn.Linear(64, 64, density=0.5, block_size=8)
    blocks = layer.values.detach().flatten(1)
    size = blocks.norm(dim=1) if norm == "l2" else blocks.abs().mean(1)
    expected = torch.zeros(32, dtype=torch.bool)
    expected[size.argsort()[:10]] = True
    assert nearest_zero(handle_of(layer), 0.3, norm, hash_positions).tolist() == expected.tolist()


CASES = {
    "linear-1": lambda: (bs.nn.Linear(40, 50, density=0.1, block_size=1), torch.randn(4, 40)),
    "linear-8": lambda: (bs.nn.Linear(61, 37, density=0.3, block_size=8), torch.randn(4, 61)),
    "linear-32": lambda: (bs.nn.Linear(128, 190, density=0.5, block_size=32), torch.randn(4, 128)),
    "conv": lambda: (bs.nn.Conv2d(61, 50, 3, density=0.2, block_size=8), torch.randn(2, 61, 4, 4)),
    "weight-norm": lambda: (bs.nn.WeightNorm(bs.nn.Linear(40, 50, density=0.2, block_size=2)), torch.randn(4, 40)),
    "mlstm": lambda: (bs.nn.MultiplicativeLSTM(12, 64, density=0.3, block_size=4), torch.randn(3, 2, 12)),
    "small-world": lambda: (bs.nn.SmallWorldLSTM(12, 64, density=0.3, block_size=4), torch.randn(3, 2, 12)),
    "lstm": lambda: (bs.nn.LSTM(12, 29, density=0.3, block_size=(8, 4)), torch.randn(3, 2, 12)),
}


@pytest.mark.parametrize("init", ["he", "xavier", "zeros", lambda m, shape, g: torch.randn(shape, generator=g)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nnz_and_padding_are_kept(case, init):
    torch.manual_seed(0)
    model, x = case()
    optimizer = torch.optim.Adam(model.parameters())
    method = bs.sparsity.SET(model, optimizer, zeta=0.5, init=init)
    before = {name: module.layout for name, module in method.modules.items()}
    model.eval()
    for _ in range(3):
        y = model(x)
        (y[0] if isinstance(y, tuple) else y).square().sum().backward()
        optimizer.step()
        assert method.step()
    for name, module in method.modules.items():
        assert module.layout.nnz == before[name].nnz
        assert module.layout != before[name]
        assert torch.equal(module.col_indices, module.layout.col_indices()), "what a checkpoint has"
        dense = bs.to_dense(module.values.detach(), module.layout)
        if module.used is not None:
            out, in_ = module.used
            assert (dense[~out] == 0).all()
            assert (dense[:, ~in_] == 0).all()
            # Nothing grows where all is padding.
            height, width = module.layout.block_shape
            useful = out.view(-1, height).any(1)[:, None] & in_.view(-1, width).any(1)
            assert not (module.layout.mask() & ~useful & ~before[name].mask()).any()


@pytest.mark.parametrize(("init", "bound"), [("he", math.sqrt(6 / 400)), ("xavier", math.sqrt(6 / 1000))])
def test_new_weights_are_uniform(init, bound):
    layer = bs.nn.Linear(400, 600, density=0.1, block_size=1)
    sources = []
    method = bs.sparsity.SET(layer, zeta=1.0, init=init, on_layout_change=lambda _, source: sources.append(source))
    method.step()
    new = layer.values.detach().flatten()
    assert (sources[0] == -1).all()
    assert new.abs().max() <= bound
    # 24,000 of them: five standard errors of the mean square of uniform numbers.
    assert abs(new.square().mean() - bound**2 / 3) < 5 * bound**2 * math.sqrt((1 / 5 - 1 / 9) / 24_000)


def test_every_end_and_full_layers():
    full = bs.nn.Linear(8, 8, density=1.0, block_size=4)
    model = nn.Sequential(bs.nn.Linear(32, 32, density=0.2, block_size=4), full)
    values = full.values.detach().clone()
    method = bs.sparsity.SET(model, every=2, end=6)
    assert [method.step() for _ in range(8)] == [False, True, False, True, False, False, False, False]
    assert torch.equal(full.values, values)


def test_skip():
    model = SparseMLP([30, 40, 40, 10], epsilon=4)
    layouts = [layer.layout for layer in model.layers]
    for skip in (model.output, "layers.2", [model.layers[2]]):
        assert list(bs.sparsity.SET(model, skip=skip).modules) == ["layers.0", "layers.1"]
    bs.sparsity.SET(list(model.layers[:2])).step()
    assert [layer.layout == before for layer, before in zip(model.layers, layouts, strict=True)] == [False, False, True]


def test_shared_parameters_are_refused():
    one, other = (bs.nn.Linear(8, 8, layout=bs.patterns.banded((8, 8), 1)) for _ in range(2))
    other.values = one.values
    with pytest.raises(bs.BlockSparseError, match="expected a parameter of one module"):
        bs.sparsity.SET([one, other])


@pytest.mark.parametrize("kind", [torch.complex64, torch.int64, "meta", "nan"])
def test_values_that_init_returns_are_checked(kind):
    def init(module, shape, generator):
        if kind == "nan":
            return torch.full(shape, math.nan)
        return torch.ones(shape, device="meta") if kind == "meta" else torch.ones(shape, dtype=kind)

    method = bs.sparsity.SET(bs.nn.Linear(8, 8, density=0.5, block_size=1), init=init)
    with pytest.raises(
        bs.BlockSparseError, match="init: expected a function that returns finite floating-point values"
    ):
        method.step()


def test_what_init_returns_is_checked():
    method = bs.sparsity.SET(bs.nn.Linear(8, 8, density=0.5, block_size=1), init=lambda *_: torch.ones(1))
    with pytest.raises(bs.BlockSparseError, match="init: expected a function that returns a tensor"):
        method.step()


def test_the_seed_decides():
    layouts = []
    for seed in (3, 3, 4):
        torch.manual_seed(0)
        layer = bs.nn.Linear(64, 64, density=0.3, block_size=1)
        bs.sparsity.SET(layer, zeta=0.1, seed=seed).step()
        layouts.append(layer.layout)
    assert layouts[0] == layouts[1] != layouts[2]


def test_nothing_dense_is_made():
    # The dense mask alone would have 6 * 10^10 entries.
    layout = bs.patterns.random((250_000, 250_000), 1, density=8e-6, seed=0)
    layer = bs.nn.Linear(250_000, 250_000, layout=layout)
    assert bs.sparsity.SET(layer).step()
    assert layer.layout.nnz == layout.nnz == 500_000
    assert all(bool((degree > 0).all()) for degree in bs.topology.degrees(layer.layout))
    same = np.isin(layout.keys_of_blocks(), layer.layout.keys_of_blocks()).sum()
    assert same == pytest.approx(0.7 * 500_000, abs=50)


@pytest.mark.parametrize("name", ["SET", "RigL", "SMET", "CHTs"])
def test_the_fraction_rises_over_the_changes_of_a_ramp(name):
    layer = bs.nn.Linear(64, 64, density=0.3, block_size=8)
    options = {"optimizer": None, "every": 5, "end": 100}
    published, ramped = (getattr(bs.sparsity, name)(layer, ramp=ramp, **options) for ramp in (1, 4))
    calls = [5, 10, 15, 20, 25, 95]
    factors = [ramped.fraction(call) / published.fraction(call) for call in calls]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
