"""What bs.nn.Linear refuses, and what it says."""

import math

import numpy as np
import pytest
import torch

import blocksparse as bs

LAYOUT = bs.BlockLayout([[True, True]], block_size=16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_features": 0}, "in_features: expected an int, 1 or more, got 0"),
        ({"out_features": -3}, "out_features: expected an int, 1 or more, got -3"),
        ({"out_features": 2.0}, "out_features: expected an int, 1 or more"),
        ({"in_features": True}, "in_features: expected an int, 1 or more, got True"),
        ({"in_features": 10**30}, "grid: expected fewer than 2"),
        ({"block_size": 10**30}, "block_size: expected fewer than 2"),
        ({"activation": ["relu"]}, "activation: expected one of"),
        ({"block_size": 0}, "block_size: expected"),
        ({"block_size": (16, 16, 16)}, "block_size: expected"),
        ({"density": -0.1}, "density: expected"),
        ({"density": 1.5}, "density: expected"),
        ({"density": math.nan}, "density: expected"),
        ({"layout": LAYOUT, "density": 0.5}, "density: expected None if a layout is given"),
        ({"layout": LAYOUT.T}, r"layout: expected shape \(16, 32\)"),
        ({"layout": LAYOUT.mask()}, "layout: expected a BlockLayout, got Tensor"),
        ({"activation": "tanh"}, "activation: expected one of"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_arguments(arguments, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        bs.nn.Linear(**{"in_features": 32, "out_features": 16} | arguments)


@pytest.mark.parametrize("in_features", [48, 47])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(5, 46), r"x: expected .*\[..., \d+\].*got \[5, 46\]"),
        (torch.randn(5, 96), r"x: expected .*\[..., \d+\].*got \[5, 96\]"),
        (torch.randn(()), r"x: expected .*\[..., \d+\].*got \[\]"),
        (torch.randn(5, 48, dtype=torch.float64), "values: expected the dtype of x, torch.float64"),
        (torch.ones(5, 48, dtype=torch.int64), "values: expected the dtype of x, torch.int64"),
        (torch.randn(5, 48, device="meta"), "values: expected the device of x, meta"),
        ([[1.0] * 48], r"x: expected a .*, got list"),
    ],
)
def test_bad_inputs(in_features, x, message):
    layer = bs.nn.Linear(in_features, 64, density=0.5, block_size=16)
    if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] == 48:
        x = x[..., :in_features]
    with pytest.raises(bs.BlockSparseError, match=message):
        layer(x)


def test_sizes_may_be_numpy_ints():
    layer = bs.nn.Linear(np.int64(47), np.int32(16), block_size=np.int64(16))
    assert repr(layer) == repr(bs.nn.Linear(47, 16, block_size=16))
    assert layer(torch.randn(2, 47)).shape == (2, 16)


def test_padded_size_is_not_the_size():
    with pytest.raises(bs.BlockSparseError, match=r"x: expected a tensor \[..., 47\], got \[5, 48\]"):
        bs.nn.Linear(47, 64, density=0.5, block_size=16)(torch.randn(5, 48))
