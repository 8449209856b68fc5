"""A default device other than that of the model changes nothing; "meta" stands for a GPU."""

import pytest
import torch
from torch import nn

import blocksparse as bs

CPU = torch.device("cpu")


def mlp():
    with CPU:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def batches():
    return list(torch.randn(32, 64, device="cpu").split(8))


def train(method):
    with CPU:
        layer = bs.nn.Linear(64, 64, density=0.3, block_size=8)
    optimizer = bs.sparsity.BlockClock(torch.optim.AdamW(layer.parameters()))
    moves = method(layer, optimizer)
    for x in batches():
        layer(x).square().mean().backward()
        optimizer.step()
        moves.step()
    moves.load_state_dict(moves.state_dict())
    assert moves.calls == 4


def convolve():
    with CPU:
        layer = bs.nn.Conv2d(8, 16, 3, density=0.5, block_size=4)
        x = torch.randn(2, 8, 9, 9)
    with torch.no_grad():
        same = layer(x)
    torch.testing.assert_close(layer(x), same)


def run_recurrent():
    with CPU:
        layer = bs.nn.LSTM(32, 32, density=0.5, block_size=8)
        x = torch.randn(3, 2, 32)
    layer(x)[0].sum().backward()


def shrink():
    model = mlp()
    model[2].weight.data[:, :5] = 0
    assert bs.shrink(model, batches()[0])[0].out_features == 59


@pytest.mark.parametrize(
    "call",
    [
        lambda: train(bs.sparsity.SET),
        lambda: train(lambda *args: bs.sparsity.CHTs(*args, end=9, every=1)),
        lambda: train(lambda *args: bs.sparsity.RigL(*args, end=9, every=1)),
        convolve,
        run_recurrent,
        shrink,
        lambda: bs.sparsity.permute_features(mlp(), batches()[0], 0.3, 8),
        lambda: bs.sparsify(mlp(), 0.3, 8, data=batches(), force=True),
        lambda: bs.tradeoff(mlp(), batches(), block_size=8),
        lambda: bs.quantize(bs.sparsify(mlp(), 0.3, 8, force=True))(batches()[0]),
    ],
    ids=["set", "chts", "rigl", "conv", "lstm", "shrink", "permute_features", "sparsify", "tradeoff", "quantize"],
)
@pytest.mark.filterwarnings("ignore::blocksparse.SparsityWarning")
def test_the_default_device_does_not_matter(call):
    with torch.device("meta"):
        call()
