"""The table of families: some in full, how failures appear, and that a run resumes."""

import json
import math

import pytest
import torch
from torch import nn

import bench_parts
import blocksparse as bs
from blocksparse.surgery.prunable import survey
from families import Row

pytest.importorskip("transformers")
PREFIX = "base_model.model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def families():
    return bench_parts.load("families")


@pytest.mark.parametrize(
    "name",
    ["bert", "gpt2", "t5", "mamba", "mixtral"]
    + [pytest.param(name, marks=pytest.mark.full) for name in ("vit", "dinov2", "clip", "falcon", "xlnet")],
)
def test_families_pass(families, name):
    row = families.try_family(name)
    assert row.passed, row
    assert row.taken
    assert row.left


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft itself
def test_adapters_stay_dense_and_get_gradients(families):
    pytest.importorskip("peft")
    model, inputs = families.FAMILIES["peft lora llama"]()
    sparse = bs.sparsify(model, 0.5, 16, force=True)
    layer = sparse.base_model.model.layers[0].mlp.down_proj
    assert isinstance(layer.base_layer, bs.nn.Linear)
    assert isinstance(layer.lora_A["default"], nn.Linear)
    reasons = {weight.name: reason for weight, reason in survey(model)}
    assert reasons[f"{PREFIX}.lora_A.default.weight"] == "an adapter"
    sparse(**inputs).last_hidden_state.square().sum().backward()
    for name in ("lora_A", "lora_B"):
        assert getattr(layer, name)["default"].weight.grad.abs().sum() > 0


class Wrong(nn.Module):
    """A model whose densified form computes something else."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return {"y": self.layer(x) + isinstance(self.layer, nn.Linear)}


class Forgetful(nn.Module):
    """A model whose weight gets no gradient once it is block-sparse."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(32, 32), nn.Parameter(torch.ones(()))

    def forward(self, x):
        with torch.set_grad_enabled(isinstance(self.layer, nn.Linear)):
            y = self.layer(x)
        return y * self.scale


class Constant(nn.Module):
    """A model whose outputs are all 0."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return self.layer(x) * 0


@pytest.mark.parametrize("kind", [Wrong, Forgetful, Constant])
def test_wrong_models_fail(families, kind, monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "own", lambda: (kind(), {"x": torch.randn(4, 32)}))
    assert not families.try_family("own").passed


def test_missing_libraries_and_errors_are_recorded(families, monkeypatch):
    def absent():
        raise ModuleNotFoundError("No module named 'other'")

    def broken():
        raise RuntimeError("sizes differ\nsecond line")

    monkeypatch.setitem(families.FAMILIES, "absent", absent)
    monkeypatch.setitem(families.FAMILIES, "broken", broken)
    assert families.try_family("absent").refused == "No module named 'other'"
    assert families.try_family("absent").passed
    row = families.try_family("broken")
    assert row.failed == "RuntimeError: sizes differ"
    assert not row.passed


def test_run_resumes(families, monkeypatch, tmp_path):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["families.py", "--out", str(tmp_path), *arguments])
        return families.main()

    calls = []

    def found(name):
        calls.append(name)
        return Row(name, "M", 2, {"a reason": 1}, 0.0 if name == "bert" else math.nan, 2)

    monkeypatch.setattr(families, "try_family", found)
    monkeypatch.setattr(families, "FAMILIES", {"bert": None, "llama": None})
    assert run() == 1
    assert calls == ["bert", "llama"]
    assert run() == 1
    assert calls == ["bert", "llama", "llama"]
    assert run("--only", "bert") == 1
    assert calls[-1] == "bert"
    rows = json.loads((tmp_path / "families.json").read_text())["families"]
    assert [row["name"] for row in rows] == ["bert", "llama"]
    table = (tmp_path / "families.md").read_text()
    assert "| bert | M | 2 | a reason (1) | 0.0e+00 | 2 of 2 | passes |" in table
    assert "FAILS" in table
    with pytest.raises(SystemExit, match="--only: expected names out of bert, llama, got x"):
        run("--only", "x")


def test_committed_table_has_all_families_and_all_pass(families):
    rows = families.parse_rows(json.loads((families.RESULTS / "families.json").read_text()))
    assert [row.name for row in rows] == list(families.FAMILIES)
    assert all(row.passed and not row.refused for row in rows)
