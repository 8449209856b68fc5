"""The contract of the linear op, the same for every backend and every instruction set present, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings

import blocksparse as bs
from blocksparse.ops import cpu_core
from blocksparse.ops.linear.op import linear_op, linear_wgrad_op
from linear_backends import (
    ACTIVATIONS,
    BACKENDS,
    CPU,
    FAST,
    GPU,
    MAIN,
    SLOW,
    Expected,
    assert_close,
    bound,
    cases,
    dgrad,
    forward,
    running,
    wgrad,
)  # fmt: skip
from linear_cases import BLOCK_SIZES, PRODUCTS, STRIDES, strided

on_every_backend = pytest.mark.parametrize("backend", BACKENDS)
on_every_backend_in_its_dtypes = pytest.mark.parametrize(("backend", "dtype"), cases())


def check_products(backend, layout, tokens, dtype, activation=None, with_bias=True, strides="contiguous"):
    out_features, in_features = layout.shape
    x = strided(tokens, in_features, dtype, strides)
    grad = strided(tokens, out_features, dtype, strides)
    values = torch.randn(layout.values_shape, dtype=dtype)
    bias = [torch.randn(out_features, dtype=dtype)] if with_bias else []

    def product(x, values, *bias):
        return F.linear(x, bs.to_dense(values, layout), *bias)

    expected = Expected(product, [x, values, *bias], activation)
    gradients = expected.gradients(grad)
    most = bound(backend, dtype)
    assert_close(forward(x, values, layout, *(bias or [None]), activation), expected.y, most, "forward", expected.terms)
    assert_close(dgrad(grad, values, layout), gradients[0][0], most, "dgrad", gradients[0][1])
    assert_close(wgrad(grad, x, layout), gradients[1][0], most, "wgrad", gradients[1][1])
    if backend in FAST:  # and as autograd calls them, which may take all gradients at once
        leaves = [tensor.detach().requires_grad_() for tensor in (x, values, *bias)]
        found = torch.autograd.grad(bs.linear(leaves[0], leaves[1], layout, *leaves[2:]), leaves, grad)
        for name, got, (right, terms) in zip(("x", "values", "bias"), found, gradients, strict=False):
            assert_close(got, right, most, f"{name} by autograd", terms)


def check_drawn(backend, dtype, seed, **drawn):
    torch.manual_seed(seed)
    with running(backend):
        check_products(backend, dtype=dtype, **drawn)


@pytest.mark.parametrize(("backend", "dtype"), cases(["reference", *CPU]))
@settings(max_examples=15)
@given(**PRODUCTS)
def test_products_agree_with_float64(backend, dtype, **drawn):
    check_drawn(backend, dtype, **drawn)


@pytest.mark.parametrize(("backend", "dtype"), cases([*GPU, *SLOW]))
@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
@given(**PRODUCTS)
def test_products_of_triton_agree_with_float64(backend, dtype, **drawn):
    check_drawn(backend, dtype, **drawn)


def of_blocks(backends):
    """(backend, dtype, block): in float32 and bfloat16 all blocks, in others some; one of each interpreted; on a GPU
    each way of cutting meets a third of them, other CPUs' kernels meet half, the others are `full`."""
    for nth, case in enumerate(cases(backends)):
        backend, dtype = case.values
        some = {torch.float64: [4, 16, (12, 20)], torch.float16: [1, 8, 64, (8, 32)]}.get(dtype, BLOCK_SIZES)
        some = [(12, 20), 64, (128, 4), 8, (16, 64), 1][nth % 6 :][:1] if backend in SLOW else some
        for i, b in enumerate(some):
            seldom = (backend in GPU and (i + nth) % 3) or (backend in CPU and backend not in MAIN and i % 2)
            marks = pytest.mark.full if seldom else case.marks
            yield pytest.param(backend, dtype, b, id=f"{case.id}-block {b}", marks=marks)


@pytest.mark.parametrize(("backend", "dtype", "block"), list(of_blocks(BACKENDS)))
def test_every_block_size(backend, dtype, block):
    out_block, in_block = block if isinstance(block, tuple) else (block, block)
    layout = bs.patterns.random((5 * out_block, 7 * in_block), block, density=0.5, seed=1)
    with running(backend):
        check_products(backend, layout, 50 if backend in SLOW else 150, dtype)


def of_few_tokens():
    for case in cases(CPU):
        for nth, block in enumerate([4, 8, 16, (8, 1), 32, (9, 8), (8, 48), (6, 4), 64, (4, 2)]):
            often = nth % (1 if case.values[0] in MAIN else 2) == 0
            often = often if case.values[1] in (torch.float32, torch.bfloat16) else nth % 4 == 0
            yield pytest.param(*case.values, block, id=f"{case.id}-{block}", marks=() if often else pytest.mark.full)


