"""Steps with momentum: one contract, on every backend that this machine has."""

from __future__ import annotations

import torch

from blocksparse.ops import momentum
from linear_backends import running
from test_dropout import in_every_dtype, on_every_backend

RATES = {"momentum": 0.9, "rate": 0.01, "keep": 1 - 2e-4}
# L2 error against float64 on the same (rounded) inputs, relative to what is added; the definition rounds after each
# operation.
BOUNDS = {torch.float32: 2e-7, torch.float64: 3e-16, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def tensors(dtype, shapes=((3, 5), (), (0,), (4097,), (70, 100))):
    return [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(3)]


@in_every_dtype
@on_every_backend
def test_a_step(backend, dtype):
    weights, velocities, grads = tensors(dtype)
    v = [0.9 * v.double() - 0.01 * g.double() for v, g in zip(velocities, grads, strict=True)]
    w = [(1 - 2e-4) * w.double() + v for w, v in zip(weights, v, strict=True)]
    versions = [each._version for each in [*weights, *velocities]]
    with running(backend):
        momentum.step(weights, velocities, grads, **RATES)
    for got, expected in zip([*weights, *velocities], [*w, *v], strict=True):
        assert got.dtype == dtype
        assert (got.double() - expected).norm() <= BOUNDS[dtype] * (expected.norm() + expected.numel() ** 0.5)
    assert all(each._version > old for each, old in zip([*weights, *velocities], versions, strict=True))


@on_every_backend
def test_strided_tensors_and_several_dtypes(backend):
    weights, velocities, grads = tensors(torch.float32, [(6, 4), (5,)])
    grads[0] = grads[0].T.contiguous().T
    weights[1], velocities[1], grads[1] = weights[1].double(), velocities[1].double(), grads[1].double()
    expected = [w * RATES["keep"] + 0.9 * v - 0.01 * g for w, v, g in zip(weights, velocities, grads, strict=True)]
    with running(backend):
        momentum.step(weights, velocities, grads, **RATES)
    for got, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(got, wanted)
