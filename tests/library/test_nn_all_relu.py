"""All-ReLU: the published slopes."""

import pytest
import torch

import blocksparse as bs


@pytest.mark.parametrize(("layer", "slope"), [(1, 0.6), (2, -0.6), (3, 0.6), (4, -0.6), (7, 0.6)])
def test_slopes_alternate(layer, slope):
    x = torch.randn(1000, dtype=torch.float64, requires_grad=True)
    y = bs.nn.AllReLU(0.6, layer)(x)
    y.sum().backward()
    assert torch.equal(y, torch.where(x > 0, x, slope * x))
    assert torch.equal(x.grad, torch.full_like(x, slope).masked_fill(x > 0, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-0.1, 2), "alpha: expected a finite number, 0 or more, got -0.1"),
        ((float("nan"), 2), "alpha: expected"),
        (("0.5", 2), "alpha: expected"),
        ((0.5, 0), "layer: expected an int, 1 or more, got 0"),
        ((0.5, 1.0), "layer: expected"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        bs.nn.AllReLU(*arguments)