@pytest.mark.parametrize(("backend", "dtype", "block"), list(of_few_tokens()))
def test_every_small_number_of_tokens(backend, dtype, block):
    # Where a vector has more lanes than there are tokens, the kernels sum along its lanes. Hub rows are cut between
    # outputs, and a row of blocks may be empty.
    out_block, in_block = block if isinstance(block, tuple) else (block, block)
    mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < torch.tensor([[1.0], [0.1], [0.0]])
    layout = bs.BlockLayout(mask, (out_block, in_block))
    with running(backend):
        for tokens in range(1, 10):
            check_products(
                backend,
                layout,
                tokens,
                dtype,
                activation=list(ACTIVATIONS)[tokens % len(ACTIVATIONS)],
                with_bias=tokens % 2 == 1,
                strides=STRIDES[tokens % len(STRIDES)],
            )


LONG_INTERPRETED = [pytest.param(name, torch.bfloat16, marks=pytest.mark.full) for name in SLOW[1:2]]


@pytest.mark.parametrize(("backend", "dtype"), [*cases(CPU, [torch.float32, torch.bfloat16]), *LONG_INTERPRETED])
def test_long_rows_and_many_tokens(backend, dtype):
    # Hub rows are cut between outputs, rows are summed in groups of blocks, tokens packed in several passes; and of a
    # block that is no whole number of vectors the sums of a second chunk of tokens are added.
    layout = bs.patterns.barabasi_albert(256 if backend in SLOW else 1024, block_size=16, m=4, seed=0)
    with running(backend):
        for tokens in (40,) if backend in SLOW else (1, 600):
            check_products(backend, layout, tokens, dtype)
        if backend not in SLOW:
            check_products(backend, bs.patterns.random((60, 100), (12, 20), density=0.5, seed=0), 600, dtype)


