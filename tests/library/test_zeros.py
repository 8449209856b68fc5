"""`from_zeros` and `sparsify(keep="nonzero")`: stored zeros decide the layouts."""

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.conversion.speed import Speed


def test_zeros_decide_the_layout():
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight[:, 16:] = 0
    sparse = bs.from_zeros(layer, force=True)
    x = torch.randn(5, 64)
    torch.testing.assert_close(sparse(x), layer(x))
    assert sparse.layout.block_shape == (16, 16)
    assert sparse.layout.density == 0.25
    assert bs.from_zeros(layer, 8, force=True).layout.block_shape == (8, 8)
    assert bs.from_zeros(layer, (8, 4), force=True).layout.block_shape == (8, 4)
    assert isinstance(layer, nn.Linear)


def test_sparsify_keeps_nonzero_values():
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight[:, 16:] = 0
    optimizer = torch.optim.Adam(layer.parameters())
    sparse = bs.sparsify(layer, keep="nonzero", force=True)
    assert sparse.layout == bs.from_zeros(layer, force=True).layout
    assert bs.sparsify(layer, keep="nonzero", block_size=[8, 4], force=True).layout.block_shape == (8, 8)
    x = torch.randn(5, 64)
    torch.testing.assert_close(sparse(x), layer(x))
    trained = bs.sparsify(layer, keep="nonzero", force=True, inplace=True, optimizer=optimizer)
    assert optimizer.param_groups[0]["params"][0] is trained.values


def test_blocks_at_the_border_count_their_indices():
    layer = nn.Linear(33, 65)
    with torch.no_grad():
        layer.weight[:, 8:] = 0
    assert bs.sparsify(layer, keep="nonzero", force=True).layout.block_shape == (4, 4)  # not single weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "zeros"}, 'keep: expected "nonzero"'),
        ({"keep": "nonzero", "density": 0.2}, 'density= has no effect with keep="nonzero"'),
        ({"keep": "nonzero", "data": [torch.randn(2, 8)]}, "data= has no effect"),
        ({"keep": "nonzero", "block_size": []}, "block_size: expected a size or more"),
        ({"keep": "nonzero", "block_size": ()}, "block_size: expected a size or more"),
        ({"keep": "nonzero", "block_size": -4}, "block_size: expected a positive int"),
        ({"block_size": [32, 8, 1]}, "block_size: expected a positive int or a pair"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        bs.sparsify(nn.Linear(8, 8), **options)
    if message.endswith("a size or more"):
        with pytest.raises(bs.BlockSparseError, match=message):
            bs.from_zeros(nn.Linear(8, 8), options["block_size"])


def test_weights_with_nan_are_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    state = model.state_dict() | {"1.bias": torch.full((8,), torch.nan)}
    with pytest.raises(bs.BlockSparseError, match=r"1\.bias: expected values without nan"):
        bs.from_zeros(model, checkpoint=state)
    model[1].weight.data[0, 3] = torch.nan
    for call in (
        lambda: bs.from_zeros(model, force=True),
        lambda: bs.sparsify(model, keep="nonzero"),
        lambda: bs.sparsify(model, 0.5, 4, force=True),
        lambda: bs.sparsify(model, layouts={"1.weight": bs.patterns.random((8, 8), 4, density=0.5)}, force=True),
    ):
        with pytest.raises(bs.BlockSparseError, match=r"the weight 1\.weight: expected finite numbers"):
            call()


def test_a_weight_of_zeros_is_reported():
    layer = nn.Linear(64, 64)
    nn.init.zeros_(layer.weight)
    with pytest.warns(bs.SparsityWarning, match="all its values are 0"):
        assert isinstance(bs.from_zeros(layer), nn.Linear)


def test_zeros_in_single_values_are_reported():
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight[0::2, 0::2] = 0
    with pytest.warns(bs.SparsityWarning, match="25% of its values are 0, but no whole block is"):
        dense = bs.from_zeros(layer, [32, 8])
    assert isinstance(dense, nn.Linear)
    with pytest.warns(bs.SparsityWarning, match="no weight has zeros"):
        bs.from_zeros(nn.Linear(8, 8))


def test_the_report_says_why_a_weight_with_zeros_is_dense(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        for layer in model:
            layer.weight[:, 16:] = 0

    def of_weights(self, options):
        if options[0][0].name == "0.weight":
            raise bs.BlockSparseError("no backend")
        return 0.5

    monkeypatch.setattr(Speed, "of_weights", of_weights)
    with pytest.warns(bs.SparsityWarning, match="0.weight: does not run block-sparse here: no backend"):
        dense = bs.sparsify(model, keep="nonzero")
    notes = [row.note for row in bs.report(dense).rows]
    assert notes[0] == "does not run block-sparse here: no backend"
    assert "0.5 times as fast" in notes[1]
