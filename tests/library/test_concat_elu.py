"""ELUs of both signs with dropout: one contract on every backend, and the function of `nn` in any memory format."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import blocksparse as bs
from blocksparse.ops import concat_elu as op
from blocksparse.ops.concat_elu import reference
from linear_backends import assert_same_bits, running
from test_dropout import in_every_dtype, on_every_backend

# Of a result of size 1 and less, and of a sum of two of these.
ROUNDING = {torch.float32: 3e-7, torch.float64: 1e-15, torch.bfloat16: 8e-3, torch.float16: 1e-3}
MEMORY = {"planes": torch.contiguous_format, "channels-last": torch.channels_last}


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (3, 1), (5, 32), (129, 17), (300, 64), (1, 10_001)])
@pytest.mark.parametrize("least", [0, 20_000])
@in_every_dtype
@on_every_backend
def test_outputs_and_gradients(backend, dtype, least, shape):
    x, grad = (3 * torch.randn(shape)).to(dtype), torch.randn(shape[0], 2 * shape[1]).to(dtype)
    x.view(-1)[3::50] = 0
    drawn = 1.5, 2**63 + 5, least
    with running(backend):
        y, grad_x = op.forward(x, *drawn), op.backward(grad, x, *drawn)
    wide = x.double().requires_grad_()
    expected = torch.where(op.keep_mask(x, *drawn[1:]), F.elu(torch.cat([wide, -wide], 1)) * drawn[0], 0)
    expected.backward(grad.double())
    rounding = 2 * ROUNDING[dtype]
    torch.testing.assert_close(y.double(), expected.detach(), rtol=rounding, atol=rounding / 1000)
    torch.testing.assert_close(grad_x.double(), wide.grad, rtol=rounding, atol=5 * rounding)


@on_every_backend
def test_special_values(backend):
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, -200.0, 0.0, 1e-30, -1e-30]]).repeat(40, 1)
    expected = F.elu(torch.cat([x, -x], 1))
    with running(backend):
        torch.testing.assert_close(op.forward(x), expected, equal_nan=True, rtol=1e-6, atol=0)
        some, kept = op.forward(x, 1.0, 1, 2**15), op.keep_mask(x, 1, 2**15)
        grad_x = op.backward(torch.full_like(expected, torch.nan), x, 1.0, 1, 2**15)
    assert (some[~kept] == 0).all()
    torch.testing.assert_close(some[kept], expected[kept], equal_nan=True, rtol=1e-6, atol=0)
    # Dropped numbers do not contribute to the gradient, even if it is NaN there.
    assert torch.equal(grad_x.isnan(), kept[:, :7] | kept[:, 7:])


@on_every_backend
def test_results_do_not_depend_on_threads(backend):
    if backend == "reference":
        pytest.skip("PyTorch's elu rounds the last elements of each thread otherwise")
    x = torch.randn(200, 300)
    with running(backend):
        assert_same_bits(lambda: op.forward(x, 1.0, 9, 1000))


def test_the_dropped_fraction_and_the_independence_of_both_signs():
    x = torch.ones(1000, 501)
    kept = op.keep_mask(x, 7, 2**14)
    upper, lower = ((half.double() - 0.75) for half in kept.chunk(2, 1))
    deviation = (0.75 * 0.25 / x.numel()) ** 0.5
    assert abs(upper.mean()) < 5 * deviation
    assert abs(lower.mean()) < 5 * deviation
    for a, b in ((upper, lower), (upper[:, 1:], upper[:, :-1]), (upper[1:], upper[:-1])):
        assert abs((a * b).mean()) < 5 * 0.1875 / a.numel() ** 0.5
    assert reference.DRAWS == 32  # what the core draws at once


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5), (2, 3, 4, 5), (2, 3, 2, 2, 2), (0, 3, 4, 4), (2, 1, 4, 4)])
def test_the_function_and_its_first_and_second_derivatives(shape, p):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def call(x):
        torch.manual_seed(1)
        return bs.nn.concat_elu(x, p)

    y, whole = call(x), F.elu(torch.cat([x, -x], 1))
    kept = y != 0
    torch.testing.assert_close(y[kept], whole[kept] * 65536 / (65536 - round(p * 65536)))
    assert p or kept.all()
    assert torch.autograd.gradcheck(call, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, x, fast_mode=True)


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY)
def test_memory_formats_are_kept(memory):
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=memory).requires_grad_()
    y = bs.nn.concat_elu(x)
    y.backward(torch.ones_like(y, memory_format=torch.contiguous_format))
    assert y.is_contiguous(memory_format=memory)
    assert x.grad.is_contiguous(memory_format=memory)
    torch.testing.assert_close(y, F.elu(torch.cat([x, -x], 1)))


def test_views_are_not_changed():
    x = torch.randn(2, 8, 4, 5)
    before = x.clone()
    y = bs.nn.concat_elu(x[:, 1:7:2, ::2])
    torch.testing.assert_close(y, F.elu(torch.cat([x, -x], 1)[:, [1, 3, 5, 9, 11, 13], ::2]))
    assert torch.equal(x, before)


def test_compiled_and_transformed():
    x = torch.randn(2, 3, 4)
    expected = F.elu(torch.cat([x, -x], 1))
    torch.testing.assert_close(torch.compile(bs.nn.concat_elu, backend="eager")(x), expected)
    torch.testing.assert_close(torch.func.vmap(bs.nn.concat_elu)(x[None])[0], expected)
    assert bs.nn.concat_elu(x.to("meta")).shape == (2, 6, 4)


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY)
def test_gradients_in_batches(memory):
    x = torch.randn(2, 3, 2, 2).contiguous(memory_format=memory)
    expected = torch.autograd.functional.jacobian(bs.nn.concat_elu, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(bs.nn.concat_elu, x, vectorize=True), expected)
    x.requires_grad_()
    y = bs.nn.concat_elu(x, 0.5)
    grads = torch.randn(5, *y.shape)
    found = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)[0]
    for grad, each in zip(grads, found, strict=True):
        torch.testing.assert_close(each, torch.autograd.grad(y, x, grad, retain_graph=True)[0])


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY)
def test_outputs_may_be_changed_in_place(memory):
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=memory).requires_grad_()
    F.relu_(bs.nn.concat_elu(x)).sum().backward()
    (expected,) = torch.autograd.grad(F.elu(torch.cat([x, -x], 1)).relu().sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_saved_tensors_in_another_memory_format_have_the_same_mask():
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda saved: saved):
        y = bs.nn.concat_elu(x, 0.5)
    y.sum().backward()
    upper, lower = y.detach().chunk(2, 1)
    assert torch.equal(x.grad == 0, (upper == 0) & (lower == 0))


def test_lazily_negated_gradients():
    x = torch.randn(2, 3, requires_grad=True)
    expected = torch.autograd.grad(F.elu(torch.cat([x, -x], 1)), x, torch.ones(2, 6))[0]
    found = torch.autograd.grad(bs.nn.concat_elu(x), x, torch._neg_view(torch.ones(2, 6)))[0]
    torch.testing.assert_close(found, -expected)


@pytest.mark.parametrize(
    ("call", "subject"),
    [
        (lambda: bs.nn.concat_elu(torch.ones(3)), r"x: expected \[n, channels"),
        (lambda: bs.nn.concat_elu(torch.ones(3, 2), 1.0), "p: expected"),
        (lambda: op.forward(torch.ones(3)), r"x: expected \[rows, features\]"),
        (lambda: op.forward(torch.ones(3, 2), least=-1), "least: expected"),
        (lambda: op.backward(torch.ones(3, 2), torch.ones(3, 2)), r"grad: expected .*\[3, 4\]"),
        (lambda: op.backward(torch.ones(3, 4).double(), torch.ones(3, 2)), "grad: expected torch.float32"),
    ],
)
def test_wrong_calls_are_refused(call, subject):
    with pytest.raises(bs.BlockSparseError, match=subject):
        call()
