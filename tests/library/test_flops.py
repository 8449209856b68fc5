"""FlopCounterMode counts two operations for each stored number and place, forward and backward."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import blocksparse as bs

LAYERS = {
    "linear": (lambda: bs.nn.Linear(64, 32, block_size=8), (5, 3, 64)),
    "conv": (lambda: bs.nn.Conv2d(16, 24, 3, stride=2, padding=1, block_size=8), (2, 16, 9, 9)),
    "conv, 1x1": (lambda: bs.nn.Conv2d(16, 24, 1, block_size=8), (2, 16, 9, 9)),
    "conv_transpose": (lambda: bs.nn.ConvTranspose2d(16, 24, 3, stride=2, block_size=8), (2, 16, 9, 9)),
}


def counted(layer, x):
    x = x.clone().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        y = layer(x)
        forward = counter.get_total_flops()
        (y if isinstance(y, torch.Tensor) else y[0]).sum().backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("name", LAYERS)
def test_all_blocks_count_as_the_dense_layer(name):
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    assert counted(layer, x) == counted(bs.densify(layer), x)


def test_half_of_the_blocks_count_half():
    layer = bs.nn.Linear(64, 64, density=0.5, block_size=8)
    forward, total = counted(layer, torch.randn(7, 64))
    assert forward == 2 * 7 * layer.values.numel() == 7 * 64 * 64
    assert total == 3 * forward


def test_recurrences_count():
    lstm = bs.nn.LSTM(16, 24, density=0.5, block_size=8)
    numbers = sum(weight.values.numel() for weight in lstm.children())
    forward, total = counted(lstm, torch.randn(5, 2, 16))
    assert forward == 2 * 5 * 2 * numbers
    assert total >= 3 * forward - 2 * 2 * 2 * numbers  # the first state needs no gradient


@pytest.mark.parametrize("density", [None, 0.5])
def test_experts_count_the_tokens_that_they_have(density):
    experts = bs.nn.Experts(6, 32, 16, density=density, block_size=8)
    x, index = torch.randn(9, 32, requires_grad=True), torch.arange(18).view(9, 2) % 6
    with FlopCounterMode(display=False) as counter:
        y = experts(x, index, torch.rand(9, 2))
        forward = counter.get_total_flops()
        y.sum().backward()
    assert forward == 2 * 18 * sum(weight.numel() for weight in experts.parameters()) // 6
    assert counter.get_total_flops() == 3 * forward


@pytest.mark.full
@pytest.mark.parametrize("first", ["blocksparse", "torch.utils.flop_counter"])
def test_whichever_is_imported_first(first):
    program = f"""
import torch, {first}, blocksparse as bs, sys
assert {first != "blocksparse"} == ("torch.utils.flop_counter" in sys.modules)
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    bs.nn.Linear(8, 8, block_size=4)(torch.randn(3, 8))
print(counter.get_total_flops())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == str(2 * 3 * 64), done.stderr
