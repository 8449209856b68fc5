"""Conversion for PyTorch's 2:4 kernels: refusals, and a faked conversion."""

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.sparsity.nm import semi_structured


def pruned(out=32, in_=64, dtype=torch.float16):
    layer = nn.Linear(in_, out).to(dtype)
    layer.weight.data *= bs.sparsity.nm_mask(layer.weight)
    return layer


@pytest.fixture
def faked(monkeypatch):
    """A fake GPU, on which compressing doubles the weights."""
    monkeypatch.setattr(semi_structured, "semi_structured_refusal", semi_structured.refusal_of_values)
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda weight: weight * 2)


def test_refused_on_a_cpu():
    layer = pruned()
    weight = layer.weight
    with pytest.raises(bs.BlockSparseError, match="converted, got weight: on cpu; only CUDA has kernels for it"):
        bs.sparsity.to_semi_structured(layer)
    assert layer.weight is weight


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.zeros(32, 64), "torch.float32 is neither float16 nor bfloat16"),
        (torch.zeros(16, 64).half(), r"shape \[16, 64\] is no multiple of \[32, 64\]"),
        (torch.zeros(32, 96).half(), r"shape \[32, 96\] is no multiple of \[32, 64\]"),
        (torch.zeros(32, 64, 3, 3).half(), r"shape \[32, 64, 3, 3\] is no multiple"),
        (torch.eye(64)[:32].half() + torch.eye(64)[1:33].half() + torch.eye(64)[2:34].half(), "more than 2 of 4"),
    ],
    ids=str,
)
def test_refused_weights(faked, weight, reason):
    assert semi_structured.semi_structured_refusal(torch.zeros(64, 128).bfloat16()) is None
    layer = nn.Linear(1, 1)
    layer.weight.data = weight
    with pytest.raises(bs.BlockSparseError, match=f"model: expected a linear layer .*, got weight: {reason}"):
        bs.sparsity.to_semi_structured(layer)


def test_converted_and_other_weights(faked):
    net = nn.Sequential(nn.Conv1d(64, 32, 1).half(), pruned(), nn.Linear(32, 32).half(), pruned(64), pruned())
    before = net[1].weight.detach().clone()
    left = bs.sparsity.to_semi_structured(net, skip="4")
    assert list(left) == ["0.weight", "2.weight", "4.weight"]
    assert left["0.weight"] == "a Conv1d is no linear layer"
    assert left["4.weight"] == "skipped"
    assert torch.equal(net[1].weight, before * 2)
    assert not net[1].weight.requires_grad
    assert net[4].weight.requires_grad


def test_all_or_nothing(faked, monkeypatch):
    calls = []

    def compress(weight):
        calls.append(weight)
        if len(calls) == 2:
            raise RuntimeError("no kernel")
        return weight * 2

    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", compress)
    net = nn.Sequential(pruned(), pruned())
    weights = [layer.weight for layer in net]
    with pytest.raises(bs.BlockSparseError, match="model: expected a device with PyTorch's 2:4 kernels, got no kernel"):
        bs.sparsity.to_semi_structured(net)
    assert all(layer.weight is weight for layer, weight in zip(net, weights, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="2:4 kernels need a GPU")
@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_on_a_gpu():
    net = nn.Sequential(pruned(128, 256), nn.ReLU(), pruned(64, 128)).cuda()
    x = torch.randn(64, 256, dtype=torch.float16, device="cuda")
    with torch.no_grad():
        expected = net(x)
        bs.sparsity.to_semi_structured(net)
        torch.testing.assert_close(net(x), expected, rtol=1e-2, atol=1e-2)
