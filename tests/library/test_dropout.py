"""Dropout with a leaky ReLU: one contract, on every backend that this machine has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blocksparse.ops import dropout
from blocksparse.ops.dropout.reference import PART, drawn
from linear_backends import CPU, DTYPES, EMULATED_PAIRS, assert_same_bits, running

# The sets with pairs of bfloat16 have the kernels of the one below them.
on_every_backend = pytest.mark.parametrize(
    "backend", ["reference", *(backend for backend in CPU if backend not in EMULATED_PAIRS)]
)
in_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@pytest.mark.parametrize("count", [0, 1, 7, 31, 33, 1000, PART, PART + 1, 3 * PART + 45])
@in_every_dtype
@on_every_backend
def test_outputs_follow_the_codes(backend, dtype, count):
    x = torch.randn(count).to(dtype)
    x[3::50] = 0
    least, slope = dropout.least_of(0.3), -0.6
    factors = dropout.factors_of(least, slope)
    with running(backend):
        y, code = dropout.forward(x, factors, 2**63 + 5, least)
        grad = torch.randn(count).to(dtype)
        grad_x = dropout.backward(grad, code, factors)
    kept = torch.from_numpy(drawn(count, 2**63 + 5) >= least)
    assert torch.equal(code, torch.where(kept, torch.where(x > 0, 1, 2), 0).to(torch.uint8))
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    factor = torch.tensor(factors, dtype=sums)[code.long()]
    assert torch.equal(y, (x.to(sums) * factor).to(dtype))
    assert torch.equal(grad_x, (grad.to(sums) * factor).to(dtype))


@on_every_backend
def test_special_values_are_dropped_or_kept_whole(backend):
    x = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(500)
    with running(backend):
        y, code = dropout.forward(x, dropout.factors_of(2**15, 0.5), 1, 2**15)
        grad_x = dropout.backward(x, code, dropout.factors_of(2**15, 0.5))
    for got in (y, grad_x):
        assert (got[code == 0] == 0).all()
        assert torch.equal(got.isnan(), x.isnan() & (code != 0))
        assert torch.equal(got.isinf(), x.isinf() & (code != 0))


@on_every_backend
def test_results_do_not_depend_on_strides_and_threads(backend):
    x = torch.randn(200, 300)
    factors, turned = dropout.factors_of(1000, 1), x.T.contiguous().T
    with running(backend):
        found = assert_same_bits(lambda: dropout.forward(turned, factors, 9, 1000)[0])
        assert torch.equal(found, dropout.forward(x, factors, 9, 1000)[0])


def test_random_numbers_equal_the_published_algorithm():
    """The first numbers of a stream by the published algorithm, in plain integers."""
    mask = 2**64 - 1
    seed, part, lane = 123456789, 1, 3
    a, b, c, counter = seed, 8 * part + lane, 0, 1
    words = []
    for _ in range(18 + PART // 32):
        word = (a + b + counter) & mask
        counter += 1
        a, b = b ^ (b >> 11), (c + (c << 3)) & mask
        c = (((c << 24) | (c >> 40)) + word) & mask
        words.append(word)
    expected = [word >> shift & 0xFFFF for word in words[18:] for shift in (0, 16, 32, 48)]
    got = drawn(2 * PART, seed)[PART:].reshape(-1, 8, 4)[:, lane].reshape(-1)
    assert got.tolist() == expected


def test_levels_are_equally_likely_and_independent():
    numbers = np.concatenate([drawn(50_000, seed) for seed in range(40)])
    counts = np.bincount(numbers >> 8, minlength=256)
    expected = numbers.size / 256
    # Chi squared of 255 degrees of freedom: 255 on average, deviation 22.6.
    assert 255 - 6 * 22.6 < ((counts - expected) ** 2 / expected).sum() < 255 + 6 * 22.6
    centred = numbers / 65536 - 0.5
    for lag in (1, 3, 4, 32, PART, 50_000):
        correlation = (centred[lag:] * centred[:-lag]).mean() * 12
        assert abs(correlation) < 6 / numbers.size**0.5


@pytest.mark.parametrize("p", [1e-9, 0.3, 1 - 1e-9])
def test_some_numbers_stay_and_the_expectation_is_preserved(p):
    least = dropout.least_of(p)
    assert 0 <= least < dropout.LEVELS
    assert dropout.factors_of(least, 1)[1] * (1 - least / dropout.LEVELS) == pytest.approx(1)
