"""Modules answer to the names that torch.nn gives to what they have."""

import pytest
import torch

import blocksparse as bs

MODULES = {
    "Linear": (lambda: bs.nn.Linear(40, 24, density=0.5, block_size=8), (3, 40)),
    "Linear, padded": (lambda: bs.nn.Linear(37, 21, density=0.5, block_size=8), (3, 37)),
    "Conv1d": (lambda: bs.nn.Conv1d(16, 24, 3, density=0.5, block_size=8), (2, 16, 9)),
    "Conv2d": (lambda: bs.nn.Conv2d(16, 24, 3, density=0.5, block_size=8), (2, 16, 9, 9)),
    "Conv3d": (lambda: bs.nn.Conv3d(13, 21, 2, density=0.5, block_size=8), (2, 13, 4, 4, 4)),
    "ConvTranspose1d": (lambda: bs.nn.ConvTranspose1d(16, 24, 3, density=0.5, block_size=8), (2, 16, 9)),
    "ConvTranspose2d": (lambda: bs.nn.ConvTranspose2d(13, 21, 3, density=0.5, block_size=8), (2, 13, 5, 5)),
    "ConvTranspose3d": (lambda: bs.nn.ConvTranspose3d(16, 24, 2, density=0.5, block_size=8), (2, 16, 3, 3, 3)),
    "LSTM": (lambda: bs.nn.LSTM(16, 24, density=0.5, block_size=8), (5, 2, 16)),
    "MultiplicativeLSTM": (lambda: bs.nn.MultiplicativeLSTM(16, 24, density=0.5, block_size=8), (5, 2, 16)),
    "SmallWorldLSTM": (lambda: bs.nn.SmallWorldLSTM(16, 24, density=0.5, block_size=8), (5, 2, 16)),
    "AllReLU": (lambda: bs.nn.AllReLU(0.5, layer=1), (3, 4)),
    "Dropout": (lambda: bs.nn.Dropout(0.5).eval(), (3, 4)),
    "Causal2d": (lambda: bs.nn.Causal2d(bs.nn.Conv2d(8, 8, (2, 3), block_size=8), "down"), (1, 8, 4, 4)),
    "Shift2d": (lambda: bs.nn.Shift2d("down"), (1, 2, 4, 4)),
    "EdgeBias": (lambda: bs.nn.EdgeBias(4, (6, 6), 3), (2, 4, 4, 4)),
    "AdaptivePolyphaseDownsample": (bs.nn.AdaptivePolyphaseDownsample, (1, 2, 4, 4)),
    "DiffusionConv": (lambda: bs.nn.DiffusionConv(4, 2), (5, 3, 4)),
    "WeightNorm": (lambda: bs.nn.WeightNorm(bs.nn.Linear(16, 8, block_size=8)), (3, 16)),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_argument_of_a_call_is_input(name):
    make, shape = MODULES[name]
    layer, x = make(), torch.randn(shape)
    torch.testing.assert_close(layer(input=x), layer(x))
