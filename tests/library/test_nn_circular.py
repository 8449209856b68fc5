"""Circular padding against PyTorch's own, gradients included."""

import pytest
import torch
import torch.nn.functional as F

import blocksparse as bs
from blocksparse.nn.research.circular import circular_pad


@pytest.mark.parametrize("around", [(1, 1, 1, 1), (2, 0, 0, 3), (0, 0, 1, 2), (5, 5), (0, 0, 0, 0), (1, 1, 2, 2, 1, 0)])
def test_it_is_pytorchs(around):
    axes = max(2, len(around) // 2)
    x = torch.randn(2, 3, *(4, 3, 5)[3 - axes :], dtype=torch.float64, requires_grad=True)
    # F.pad needs the margins of all axes of space.
    expected = F.pad(x, around + (0,) * (2 * axes - len(around)), mode="circular")
    found = circular_pad(x, around)
    assert torch.equal(found, expected)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(found, x, upstream), torch.autograd.grad(expected, x, upstream))


def test_derivatives_of_derivatives():
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: circular_pad(x, (1, 2, 3, 0)), x)
    assert torch.autograd.gradgradcheck(lambda x: circular_pad(x, (1, 2, 3, 0)) ** 2, x)


def test_channels_last_stays():
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = circular_pad(x, (1, 1, 1, 1))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.autograd.grad(y, x, torch.ones_like(y))[0].stride(1) == 1


def test_bad_input():
    for around in [(5, 0), (0, 0, 3, 5), (-1, 0)]:
        with pytest.raises(bs.BlockSparseError, match="padding: expected from 0 to the size that is padded, 4"):
            circular_pad(torch.randn(1, 4, 4), around)
