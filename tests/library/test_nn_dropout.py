"""Dropout: how many go, that no two calls and no two places go together, gradients, seeds."""

import pytest
import torch

import blocksparse as bs
from blocksparse.layout import LARGE
from blocksparse_lab.models.mlp import SparseMLP


@pytest.mark.parametrize("p", [0.001, 0.3, 0.5, 0.9])
def test_the_part_that_goes_and_the_gradient(p):
    torch.manual_seed(3)
    x = torch.randn(1001, 501, dtype=torch.float64, requires_grad=True)
    y = bs.nn.Dropout(p)(x)
    y.sum().backward()
    kept = y != 0
    deviation = (p * (1 - p) / x.numel()) ** 0.5
    assert abs((~kept).double().mean() - p) < 5 * deviation
    scale = 65536 / (65536 - round(p * 65536))
    assert torch.allclose(y[kept], x[kept] * scale, rtol=1e-15)
    assert torch.equal(x.grad != 0, kept)
    assert torch.allclose(x.grad[kept], torch.tensor(scale, dtype=torch.float64), rtol=1e-15)


def test_places_and_calls_are_independent():
    torch.manual_seed(0)
    layer, x = bs.nn.Dropout(0.5), torch.ones(2, LARGE + 3)  # more than is drawn at once
    first, second = ((layer(x) == 0).double() - 0.5 for _ in range(2))
    for a, b in ((first, second), (first[:, 1:], first[:, :-1]), (first[0], first[1]), (first[:, 2:], first[:, :-2])):
        assert abs((a * b).mean()) < 5 * 0.25 / a.numel() ** 0.5


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_shape_and_dtype(shape, dtype):
    x = torch.rand(shape).to(dtype) + 1
    y = bs.nn.Dropout(0.4)(x)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert ((y == 0) | (y >= x)).all()


def test_a_seed_fixes_it_and_the_generator_moves_on():
    layer, x = bs.nn.Dropout(0.3), torch.ones(100)
    torch.manual_seed(1)
    first, second = layer(x), layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    assert torch.equal(layer(x), second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("call", [bs.nn.Dropout(0.3), lambda x: bs.nn.concat_elu(x, 0.3)], ids=["dropout", "elu"])
def test_a_profiler_may_record_shapes(call):
    x = torch.randn(2, 8, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True):
        for _ in range(20):  # half of all seeds of 64 bits are larger than the profiler's integers
            call(x).sum().backward()


def test_nothing_goes_in_evaluation_and_at_0():
    x = torch.randn(50)
    assert bs.nn.Dropout(0.3).eval()(x) is x
    assert bs.nn.Dropout(0)(x) is x


def test_the_inputs_are_left_alone_and_a_byte_a_number_is_kept():
    kept = []
    x = torch.randn(100, requires_grad=True)
    before = x.detach().clone()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        bs.nn.Dropout(0.3)(x)
    assert torch.equal(x, before)
    assert sum(size for size in kept if size > 8) == 100


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_slope_alone_is_pytorchs_leaky_relu_in_a_byte_a_number(dtype, training):
    layer = bs.nn.Dropout(0.5 * (not training)).train(training)
    special = [-1.0, -0.0, 0.0, 2.0, float("inf"), -float("inf"), float("nan")]
    x = torch.cat([torch.tensor(special), torch.randn(4993)]).to(dtype)
    grad = torch.randn(5000).to(dtype)
    for slope in (-0.6, 0.6, 0.0):
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        state, kept = torch.get_rng_state(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):  # noqa: B023
            y = layer(mine, slope)
        assert sum(kept) == 5000
        assert torch.equal(torch.get_rng_state(), state)
        expected = torch.nn.functional.leaky_relu(other, slope)
        y.backward(grad)
        expected.backward(grad)
        assert torch.equal(y.nan_to_num(7), expected.nan_to_num(7))
        assert torch.equal(y.signbit(), expected.signbit())
        assert torch.equal(mine.grad, other.grad)
        assert not layer(x, slope).requires_grad
    mine = x[7:12].clone().requires_grad_()
    rows = torch.autograd.grad(layer(mine, 0.25), mine, torch.eye(5, dtype=dtype), is_grads_batched=True)[0]
    assert torch.equal(rows.diagonal(), torch.where(mine > 0, 1, 0.25).to(dtype))
    tangent = torch.func.jvp(lambda x: layer(x, 0.25), (x[:5],), (torch.ones(5, dtype=dtype),))[1]
    assert tangent.tolist() == [0.25, 0.25, 0.25, 1, 1]


STRIDED = {
    "contiguous": lambda x: x,
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1),
    "gaps": lambda x: x.repeat_interleave(2, 3)[..., ::2],
}


@pytest.mark.parametrize("strided", STRIDED.values(), ids=STRIDED)
def test_memory_formats_are_kept(strided):
    x = strided(torch.rand(2, 8, 4, 3) + 1).requires_grad_()
    y = bs.nn.Dropout(0.5)(x)
    assert y.stride() == torch.empty_like(x).stride()
    kept = y != 0
    assert torch.equal(y[kept], 2 * x[kept])
    (grad,) = torch.autograd.grad(y, x, torch.ones(y.shape))
    assert torch.equal(grad, 2 * kept)
    assert grad.stride() == y.stride()
    torch.nn.functional.relu_(bs.nn.Dropout(0.5)(x)).sum().backward()  # written into
    rows = torch.autograd.grad(bs.nn.Dropout(0.5)(x), x, torch.ones(3, *x.shape), is_grads_batched=True)[0]
    assert torch.equal(rows[0], rows[2])
    assert set(rows.unique().tolist()) == {0, 2}


def test_the_mask_is_drawn_as_the_numbers_lie():
    torch.manual_seed(5)
    expected = bs.nn.Dropout(0.5)(torch.ones(2, 4, 3, 8))
    torch.manual_seed(5)
    found = bs.nn.Dropout(0.5)(torch.ones(2, 8, 4, 3).contiguous(memory_format=torch.channels_last))
    assert torch.equal(found.movedim(1, -1), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_gradients(transposed):
    x = torch.randn(7, 3, dtype=torch.float64)
    x = (x.T if transposed else x).requires_grad_()
    layer = bs.nn.Dropout(0.3)

    def loss(x):
        torch.manual_seed(1)
        return layer(x.tanh()).square()

    assert torch.autograd.gradgradcheck(loss, (x,))


def test_compiled_and_on_no_device_it_is_pytorchs():
    with torch.device("meta"):
        assert bs.nn.Dropout(0.3)(torch.ones(5)).device.type == "meta"
    model = SparseMLP([20, 30, 2], epsilon=3, dropout=0.5)
    exported = torch.export.export(model, (torch.randn(4, 20),))
    assert any("dropout" in str(node.target) for node in exported.graph.nodes)


@pytest.mark.parametrize("p", [-0.1, 1, 1.5, float("nan"), "0.5", True])
def test_bad_p(p):
    with pytest.raises(bs.BlockSparseError, match="p: expected a number from 0 to below 1"):
        bs.nn.Dropout(p)


def test_ints_are_refused_as_in_pytorch():
    with pytest.raises(RuntimeError):
        bs.nn.Dropout(0.25)(torch.ones(8, dtype=torch.long))
