"""`permute_features`: equal outputs, and weights that keep more of their squared norm at the same density."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blocksparse as bs
from blocksparse.sparsity import feature_order
from blocksparse.surgery.prunable import prunable


def kept(model, density, block):
    """Return the fraction of its squared norm that each weight keeps in its best blocks."""
    fractions = []
    for weight in prunable(model, block):
        squares = weight.blocks.sums(weight.tensor.detach().square()).flatten()
        count = max(1, round(density * squares.numel()))
        fractions.append(float(squares.topk(count).values.sum() / squares.sum()))
    return np.array(fractions)


def scatter_blocks(weight, block, density):
    """Make the rows of a weight large in the same columns by classes, and scatter the classes over the rows."""
    rows = torch.arange(len(weight)) % max(1, len(weight) // block)
    columns = torch.arange(weight.shape[1]) // block
    mask = torch.rand(int(rows.max()) + 1, int(columns.max()) + 1) < density
    weight.mul_(0.01 + mask[rows][:, columns])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 32)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 48, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(48 * 36, 64), nn.GELU(), nn.Linear(64, 10),
    )  # fmt: skip


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), (4, 64)),
    "convolutions": (convolutions, (2, 3, 8, 8)),
    "attention": (Attention, (2, 5, 64)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(64, 2, 128, batch_first=True), (2, 5, 64)),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_stay_equal_and_more_is_kept(name):
    build, shape = CASES[name]
    model, x = build().eval(), torch.randn(shape)
    with torch.no_grad():
        for weight in prunable(model, 16):
            scatter_blocks(weight.matrix().flatten(1), 16, 0.3)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    permuted = bs.sparsity.permute_features(model, x, 0.25, 16)
    torch.testing.assert_close(permuted(x), model(x), atol=1e-4, rtol=1e-4)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    before, after = kept(model, 0.25, 16), kept(permuted, 0.25, 16)
    assert after.sum() > 1.05 * before.sum()


def test_scattered_blocks_are_found():
    model = CASES["mlp"][0]()
    with torch.no_grad():
        scatter_blocks(model[0].weight, 16, 0.25)
    assert kept(model, 0.25, 16)[0] < 0.5
    assert kept(bs.sparsity.permute_features(model, torch.randn(4, 64), 0.25, 16), 0.25, 16)[0] > 0.9


def test_skipped_weights_and_models_without_groups_stay():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 64)), torch.randn(4, 64)
    permuted = bs.sparsity.permute_features(model, x)
    assert torch.equal(permuted[0].weight, model[0].weight)
    model = CASES["mlp"][0]()
    permuted = bs.sparsity.permute_features(model, x, skip=["0", "2"])
    assert torch.equal(permuted[0].weight, model[0].weight)


@pytest.mark.parametrize("hidden", [0.0, 1.0])
def test_compress_reorders_features_unless_it_compares_hidden_layers(hidden, monkeypatch):
    model, x = CASES["mlp"][0]().eval(), torch.randn(256, 64)
    with torch.no_grad():
        scatter_blocks(model[0].weight, 16, 0.25)
    teachers = []

    def stop(teacher, student, **options):
        teachers.append(teacher)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[bs.compress.__module__], "Distillation", stop)
    with pytest.raises(KeyboardInterrupt):
        bs.compress(model, x.split(32), 0.25, 16, steps=20, hidden=hidden)
    assert (kept(teachers[0], 0.25, 16)[0] > 0.8) == (hidden == 0)
    torch.testing.assert_close(teachers[0](x), model(x), atol=1e-4, rtol=1e-4)


def test_models_that_cannot_be_reordered_stay_as_they_are(monkeypatch):
    model, x = CASES["mlp"][0](), torch.randn(4, 64)

    def refuse(*args, **kwargs):
        raise bs.BlockSparseError("its outputs change")

    monkeypatch.setattr(feature_order, "permute_features", refuse)
    assert feature_order.reorder_features(model, x, 0.25, 16, ()) is model


def test_bad_input():
    class Escapes(nn.Module):
        """Returns features through a function that the trace does not know."""

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            hidden = self.first(x)
            return self.last(hidden), torch.from_dlpack(torch.utils.dlpack.to_dlpack(hidden.detach()))

    model, x = CASES["mlp"][0](), torch.randn(4, 64)
    with pytest.raises(bs.BlockSparseError, match=r"model: expected a torch\.nn\.Module, got str"):
        bs.sparsity.permute_features("model", x)
    with pytest.raises(bs.BlockSparseError, match="density: expected a number"):
        bs.sparsity.permute_features(model, x, 2)
    with pytest.raises(bs.BlockSparseError, match="on which 0 fails"):
        bs.sparsity.permute_features(model, torch.randn(4, 63))
    with pytest.raises(bs.BlockSparseError, match="finite outputs for the example, got inf or nan"):
        bs.sparsity.permute_features(model, x * torch.nan)
    model = Escapes()
    with torch.no_grad():
        scatter_blocks(model.first.weight, 16, 0.25)
    with pytest.raises(bs.BlockSparseError, match="model: expected a model whose features can be reordered"):
        bs.sparsity.permute_features(model, x, 0.25, 16)