@pytest.mark.parametrize("backend", [*FAST, *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)])
def test_long_sums_are_accurate(backend):
    # 12288 terms and 12288 tokens: a single running sum would be at the bound or beyond it.
    layout = bs.patterns.dense((32, 12288), block_size=32)
    with running(backend):
        x, values = torch.randn(40, 12288), torch.randn(layout.values_shape)
        expected = x.double() @ bs.to_dense(values, layout).double().T
        most = 6e-7 if backend.startswith("cpu") else bound(backend, torch.float32)
        assert_close(forward(x, values, layout), expected, most, "forward")
        layout = bs.patterns.dense((32, 32), block_size=32)
        grad, x = torch.randn(12288, 32), torch.randn(12288, 32)
        assert_close(wgrad(grad, x, layout)[0], grad.double().T @ x.double(), most, "wgrad")


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_the_op_with_an_activation_is_twice_differentiable(activation):
    layout = bs.patterns.random((6, 4), block_size=2, density=0.6, seed=0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    values = torch.randn(layout.values_shape, dtype=torch.float64, requires_grad=True)
    indices = list(layout.indices_on(x.device))

    def op(x, values):
        return torch.ops.blocksparse.linear(x, values, None, indices, layout.grid[1], False, activation)

    assert torch.autograd.gradcheck(op, (x, values))
    assert torch.autograd.gradgradcheck(op, (x, values))


@pytest.mark.parametrize("backend", MAIN)
@pytest.mark.parametrize("shape", [(32,), (3, 32), (2, 5, 32), (2, 0, 32), (0, 32), (2, 3, 4, 32)], ids=str)
def test_batch_shapes(backend, shape):
    layout = bs.patterns.random((24, 32), block_size=8, density=0.5, seed=0)
    with running(backend):
        values, x = torch.randn(layout.values_shape), torch.randn(shape, requires_grad=True)
        y = bs.linear(x, values, layout)
        y.sum().backward()
    expected = F.linear(x.detach(), bs.to_dense(values, layout))
    assert y.shape == expected.shape
    torch.testing.assert_close(y.detach(), expected)
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("backend", MAIN)
@pytest.mark.parametrize("permutation", [(1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
def test_strided_batches(backend, permutation):
    layout = bs.patterns.random((24, 32), block_size=8, density=0.5, seed=0)
    shape = [0, 0, 0]
    for size, axis in zip((4, 5, 32), permutation, strict=True):
        shape[axis] = size
    with running(backend):
        x = torch.randn(shape).permute(permutation)
        values = torch.randn(layout.nnz, 8, 8).transpose(1, 2)  # not contiguous either
        y = bs.linear(x, values, layout)
    torch.testing.assert_close(y, F.linear(x, bs.to_dense(values, layout)))


@on_every_backend_in_its_dtypes
def test_nan_reaches_connected_outputs_only(backend, dtype):
    layout = bs.BlockLayout([[True, False], [True, True]], block_size=16)
    with running(backend):
        x, values = torch.randn(20, 32, dtype=dtype), torch.randn(layout.values_shape, dtype=dtype)
        x[3, 20] = torch.nan
        y = forward(x, values, layout, activation="silu")
        assert y.isnan().sum() == 16
        assert y[3, 16:].isnan().all()
        grad_values = wgrad(torch.ones(20, 32, dtype=dtype), x, layout)
    assert grad_values.isnan().sum() == 16
    assert grad_values[2, :, 4].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity times 0 in Triton's interpreter
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name])
@pytest.mark.parametrize(("backend", "dtype"), cases())
def test_special_values_through_activations(backend, dtype, activation):
    """The results are those of PyTorch in float64: its GELU of float32 overflows from half of the largest number on."""
    largest = torch.finfo(dtype).max
    far = [-torch.inf, -largest, -1e30, -1000.0, -100, -89, -88, -20, -9, -1e-30, 0, 9, 100, torch.nan]
    far += [] if backend == "reference" else [largest, torch.inf]
    layout = bs.BlockLayout([[False]], block_size=(len(far), 8))
    with running(backend):
        bias, values = torch.tensor(far, dtype=torch.float64).to(dtype), torch.empty(layout.values_shape, dtype=dtype)
        y = forward(torch.zeros(3, 8, dtype=dtype), values, layout, bias, activation)
    expected = ACTIVATIONS[activation](bias.double() + 0.0).to(dtype).expand_as(y)  # of a sum, which begins at +0
    torch.testing.assert_close(y, expected, equal_nan=True)
    if backend == "reference" and activation == "gelu":
        return  # PyTorch's own, whose zeros far below 0 have a sign that depends on the CPU and the place
    zero = (y == 0) & (expected == 0)
    assert torch.equal(y[zero].signbit(), expected[zero].signbit())


@pytest.mark.parametrize("activation", ["gelu", *(pytest.param(a, marks=pytest.mark.full) for a in (None, "relu"))])
def test_opcheck(activation):
    layout = bs.patterns.random((12, 20), block_size=4, density=0.5, seed=0)
    indices = layout.indices_on("cpu"), layout.grid[1]
    x, grad, values = (torch.randn(shape, requires_grad=True) for shape in ((6, 20), (6, 12), layout.values_shape))
    bias = torch.randn(12, requires_grad=True)
    torch.library.opcheck(linear_op, (x, values, bias, *indices, False, activation))
    torch.library.opcheck(linear_op, (grad, values, None, *indices, True, activation))
    torch.library.opcheck(linear_wgrad_op, (grad, x, *indices))


def test_opcheck_on_an_empty_layout_and_no_tokens():
    layout = bs.BlockLayout(torch.zeros(2, 3, dtype=torch.bool), block_size=4)
    indices = layout.indices_on("cpu"), layout.grid[1]
    torch.library.opcheck(linear_op, (torch.randn(0, 12), torch.randn(0, 4, 4), None, *indices, False, None))
    torch.library.opcheck(linear_wgrad_op, (torch.randn(0, 8), torch.randn(0, 12), *indices))


@pytest.mark.usefixtures("any_backend")
def test_a_layout_is_built_from_unknown_index_tensors():
    # As in a graph loaded from a file: index tensors that no layout of this process made.
    layout = bs.patterns.random((64, 96), block_size=16, density=0.4, seed=0)
    x, values = torch.randn(3, 96), torch.randn(layout.values_shape)
    indices = [layout.crow_indices().clone(), layout.col_indices().clone()]
    assert torch.equal(linear_op(x, values, None, indices, 6, False, None), bs.linear(x, values, layout))


def test_the_error_of_dtypes_without_a_kernel_has_a_remedy():
    layout = bs.patterns.dense((2, 2), block_size=2)
    x, values = torch.ones(1, 2, dtype=torch.complex64), torch.ones(1, 2, 2, dtype=torch.complex64)
    with pytest.raises(bs.BlockSparseError, match=r"complex64 on cpu.*use_backend\(\"reference\"\)"):
        bs.linear(x, values, layout)
    with bs.use_backend("reference"):
        assert bs.linear(x, values, layout).dtype == torch.complex64


def test_the_compiled_core_is_there():
    """A checkout without a compiled core passes no tests by testing nothing."""
    assert cpu_core.unavailable() is None, cpu_core.unavailable()
