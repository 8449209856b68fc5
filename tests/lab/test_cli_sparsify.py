"""`blocksparse sparsify`, as users call it."""

import json
import sys
import warnings
from functools import partial

import pytest
import safetensors.torch
import torch
from torch import nn

import blocksparse as bs
import command
from blocksparse import checkpoint
from blocksparse_lab.models.char_lm import CharLM, CharLMConfig
from blocksparse_lab.recipes import charlm
from blocksparse_lab.recipes import sparsify as recipe

pytestmark = pytest.mark.usefixtures("any_backend")

OPTIONS = ["--block-size", 16, "--density", 0.25, "--force", "--tokens", 4]


run = partial(command.run, "sparsify", columns=160)


error = partial(command.error, "sparsify")


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights.safetensors"
    tensors = {
        "encoder.0.weight": torch.randn(64, 48),
        "encoder.0.bias": torch.randn(64),
        "lstm.weight_hh_l0": torch.randn(128, 32),
        "embedding.weight": torch.randn(50, 48),
        "head.weight": torch.randn(10, 64),
        "steps": torch.tensor(3),
    }
    safetensors.torch.save_file(tensors, path)
    return path


def test_a_plain_file_of_weights(weights, tmp_path):
    out = run(weights, "--out", tmp_path / "new", "--skip", "head.weight", *OPTIONS).stdout
    assert "encoder.0.weight" in out
    before = safetensors.torch.load_file(weights)
    after = safetensors.torch.load_file(tmp_path / "new" / "model.safetensors")
    parts = ("values", "crow_indices", "col_indices")
    sparse = {f"{name}.{part}" for name in ("encoder.0", "lstm.weight_hh_l0") for part in parts}
    assert set(after) == sparse | {"encoder.0.bias", "embedding.weight", "head.weight", "steps"}
    layer = bs.nn.Linear(48, 64, block_size=16)
    layer.load_state_dict({k.removeprefix("encoder.0."): v for k, v in after.items() if k.startswith("encoder.0.")})
    dense = bs.densify(layer).weight
    kept = dense != 0
    assert torch.equal(dense[kept], before["encoder.0.weight"][kept])
    lstm = nn.Module()
    lstm.weight_hh_l0 = bs.nn.Linear(32, 128, block_size=16, bias=False)
    lstm.load_state_dict({k.removeprefix("lstm."): v for k, v in after.items() if k.startswith("lstm.")})
    told = json.loads((tmp_path / "new" / "report.json").read_text())
    rows = {row["name"]: row for row in told["rows"]}
    assert rows["head.weight"]["note"] == rows["embedding.weight"]["note"] == "skipped"
    assert rows["encoder.0.weight"]["nnz"] == layer.layout.nnz
    assert rows["encoder.0.weight"]["speed_up"] > 0


def test_warnings_speak_of_options(weights, monkeypatch):
    def sparsify(model, **options):
        lines = [
            "the density is 0.5",
            "to go lower, pass data= to calibrate, or force=True and fine-tune",
            "see help(it)",
        ]
        warnings.warn("\n  ".join(lines), bs.SparsityWarning, stacklevel=1)
        return bs.sparsify(model, **options)

    monkeypatch.setattr(recipe, "sparsify", sparsify)
    out = run(weights, "--report-only", *OPTIONS).output
    assert "the density is 0.5" in out
    assert "to go lower, pass --force and fine-tune, or run blocksparse compress" in out
    assert "see help" not in out


def test_report_only_writes_nothing(weights, tmp_path):
    assert "if dense" in run(weights, "--report-only", *OPTIONS).stdout
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]


@pytest.mark.parametrize("folder", [False, True], ids=["file", "run"])
def test_a_byte_model_can_still_be_sampled_from(folder, tmp_path):
    model = CharLM(CharLMConfig(width=64, embedding=16))
    about = {"task": {"kind": "charlm", "model": vars(model.config)}}
    (tmp_path / "run").mkdir()
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoint.save(tmp_path / "run" / "last.safetensors", tensors, about)
    source = tmp_path / "run" if folder else tmp_path / "run" / "last.safetensors"
    out = tmp_path / "new"
    run(source, "--out", out, *OPTIONS, "--scope", "layer")
    sparse = charlm.load(out)
    assert isinstance(sparse.outlet, bs.nn.Linear)
    assert sparse.recurrent.weight_hh_l0.layout.density == 0.25
    text = torch.randint(256, (7, 2))
    torch.testing.assert_close(sparse(text)[0], bs.densify(sparse)(text)[0], rtol=1e-4, atol=1e-5)
    command.run("sample", out, "--length", 5)
    assert "expected a density below that of the block-sparse weights" in error(out, "--report-only", *OPTIONS)


def test_a_folder_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "vocab.json").write_text("{}")
    run(tmp_path / "gpt2", "--out", tmp_path / "new", *OPTIONS)
    assert {path.name for path in (tmp_path / "new").iterdir()} >= {"vocab.json", "generation_config.json"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert isinstance(again.transformer.h[0].mlp.c_fc, bs.nn.Linear)
    ids = torch.randint(60, (2, 5))
    torch.testing.assert_close(again(ids).logits, bs.densify(again)(ids).logits, rtol=1e-4, atol=1e-5)


def test_mistakes_end_in_one_line(weights, tmp_path):
    out = ["--out", tmp_path / "new"]
    assert "out: expected --out FOLDER or --report-only, got neither" in error(weights)
    assert "out: expected --out FOLDER or --report-only, got both" in error(weights, *out, "--report-only")
    assert "another folder than the model's" in error(weights, "--out", tmp_path)
    assert "model: expected a safetensors file or a folder" in error(tmp_path / "no", *out)
    (tmp_path / "empty").mkdir()
    assert "the folder: expected one with last.safetensors" in error(tmp_path / "empty", *out)
    (tmp_path / "short.safetensors").write_bytes(weights.read_bytes()[:100])
    assert "expected a whole safetensors file" in error(tmp_path / "short.safetensors", *out)
    safetensors.torch.save_file({"x": torch.zeros(3)}, tmp_path / "vector.safetensors")
    assert "expected 2-D weights, got 1 tensors, none" in error(tmp_path / "vector.safetensors", *out)
    assert "density: expected a number above 0 and at most 1, got 3" in error(weights, *out, "--density", 3)
    assert "criterion: expected one of l2, magnitude, max" in error(weights, *out, "--criterion", "l1")
    assert "skip: expected modules of the model" in error(weights, *out, "--skip", "tail")
    assert "out: expected a folder to write to" in error(weights, "--out", weights / "new")


def test_a_folder_that_transformers_cannot_load(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "abacus"}')
    assert "expected a model that transformers loads" in error(tmp_path / "model", "--report-only")


def test_code_in_a_folder_is_not_run_whatever_its_config_says(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Config: pass\n")
    (tmp_path / "config.json").write_text('{"model_type": "none of theirs", "auto_map": {"AutoConfig": "evil.Config"}}')
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers asks for permission by default
    monkeypatch.setattr("sys.path", [*sys.path])
    assert "expected a model that transformers loads" in error(tmp_path, "--report-only")
    assert not (tmp_path / "run").exists()


def test_without_transformers_a_folder_says_what_is_missing(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert "a folder with config.json needs transformers" in error(tmp_path, "--report-only")


def test_ctrl_c_ends_quietly(weights, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "sparsify", interrupted)
    result = run(weights, "--out", tmp_path / "new", code=130)
    assert "Traceback" not in result.output
    assert not list((tmp_path / "new").iterdir())
