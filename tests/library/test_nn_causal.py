"""Causal convolutions whose module is dilated, or replaced by a function of the library."""

import pytest
import torch
from torch import nn

import blocksparse as bs


@pytest.mark.parametrize("kind", [nn.Conv2d, bs.nn.Conv2d])
def test_dilated_convolutions_see_no_later_pixel(kind):
    for shift, kernel, seen in (
        ("down_right", (2, 2), [[2, 1], [2, 4], [4, 1], [4, 4]]),
        ("down", (2, 3), [[2, 1], [2, 4], [2, 7], [4, 1], [4, 4], [4, 7]]),
    ):
        layer = bs.nn.Causal2d(kind(8, 8, kernel, dilation=(2, 3)), shift)
        x = torch.randn(1, 8, 6, 8, requires_grad=True)
        y = layer(x)
        assert y.shape == x.shape
        y[0, :, 4, 4].sum().backward()
        assert x.grad[0].abs().amax(0).gt(0).nonzero().tolist() == seen
        with torch.no_grad(), bs.nn.bands(layer) as below:
            bands = []
            for band in x.split(3, 2):
                bands.append(layer(band))
                below.next()
        torch.testing.assert_close(torch.cat(bands, 2), y)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("replace", [bs.densify, bs.quantize])
def test_the_module_can_be_replaced(normed, replace):
    conv = bs.nn.Conv2d(8, 8, (2, 3), block_size=8)
    layer = bs.nn.Causal2d(bs.nn.WeightNorm(conv) if normed else conv, "down")
    if normed and replace is bs.quantize:
        layer = bs.nn.fold(layer)
    x = torch.randn(2, 8, 5, 5)
    expected = layer(x)
    with torch.no_grad():
        assert (replace(layer)(x) - expected).abs().max() < 0.02


def test_other_modules_are_refused():
    for module in (nn.ConvTranspose2d(8, 8, 2), bs.nn.ConvTranspose2d(8, 8, 2), nn.MaxPool2d(2), bs.nn.Linear(8, 8)):
        with pytest.raises(bs.BlockSparseError, match="module: expected a Conv2d without padding"):
            bs.nn.Causal2d(module, "down_right")
