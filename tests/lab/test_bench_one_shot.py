"""The one-shot benchmark: shapes of its nets, and its table."""

import pytest
import torch
from torch import nn

import one_shot
from trained_nets import Crepe, Net, Sequences, Voices, conv_net, mlp


@pytest.mark.parametrize(
    ("model", "x", "shape"),
    [
        (lambda: Sequences("lstm", 32, 1), torch.randint(256, (2, 7)), (2, 7, 256)),
        (lambda: Sequences("transformer", 32, 1), torch.randint(256, (2, 7)), (2, 7, 256)),
        (mlp, torch.randn(2, 1, 28, 28), (2, 10)),
        (conv_net, torch.randn(2, 3, 32, 32), (2, 10)),
        (lambda: Crepe(8), torch.randn(2, 1024), (2, 360)),
        (Voices, torch.randn(2, 9, 40), (2, 256)),
    ],
    ids=["lstm", "transformer", "mlp", "conv", "crepe", "voices"],
)
def test_shapes(model, x, shape):
    assert model().eval()(x).shape == shape


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_next_byte_does_not_leak(kind):
    model, x = Sequences(kind, 32, 1).eval(), torch.randint(256, (1, 9))
    other = x.clone()
    other[0, 5:] += 1
    assert torch.equal(model(x)[:, :5], model(other % 256)[:, :5])


def test_the_table_has_a_row_for_each_density_and_marks_warnings():
    def accuracy(model):
        return 90.0 if all(type(layer) is nn.Linear for layer in model) else 12.5

    torch.manual_seed(0)
    net = Net("two", nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), accuracy, torch.randn(2, 64))
    with torch.no_grad():
        for layer in net.model:  # unequal blocks, as after training, so that no layer can lose half of them
            layer.weight[:32] *= 3
    found = one_shot.outcomes(net, (0.5,))
    by_way = {each.way: each for each in found}
    assert (by_way["default"].sparse, by_way["default"].accuracy, by_way["default"].told) == (0, 90.0, True)
    assert (by_way["default, forced"].sparse, by_way["default, forced"].accuracy) == (2, 12.5)
    lines = one_shot.table(found)
    assert len(lines) == 3
    assert lines[2].startswith("| two | 90.0 | 0.5 | 90.0 (0, warned) | 12.5 (2) | 12.5 (2) |")


def test_new_results_replace_old_ones(tmp_path):
    before = [
        one_shot.Outcome("a", "default", 0.5, 90.0, 1.0, 1, 2, False),
        one_shot.Outcome("b", "default", 0.5, 80.0, 2.0, 1, 2, False),
    ]
    now = [
        one_shot.Outcome("a", "data, forced", 0.5, 90.0, 4.0, 2, 2, False),
        one_shot.Outcome("a", "default", 0.5, 90.0, 3.0, 1, 2, False),
    ]
    one_shot.write(tmp_path / "table.json", one_shot.merged(before, now))
    found = one_shot.read(tmp_path / "table.json")
    assert [(each.net, each.way, each.accuracy) for each in found] == [
        ("a", "default", 3.0),
        ("a", "data, forced", 4.0),
        ("b", "default", 2.0),
    ]
    assert one_shot.read(tmp_path / "none.json") == []
