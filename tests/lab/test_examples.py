"""Run every example of examples/."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from test_data_idx import write

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an example in this process, as from the shell, and return its output."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
        with torch.random.fork_rng([]):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_matmul_2017(run):
    assert "y [64, 256], relative error" in run("matmul_2017.py", "256")


def test_linear_layer(run):
    before, after = re.search(r"loss (\S+) -> (\S+) in 60 steps", run("linear_layer.py", "60")).groups()
    assert float(after) < float(before)


def test_training_helpers(run):
    out = run("training_helpers.py", "40")
    stayed, all_blocks = map(int, re.search(r"(\d+) of (\d+) blocks are where they were", out).groups())
    assert stayed < all_blocks
    before, after, mean = map(float, re.search(r"error (\S+) -> (\S+), of the running mean (\S+) in", out).groups())
    assert max(after, mean) < 0.9 * before


def test_fashion_mnist(run, tmp_path):
    write(tmp_path, n=96)
    out = run("fashion_mnist.py", tmp_path, "--epochs", "2", "--width", "16", "--batch", "32")
    assert re.search(r"loss \S+ -> \S+ in 6 steps.*test accuracy 0\.\d+", out)


def test_eight_bits(run, tmp_path):
    write(tmp_path, n=96)
    out = run("eight_bits.py", tmp_path, "--batch", "32", "--json", tmp_path / "result.json")
    assert re.findall(r"(\w+): test accuracy 0\.\d+, in 8 bits 0\.\d+, the same choices [01]\.\d+", out) == [
        "net",
        "LSTM",
    ]
    found = json.loads((tmp_path / "result.json").read_text())["results"]
    assert all(each["same_choices"] > 0.8 for each in found.values())


@pytest.mark.filterwarnings("ignore::blocksparse.SparsityWarning")
def test_faster_pitch(run, monkeypatch):
    """Run it on a small untrained net, because torchcrepe is not installed for tests."""
    net = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 360), nn.Sigmoid()).eval()
    crepe = ModuleType("torchcrepe")
    crepe.infer = SimpleNamespace()
    crepe.load = SimpleNamespace(model=lambda device, capacity: setattr(crepe.infer, "model", net))
    monkeypatch.setitem(sys.modules, "torchcrepe", crepe)
    out = run("faster_pitch.py", "--minutes", "0.01")
    assert re.search(r"dense: \d+\.\d% of the pitches are right\ncompressed: \d+\.\d% of", out)
    assert isinstance(crepe.infer.model, nn.Module)
    assert crepe.infer.model is not net


@pytest.mark.full
def test_prune_fashion_mnist(run, tmp_path):
    write(tmp_path, n=96)
    methods = ["dense", "oneshot", "gradual", "threshold", "group_lasso", "l0", "movement"]
    small = ["--epochs", "3", "--hidden", "64", "--batch", "32", "--density", "0.3", "--strength", "0.05"]
    out = run("prune_fashion_mnist.py", tmp_path, "--method", *methods, *small, "--json", tmp_path / "result.json")
    for method in methods:
        assert re.search(rf"{method}: test accuracy 0\.\d+, density [01]\.\d+, \S+ times as fast as dense", out)
    found = json.loads((tmp_path / "result.json").read_text())["results"]
    for method in ("oneshot", "gradual", "movement"):
        assert found[method]["density"] == pytest.approx(0.3, abs=0.02)
    out = run("prune_fashion_mnist.py", tmp_path, "--method", "l0", "--inputs", *small)
    assert re.search(r"l0: test accuracy 0\.\d+, \d+ of 784 inputs, ", out)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_hugging_face(run, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    out = run("hugging_face.py", tmp_path, 10)
    assert "the loaded model is equal: True" in out
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_lightning_training(run):
    pytest.importorskip("lightning")
    out = run("lightning_training.py", 60)
    assert "density=" in out
    error, variance = map(float, re.search(r"error (\S+) of (\S+)", out).groups())
    assert error < variance


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_deployment(run, tmp_path):
    pytest.importorskip("onnxscript")
    out = run("deployment.py", tmp_path)
    errors = [float(error) for error in re.findall(r"largest difference (\S+)", out)]
    assert len(errors) == 2
    assert max(errors) < 1e-4
    # Without `import blocksparse`, a process loads only the dense file.
    load = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])(torch.ones(8, 256))"
    loaded = [
        subprocess.run([sys.executable, "-c", load, tmp_path / f"{name}.pt2"], capture_output=True, text=True)
        for name in ("dense", "sparse")
    ]
    assert [ran.returncode == 0 for ran in loaded] == [True, False]
    assert "Could not find schema for blocksparse::linear" in loaded[1].stderr


def test_readme_quick_start():
    readme = (EXAMPLES.parent / "README.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert programs
    for program in programs:
        with torch.random.fork_rng([]):
            exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_example_is_tested(name):
    tests = Path(__file__).parent.glob("test_*.py")
    assert any(f'"{name}"' in path.read_text() for path in tests)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # raised by peft itself
def test_lora(run):
    pytest.importorskip("peft")
    out = run("lora.py")
    losses = [float(loss) for loss in re.findall(r"step \d+: (\S+)", out)]
    assert losses[-1] < 0.9 * losses[0]
    assert float(re.search(r"merged: Linear, error (\S+)", out).group(1)) < 1e-4
