"""The properties that all products on layouts share: one test per property, on every backend."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._inductor.config
from hypothesis import example, given, settings
from hypothesis import strategies as st

import blocksparse as bs
from conv_backends import BACKENDS as CONV_BACKENDS
from linear_backends import ACTIVATIONS, BACKENDS, FAST, MAIN, SLOW, assert_close, cases, running
from op_cases import OPS
from strategies import layouts

CONVOLUTIONS = ["conv2d", "conv_transpose2d"]
PAIRS = [("linear", name) for name in BACKENDS] + [(op, name) for op in CONVOLUTIONS for name in CONV_BACKENDS]


def in_each_dtype():
    for op in ("linear", *CONVOLUTIONS):
        for case in cases(BACKENDS if op == "linear" else CONV_BACKENDS):
            yield pytest.param(op, *case.values, id=f"{op}-{case.id}", marks=case.marks)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_agrees_with_the_dense_function(op, activation, any_backend):
    layout = bs.patterns.random((48, 80), block_size=16, density=0.6, seed=0)
    x, values, bias = inputs = OPS[op].tensors(layout, dtype=torch.float64, requires_grad=True)
    y = OPS[op].call(x, values, layout, bias, activation=activation)
    expected = ACTIVATIONS[activation](OPS[op].dense(x, bs.to_dense(values, layout), bias))
    torch.testing.assert_close(y, expected)
    upstream = torch.randn_like(y)
    for ours, theirs in zip(*(torch.autograd.grad(each, inputs, upstream) for each in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("op", "backend", "dtype"), list(in_each_dtype()))
def test_absent_blocks_give_exact_zeros(op, backend, dtype):
    mask = torch.rand(5, 6) < 0.5
    mask[0], mask[1], mask[4], mask[:, 2] = True, False, False, False
    layout = bs.BlockLayout(mask, block_size=8)
    with running(backend):
        x, values, _ = OPS[op].tensors(layout, n=9 if op == "linear" else 2, dtype=dtype)
        y = OPS[op].call(x.requires_grad_(), values, layout)
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert (y[:, 8:16] == 0).all()
    assert (y[:, 32:] == 0).all()
    assert (y[:, :8] != 0).any()
    assert (grad[:, 16:24] == 0).all()


@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_a_layout_without_blocks(op, backend):
    layout = bs.BlockLayout(torch.zeros(2, 3, dtype=torch.bool), block_size=4)
    with running(backend):
        x, values, bias = OPS[op].tensors(layout, requires_grad=True)
        y = OPS[op].call(x, values, layout, bias, activation="relu")
        assert torch.equal(y, bias.relu().view(-1, *[1] * len(OPS[op].space)).expand_as(y))
        y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert values.grad.shape == values.shape


# -- gradients and their gradients ---------------------------------------------------------------------------------


def check_gradients(op, backend, activation, layout, n, seed):
    torch.manual_seed(seed)
    with running(backend):
        x, values, bias = OPS[op].tensors(layout, n, dtype=torch.float64, requires_grad=True)
        if activation == "relu":  # away from its kink
            with torch.no_grad():
                bias += 30 * bias.sign()

        def function(x, values, bias):
            return OPS[op].call(x, values, layout, bias, activation=activation)

        # Along random directions if checking each number would take a minute.
        fast = op != "linear" or backend in SLOW
        assert torch.autograd.gradcheck(function, (x, values, bias), fast_mode=fast)
        assert torch.autograd.gradgradcheck(function, (x, values, bias), fast_mode=fast)


def with_gradients():
    for op, backend in PAIRS:
        for activation in ACTIVATIONS if backend in FAST and backend in MAIN else [None] if backend in FAST else []:
            usual = backend in MAIN and (op == "linear" or activation != "silu")
            usual = usual and (op != "linear" or backend != "reference" or activation == "gelu")
            yield pytest.param(op, backend, activation, marks=() if usual else pytest.mark.full)


@pytest.mark.parametrize(("op", "backend", "activation"), list(with_gradients()))
@settings(max_examples=3)
@given(layout=layouts(max_grid=3, blocks=(1, 2, 3)), n=st.integers(1, 3), seed=st.integers(0, 2**31))
@example(layout=bs.BlockLayout([[True, False], [True, True], [False, False]], (2, 3)), n=2, seed=0)
def test_gradients_and_double_gradients(op, backend, activation, layout, n, seed):
    check_gradients(op, backend, activation, layout, n, seed)


@pytest.mark.full
@pytest.mark.parametrize(("op", "backend"), [pair for pair in PAIRS if pair[1] in SLOW[:1]])
def test_gradients_and_double_gradients_interpreted(op, backend):
    layout = bs.BlockLayout([[True, False], [True, True], [False, False]], (1, 2))
    check_gradients(op, backend, "relu" if op == "linear" else None, layout, n=1, seed=0)


# -- compilers, threads, autocast and forward mode -----------------------------------------------------------------

full = pytest.mark.full


@pytest.mark.parametrize(
    ("op", "activation", "compiler", "dynamic"),
    [
        ("linear", "gelu", "inductor", True),
        ("conv2d", "gelu", "aot_eager", False),
        ("conv_transpose2d", None, "aot_eager", False),
        pytest.param("linear", None, "inductor", True, marks=full),
        pytest.param("conv2d", "gelu", "aot_eager", True, marks=full),  # sizes as symbols take half a minute
        pytest.param("conv2d", None, "inductor", True, marks=full),
        pytest.param("conv_transpose2d", None, "inductor", True, marks=full),
    ],
)
# Vectors take g++ several times as long, and to find out which ones this CPU has takes seconds.
@torch._inductor.config.patch({"cpp.simdlen": 1, "cpp.vec_isa_ok": False})
def test_compiles_into_one_graph_and_trains_in_it(op, activation, compiler, dynamic, any_backend):
    torch._dynamo.reset()  # the other cases compile the same `loss`, which counts as compiling it again
    layout = bs.patterns.random((64, 96), block_size=16, density=0.4, seed=0)
    _, values, bias = OPS[op].tensors(layout, requires_grad=True)

    def loss(x):
        return OPS[op].call(x, values, layout, bias, activation=activation).square().mean()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend=compiler)
    for n in (5, 12) if dynamic else (3,):
        x = OPS[op].tensors(layout, n)[0]
        if x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        plain = torch.autograd.grad(loss(x), (values, bias))
        torch.testing.assert_close(torch.autograd.grad(compiled(x), (values, bias)), plain)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), loss(x))


@pytest.mark.parametrize("op", ["linear", "conv2d"])
def test_calls_from_many_python_threads_at_once(op, any_backend):
    layout = bs.patterns.random((256, 256), block_size=32, density=0.3, seed=0)
    values, inputs = OPS[op].tensors(layout)[1], [OPS[op].tensors(layout, n)[0] for n in (1, 17, 64, 200)]
    expected = [OPS[op].call(x, values, layout) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            found = pool.map(lambda x: OPS[op].call(x, values, layout), inputs)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["linear", *CONVOLUTIONS])
def test_autocast(op, dtype):
    layout = bs.patterns.random((64, 96), block_size=16, density=0.4, seed=0)
    x, values, bias = OPS[op].tensors(layout, n=5, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y = OPS[op].call(x, values, layout, bias)
        assert y.dtype == dtype
        assert OPS[op].call(x.double(), values.double(), layout).dtype == torch.float64
    y.float().sum().backward()
    assert x.grad.dtype == values.grad.dtype == torch.float32
    (expected,) = torch.autograd.grad(OPS[op].call(x, values, layout).sum(), values)
    assert_close(values.grad, expected, 1e-2)


@pytest.mark.parametrize("tangent_of", ["x", "values", "bias"])
@pytest.mark.parametrize("op", ["linear", *CONVOLUTIONS])
def test_forward_mode_is_refused_instead_of_silently_zero(op, tangent_of):
    layout = bs.patterns.dense((8, 8), block_size=8)
    tensors = dict(zip(("x", "values", "bias"), OPS[op].tensors(layout), strict=True))
    primal = tensors[tangent_of]
    with pytest.raises(bs.BlockSparseError, match=f"{tangent_of}: expected reverse-mode differentiation"):
        torch.func.jvp(lambda each: OPS[op].call(layout=layout, **tensors | {tangent_of: each}), (primal,), (primal,))
