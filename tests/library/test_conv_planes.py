"""Convolutions over planes: small blocks and images whose channels are contiguous, on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import blocksparse as bs
from blocksparse.ops.conv import planes
from linear_backends import CPU, assert_same_bits, running

on_every_isa = pytest.mark.parametrize("backend", CPU)
# Whole vectors, broken ones, lines of one row, strips, and wide images.
SIZES = [(8, 8), (7, 13), (1, 70), (60, 50), (2, 1700)]


@pytest.fixture
def calls(monkeypatch):
    """Return the list of calls of both functions."""
    made = []
    for name in ("conv", "conv_wgrad"):
        function = getattr(planes, name)
        monkeypatch.setattr(planes, name, lambda *a, f=function, name=name: made.append(name) or f(*a))
    return made


def steps(function, x, values, bias, grad):
    """Return the output and all gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, values, bias)]
    y = function(*leaves)
    return y, *torch.autograd.grad(y, leaves, grad)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block", [(4, 4), (8, 2), (3, 5)])
@on_every_isa
def test_outputs_and_gradients(backend, block, size, transposed, calls):
    layout = bs.patterns.random((4 * block[0], 6 * block[1]), block, density=0.4, seed=1)
    for kernel, padding, dilation in (((2, 3), 1, (1, 2)), ((1, 1), 0, 1), ((3, 1), (2, 0), 1)):
        x = torch.randn(3, layout.shape[1], *size)
        values, bias = torch.randn(*layout.values_shape, *kernel), torch.randn(layout.shape[0])
        sparse, dense = (bs.conv_transpose2d, F.conv_transpose2d) if transposed else (bs.conv2d, F.conv2d)
        # Padding makes transposed convolutions smaller: of one line or two, nothing would be left.
        options = {"padding": 0 if transposed and min(size) < 3 else padding, "dilation": dilation}

        def expected(x, values, bias, dense=dense, options=options):
            weight = bs.to_dense(values, layout)
            return dense(x, weight.transpose(0, 1) if transposed else weight, bias, **options)

        with torch.no_grad():
            grad = torch.randn_like(expected(x, values, bias))
        with running(backend):
            got = steps(lambda x, v, b, f=sparse, o=options: f(x, v, layout, b, **o), x, values, bias, grad)
        assert got[0].is_contiguous()
        wide = steps(expected, x.double(), values.double(), bias.double(), grad.double())
        for one, right in zip(got, wide, strict=True):
            torch.testing.assert_close(one.double(), right, rtol=1e-5, atol=2e-6 * float(right.detach().abs().max()))
    assert calls.count("conv") == 6
    assert calls.count("conv_wgrad") == 3


@on_every_isa
def test_bit_identical_over_runs_and_thread_counts(backend):
    layout = bs.patterns.random((32, 32), 4, density=0.3, seed=0)
    x, bias = torch.randn(5, 32, 9, 30), torch.randn(32)
    values, grad = torch.randn(*layout.values_shape, 3, 3), torch.randn(5, 32, 9, 30)
    with running(backend):
        assert_same_bits(
            lambda: list(steps(lambda *a: bs.conv2d(a[0], a[1], layout, a[2], padding=1), x, values, bias, grad))
        )


@on_every_isa
@pytest.mark.parametrize("width", [8, 13])
def test_nan_reaches_connected_outputs_only(backend, width, calls):
    layout = bs.BlockLayout([[True, False], [True, True]], block_size=4)
    x, values = torch.randn(2, 8, 7, width), torch.randn(*layout.values_shape, 3, 3)
    x[1, 5, 0, width - 1] = torch.nan  # in a corner: next to it in memory lies the other side of the image
    with running(backend):
        y, _, of_values, _ = steps(
            lambda *a: bs.conv2d(a[0], a[1], layout, a[2], padding=1), x, values, torch.zeros(8), torch.ones_like(x)
        )
        reached = torch.zeros(2, 8, 7, width, dtype=torch.bool)
        reached[1, 4:, :2, width - 2 :] = True
        assert torch.equal(y.isnan(), reached)
        taps = torch.zeros(3, 4, 4, 3, 3, dtype=torch.bool)
        taps[2, :, 1, :2, 1:] = True
        assert torch.equal(of_values.isnan(), taps)
    assert "conv_wgrad" in calls


@on_every_isa
def test_infinite_values_do_not_meet_the_zeros_around_an_image(backend):
    layout = bs.patterns.dense((4, 4), 4)
    x, values = torch.ones(1, 4, 3, 8), torch.ones(*layout.values_shape, 3, 1)
    values[0, 0, 0, 0] = torch.inf
    with running(backend):
        y = bs.conv2d(x, values, layout, padding=(1, 0))
    assert (y[0, 0, 0] == 8).all()
    assert (y[0, 0, 1:] == torch.inf).all()


def test_compiled_graphs_have_the_strides_that_they_expect():
    layout = bs.patterns.dense((4, 4), 4)
    x, values = torch.randn(2, 4, 5, 8), torch.randn(*layout.values_shape, 3, 3)
    compiled = torch.compile(lambda x: 2 * bs.conv2d(x, values, layout), backend="aot_eager")
    torch.testing.assert_close(compiled(x), 2 * bs.conv2d(x, values, layout))


@on_every_isa
def test_padding_on_one_side(backend):
    layout = bs.patterns.random((8, 16), 4, density=0.5, seed=0)
    x, values = torch.randn(2, 16, 6, 9), torch.randn(*layout.values_shape, 2, 3)
    with running(backend):
        y = bs.conv2d(x, values, layout, padding=((1, 0), (2, 3)))
        padded = bs.conv2d(F.pad(x, (2, 3, 1, 0)), values, layout)
    torch.testing.assert_close(y, padded)
    with pytest.raises(bs.BlockSparseError, match="padding"):
        bs.conv2d(x, values, layout, padding=((1, 0), (2, -3)))
    with pytest.raises(bs.BlockSparseError, match="padding"):
        bs.conv2d(x, values, layout, padding=((1, 0), (2, 3, 4)))
