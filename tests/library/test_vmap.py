"""torch.vmap and other transforms of the products equal loops over the batch, gradients too."""

import pytest
import torch
from torch.autograd import forward_ad

import blocksparse as bs
from blocksparse.ops.conv.op import CONV
from blocksparse.ops.linear.op import LINEAR

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
    per_entry = [
        function(*(a if dim is None else a.select(dim, i) for a, dim in zip(arguments, in_dims, strict=True)))
        for i in range(5)
    ]
    expected = torch.stack(per_entry)
    found = torch.vmap(function, in_dims)(*arguments)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad(y, arguments, upstream) for y in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(function, in_dims)(*arguments), expected)


def dense_of(name, x, values, bias):
    weight = bs.to_dense(values, LAYOUT)
    if name == "linear":
        return torch.relu(torch.nn.functional.linear(x, weight, bias))
    return torch.nn.functional.conv1d(x, weight, bias, padding=1)


def per_sample(of):
    """Return gradients per sample, as in the example of `torch.func`."""
    gradients = torch.func.grad(lambda x, values, bias: of(x, values, bias).square().sum(), argnums=(0, 1, 2))
    return torch.func.vmap(gradients, (0, None, None))


TRANSFORMS = {
    "grad": lambda of: torch.func.grad(lambda *given: of(given[0][0], *given[1:]).square().sum(), argnums=(0, 1, 2)),
    "jacrev": lambda of: torch.func.jacrev(lambda *given: of(given[0][0], *given[1:]), argnums=(0, 1, 2)),
    "vmap(grad)": per_sample,
    "jacrev(grad)": lambda of: torch.func.jacrev(
        torch.func.grad(lambda *given: of(given[0][0], *given[1:]).pow(3).sum(), argnums=1), argnums=(0, 1, 2)
    ),
    "is_grads_batched": lambda of: lambda *given: batched_gradients(of(given[0][0], *given[1:]), given),
}


def batched_gradients(y, given):
    upstream = torch.linspace(-1, 1, 3 * y.numel(), dtype=y.dtype).view(3, *y.shape).cos()
    return torch.autograd.grad(y, given, upstream, is_grads_batched=True)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CASES)
def test_transforms_equal_those_of_the_dense_function(name, transform):
    function, shape, kernel = CASES[name]
    shapes = ((5, *shape), (*LAYOUT.values_shape, *kernel), (12,))
    given = [torch.randn(each, dtype=torch.float64, requires_grad=True) for each in shapes]
    found = TRANSFORMS[transform](function)(*given)
    expected = TRANSFORMS[transform](lambda *each: dense_of(name, *each))(*given)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_per_sample_gradients_of_a_module():
    layer = bs.nn.Linear(20, 12, density=0.5, block_size=4, dtype=torch.float64)
    x = torch.randn(6, 20, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i, each in enumerate(x):
        loss(parameters, each).backward()
        for name, parameter in parameters.items():
            torch.testing.assert_close(found[name][i], parameter.grad)
            parameter.grad = None


def tangent_of_dual(function, x):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(function(torch.autograd.forward_ad.make_dual(x, x))).tangent


FORWARD = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "dual": tangent_of_dual,
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).pow(3).sum())(x),
    "jvp(grad)": lambda f, x: torch.func.jvp(torch.func.grad(lambda x: f(x).pow(3).sum()), (x,), (x,)),
    "jvp(vmap)": lambda f, x: torch.func.jvp(torch.vmap(f), (x[None],), (x[None],)),
    "vmap(jvp)": lambda f, x: torch.vmap(lambda x: torch.func.jvp(f, (x,), (x,))[1])(x[None]),
}
LAYERS = {
    "linear": (lambda: bs.nn.Linear(8, 12, layout=LAYOUT), (3, 8)),
    "conv1d": (lambda: bs.nn.Conv1d(8, 12, 3, layout=LAYOUT), (2, 8, 5)),
    "lstm": (lambda: bs.nn.LSTM(8, 8, density=0.5, block_size=4), (3, 2, 8)),
}


@pytest.mark.parametrize("mode", FORWARD)
@pytest.mark.parametrize("name", LAYERS)
def test_forward_mode_is_refused(name, mode):
    make, shape = LAYERS[name]
    layer = make()

    def function(x):
        y = layer(x)
        return y if isinstance(y, torch.Tensor) else y[0]

    with pytest.raises(bs.BlockSparseError, match="expected reverse-mode differentiation, got a forward-mode tangent"):
        FORWARD[mode](function, torch.randn(shape))


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_inputs_is_one_product(name, monkeypatch):
    function, shape, kernel = CASES[name]
    values, bias = torch.randn(*LAYOUT.values_shape, *kernel), torch.randn(12)
    x = torch.randn(5, *shape)
    kind = LINEAR if name == "linear" else CONV
    compute, seen = kind.compute, []

    def counted(tensors, *rest):
        seen.append(tuple(tensors[0].shape))
        return compute(tensors, *rest)

    monkeypatch.setattr(kind, "compute", counted)
    torch.vmap(lambda x: function(x, values, bias))(x)
    assert len(seen) == 1


@pytest.mark.parametrize("transform", [torch.func.hessian, torch.func.jacfwd], ids=["hessian", "jacfwd"])
def test_the_error_of_forward_mode_names_a_replacement(transform):
    layer = bs.nn.Linear(21, 9, density=0.5, block_size=4)

    def loss(x):
        return layer(x).tanh().square().sum()

    with pytest.raises(
        bs.BlockSparseError, match=r"write torch\.func\.jacrev\(f\).*jacrev\(torch\.func\.jacrev\(f\)\)"
    ):
        transform(loss)(torch.randn(21))
    twice = torch.func.jacrev(torch.func.jacrev(loss))(torch.randn(21))
    torch.testing.assert_close(twice, twice.T)


OTHERS = {
    "attention": lambda q: bs.nn.attention(q, q, q, bs.patterns.butterfly(6, 2)),
    "dropout": lambda x: bs.nn.Dropout(0.5).eval()(x, slope=0.25),
    "concat_elu": bs.nn.concat_elu,
}


@pytest.mark.parametrize("dual", [False, True], ids=["transform", "dual level"])
@pytest.mark.parametrize("name", OTHERS)
def test_forward_mode_of_operations_without_a_layout_op(name, dual):
    f = OTHERS[name]
    x, tangent = torch.randn(2, 2, 3, 6, 6, dtype=torch.double)
    if dual:
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))).tangent
    else:
        _, found = torch.func.jvp(f, (x,), (tangent,))
    torch.testing.assert_close(found, (f(x + 1e-6 * tangent) - f(x - 1e-6 * tangent)) / 2e-6, rtol=1e-5, atol=1e-6)


def test_an_empty_batch_has_the_shape_of_others():
    layout = bs.patterns.random((64, 32), 16, density=0.5, seed=0)
    x, values = torch.randn(5, 32), torch.empty(0, *layout.values_shape)
    assert torch.vmap(lambda each: bs.linear(x, each, layout))(values).shape == (0, 5, 64)
