"""Gated sums, and the normalization of weights in one call, on every instruction set."""

from __future__ import annotations

import pytest
import torch

import blocksparse as bs
from blocksparse.nn import weight_norm
from blocksparse.ops.gated_sum import gated_sum
from linear_backends import CPU, assert_same_bits, running

on_every_isa = pytest.mark.parametrize("backend", CPU)


def composed(x, pair):
    a, b = pair.chunk(2, 1)
    return x + a * b.sigmoid()


@on_every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 4, 5, 7), (2, 6), (1, 8, 70, 70)])
def test_gated_sums_and_gradients(backend, shape, dtype):
    x, pair = torch.randn(shape, dtype=dtype), 5 * torch.randn(shape[0], 2 * shape[1], *shape[2:], dtype=dtype)
    x, pair, grad = x.requires_grad_(), pair.requires_grad_(), torch.randn(shape, dtype=dtype)
    with running(backend):
        got = assert_same_bits(lambda: [y := gated_sum(x, pair), *torch.autograd.grad(y, (x, pair), grad)], (1, 3))
    wide = x.detach().double().requires_grad_(), pair.detach().double().requires_grad_()
    y = composed(*wide)
    for one, right in zip(got, (y, *torch.autograd.grad(y, wide, grad.double())), strict=True):
        torch.testing.assert_close(one, right.to(dtype), rtol=2e-6 if dtype != torch.bfloat16 else 1e-2, atol=5e-6)


def test_gated_sums_differentiated_twice_and_in_other_memory():
    x, pair = torch.randn(2, 3, 2, dtype=torch.float64), torch.randn(2, 6, 2, dtype=torch.float64)
    leaves = x.requires_grad_(), pair.requires_grad_()
    assert torch.autograd.gradcheck(gated_sum, leaves)
    assert torch.autograd.gradgradcheck(gated_sum, leaves)
    x, pair = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last), torch.randn(2, 8, 5, 5)
    torch.testing.assert_close(gated_sum(x, pair), composed(x, pair))


@on_every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("taps", [(), (2, 3)])
def test_normalized_weights_and_gradients(backend, dtype, taps):
    layout = bs.patterns.random((24, 40), block_size=(4, 8), density=0.4, seed=0)
    values, gain = torch.randn(*layout.values_shape, *taps, dtype=dtype), torch.rand(24, dtype=dtype)
    values[:, 1] = 0  # outputs without weights
    values, gain = values.requires_grad_(), gain.requires_grad_()
    grad = torch.randn_like(values)
    for leaves in ((values, gain), (values,)):
        with running(backend):
            y = bs.nn.l2_normalize(values, layout, *leaves[1:])
            got = y, *torch.autograd.grad(y, leaves, grad)
        right = weight_norm._composed(values, layout, gain if len(leaves) > 1 else None, 1e-6)
        for one, other in zip(got, (right, *torch.autograd.grad(right, leaves, grad)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_normalized_weights_differentiated_twice():
    layout = bs.patterns.random((4, 6), block_size=2, density=0.6, seed=0)
    values = torch.randn(layout.values_shape, dtype=torch.float64, requires_grad=True)
    gain = torch.rand(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *leaves: bs.nn.l2_normalize(leaves[0], layout, leaves[1]), (values, gain))
    assert torch.autograd.gradgradcheck(
        lambda *leaves: bs.nn.l2_normalize(leaves[0], layout, leaves[1]), (values, gain)
    )
