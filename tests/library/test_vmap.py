"""torch.vmap over the products: as a loop over the batch gives it, gradients too."""

import pytest
import torch

import blocksparse as bs

LAYOUT = bs.patterns.random((12, 8), block_size=4, density=0.5, seed=0)


def linear(x, values, bias):
    return bs.linear(x, values, LAYOUT, bias, "relu")


def conv1d(x, values, bias):
    return bs.conv1d(x, values, LAYOUT, bias, padding=1)


CASES = {"linear": (linear, (3, 8), ()), "conv1d": (conv1d, (2, 8, 5), (3,))}


@pytest.mark.parametrize("in_dims", [(0, None, None), (1, 0, None), (None, 1, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_vmap(name, in_dims):
    function, shape, kernel = CASES[name]
    torch.manual_seed(0)
    shapes = (shape, (*LAYOUT.values_shape, *kernel), (12,))
    arguments = []
    for size, dim in zip(shapes, in_dims, strict=True):
        batched = list(size)
        if dim is not None:
            batched.insert(dim, 5)
        arguments.append(torch.randn(batched, dtype=torch.float64, requires_grad=True))
    of_each = [
        function(*(a if dim is None else a.select(dim, i) for a, dim in zip(arguments, in_dims, strict=True)))
        for i in range(5)
    ]
    expected = torch.stack(of_each)
    found = torch.vmap(function, in_dims)(*arguments)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad(y, arguments, upstream) for y in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(function, in_dims)(*arguments), expected)
