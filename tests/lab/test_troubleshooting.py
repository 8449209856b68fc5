"""Check the page docs/help/troubleshooting.md: the library gives each message that is quoted in a heading."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import blocksparse as bs

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/help/troubleshooting.md").read_text()


def dense():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def layer():
    return bs.nn.Linear(64, 64, density=0.5, block_size=16)


def sparse():
    return bs.sparsify(dense(), 0.5, 16, force=True)


def pruning(model, optimizer=None):
    return bs.sparsity.GradualPruning(model, optimizer, density=0.5, block_size=16, end=100)


def step(method, times, finish=False):
    for _ in range(times):
        method.step()
    return method.finish(early=not finish)


def narrow():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))


def rigl():
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = bs.sparsity.RigL(model, optimizer, end=100, every=1)
    for _ in range(2):
        method.step()


def shared():
    first = layer()
    second = bs.nn.Linear(64, 64, layout=first.layout)
    second.values = first.values
    bs.sparsity.SET(nn.Sequential(first, second))


def averaged():
    net = layer()
    mean = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
    mean.update_parameters(net)
    bs.sparsity.SET(net, torch.optim.SGD(net.parameters(), lr=0.1)).step()
    mean.update_parameters(net)
    mean(torch.randn(4, 64))


def lbfgs():
    model = layer()
    bs.sparsity.SET(model, torch.optim.LBFGS(model.parameters())).step()


def finished_twice():
    method = pruning(dense())
    step(method, 20)
    method.step()


def frozen():
    model = dense()
    model[0].requires_grad_(False)
    pruning(model)


def save_onnx():
    pytest.importorskip("onnxscript")
    bs.export_onnx(sparse(), torch.randn(4, 64), "model.onnx")


def save_onnx_by_torch():
    pytest.importorskip("onnxscript")
    torch.onnx.export(sparse().eval(), (torch.randn(4, 64),), "model.onnx", dynamo=True)


def hessian():
    model = layer()
    torch.func.hessian(lambda x: model(x).square().sum())(torch.randn(64))


def float_labels():
    data = [(torch.randn(8, 64), torch.randn(8)) for _ in range(4)]
    bs.compress(dense().eval(), data, 0.5, 16, steps=1)


MISTAKES = {
    "density: expected 0, or enough": lambda: bs.nn.Linear(20, 30, density=0.25),
    "sparsify: the blocks of some": lambda: bs.sparsify(narrow(), {"0.weight": 0.5, "1.weight": 0.5}, force=True),
    "sparsify: some layers stay": lambda: bs.sparsify(
        nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3)), 0.5, force=True
    ),
    "x: expected [..., 64]": lambda: layer()(torch.randn(4, 63)),
    "layout: expected shape": lambda: bs.nn.Linear(64, 32, layout=layer().layout),
    "mask: expected bool": lambda: bs.BlockLayout(torch.randn(4, 4)),
    "values: expected the dtype": lambda: layer()(torch.randn(4, 64).double()),
    "values: expected the device": lambda: layer()(torch.randn(4, 64, device="meta")),
    "expected a dtype and": lambda: layer().to(torch.complex64)(torch.randn(4, 64, dtype=torch.complex64)),
    "model: expected dense weights": lambda: bs.sparsify(nn.LayerNorm(4), 0.1),
    "compress: the labels": float_labels,
    "density: expected a density": lambda: bs.sparsify(sparse(), 0.9, 16, force=True),
    "optimizer= requires": lambda: bs.sparsify(
        model := dense(), 0.5, 16, optimizer=torch.optim.SGD(model.parameters())
    ),
    "batches: expected the model": lambda: bs.sparsify(dense(), 0.5, 16, data=[torch.randn(4, 5)]),
    "data: expected batches of the model's arguments": lambda: bs.compress(dense(), [torch.randn(4, 5)] * 2, steps=1),
    "data: expected an iterable of batches": lambda: bs.sparsify(dense(), 0.5, 16, data=torch.randn(4, 64)),
    "data: expected one": lambda: bs.sparsify(dense(), 0.5, 16, data=[]),
    "model: expected a block-sparse": lambda: bs.quantize(dense()),
    "model: layers in 8 bits": lambda: bs.report(bs.quantize(sparse())),
    "finish() called after": lambda: step(pruning(dense()), 20, finish=True),
    "step() after finish()": finished_twice,
    "modules: expected one": lambda: bs.sparsity.SET(dense()),
    "leaves frozen weights": frozen,
    "LBFGS keeps": lbfgs,
    "no gradient went": rigl,
    "optimizer: expected an": lambda: pruning(dense(), torch.optim.Adam(dense().parameters())),
    "crow_indices: expected": averaged,
    "weight: expected no write": lambda: layer().weight.mul_(2),
    "values: expected a parameter": shared,
    "expected reverse-mode": hessian,
    "expected tensors without": lambda: bs.quantize(sparse())(torch.randn(4, 64, requires_grad=True)),
    "Unexpected key(s)": lambda: dense().load_state_dict(sparse().state_dict()),
    "layout: expected crow": lambda: layer().load_state_dict({"values": layer().values, "bias": torch.zeros(64)}),
    "stores dense weights": save_onnx,
    "torch.onnx.export": save_onnx_by_torch,
}
# Messages that depend on timings, on the machine or on the build; other tests check them.
TESTED_ELSEWHERE = {
    "sparsify: nothing became block-sparse": "test_sparsify.py",
    "times as fast block-sparse (density": "test_sparsify.py",
    "backend: expected a usable one": "test_registry.py",
    "the compiled core blocksparse._core does not load": "test_registry.py",
}
# The section on the installation quotes pip, CMake and Python.
QUOTED = re.findall(r"^### `(.*)`$", PAGE.partition("\n## It is not faster")[2], re.MULTILINE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("message", [message for message in QUOTED if message not in TESTED_ELSEWHERE])
def test_a_mistake_gives_the_message(message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (make_mistake,) = [call for start, call in MISTAKES.items() if message.startswith(start)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make_mistake()
        except (RuntimeError, ValueError) as error:
            caught.append(error)
    texts = [str(getattr(one, "message", one)) for one in caught]
    assert any(message in text for text in texts), texts


@pytest.mark.parametrize(("message", "file"), TESTED_ELSEWHERE.items())
def test_the_page_has_messages_that_other_files_test(message, file):
    assert message in QUOTED
    assert (TESTS / "library" / file).exists()


def test_the_build_gives_the_message_that_the_page_quotes():
    message = "found no C++17 compiler"
    assert f"### `{message}`" in PAGE
    assert message in (TESTS.parent / "CMakeLists.txt").read_text()
