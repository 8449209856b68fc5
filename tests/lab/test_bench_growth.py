"""The benchmark of the loss around changes: what it averages, and that each method trains."""

import pytest
import torch

import growth


def test_curves_are_levelled_before_they_are_averaged():
    flat = [[1.0] * growth.BEFORE + [1.5] + [1.25] * growth.AFTER, [2.0] * growth.BEFORE + [2.5] + [2.0] * growth.AFTER]
    own = growth.figures([{"curves": flat, "held_out": 3.0}])
    assert own["at once"] == 0.5
    assert own["jump"] == 0.125
    assert own["noise"] == 0
    assert own["changes"] == 2
    rows = growth.rows_of({"fixed blocks": own, "clock per block": own})
    assert [row["met"] for row in rows] == [None, False, None, False, None, None]
    assert rows[0]["measured"] == "+0.500"


@pytest.mark.parametrize("name", growth.METHODS)
def test_each_method_trains_over_a_change(name, monkeypatch):
    monkeypatch.setattr(growth, "BEFORE", 2)
    monkeypatch.setattr(growth, "AFTER", 2)
    monkeypatch.setattr(growth, "CONFIG", growth.GPTConfig(width=64, layers=1, heads=2, context=8, density=0.5))
    monkeypatch.setattr(growth, "BATCH", 2)
    monkeypatch.setattr(growth, "EVALUATED", 2)
    text = torch.randint(256, (101_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    result = growth.run(name, text, steps=13, every=5, seed=0)
    assert [len(curve) for curve in result["curves"]] == [5, 5]
    assert 0 < result["held_out"] < 20
