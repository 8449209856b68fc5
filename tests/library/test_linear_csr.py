"""Unstructured weights, blocks of one number, on the CPU: their own kernels, on every instruction set."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import blocksparse as bs
from blocksparse.ops import cpu_core
from blocksparse.ops.cpu_plan import column_plan
from blocksparse.ops.linear import cpu
from linear_backends import (
    ACTIVATIONS,
    CPU,
    EMULATED_PAIRS,
    assert_close,
    assert_same_bits,
    bound,
    cases,
    dgrad,
    forward,
    running,
    wgrad,
)
from strategies import layouts
from test_linear import STRIDES, check_products, strided

# The sets with pairs of bfloat16 have the kernels of the one below them.
ISAS = [backend for backend in CPU if backend not in EMULATED_PAIRS]
on_every_isa = pytest.mark.parametrize("backend", ISAS)
on_every_isa_in_every_dtype = pytest.mark.parametrize(("backend", "dtype"), cases(ISAS))


@on_every_isa_in_every_dtype
@settings(max_examples=15)
@given(
    layout=layouts(max_grid=40, blocks=(1,)),
    tokens=st.integers(0, 40) | st.sampled_from([63, 64, 65, 127, 128, 129, 200]),
    activation=st.sampled_from([None, "relu"]),
    strides=st.sampled_from(STRIDES),
    seed=st.integers(0, 2**31),
)
def test_sums_of_small_integers_are_exact(backend, dtype, layout, tokens, activation, strides, seed):
    torch.manual_seed(seed)
    x, grad = ((2 * strided(tokens, size, dtype, strides)).round() for size in layout.shape[::-1])
    values, bias = (2 * torch.randn(layout.values_shape)).round(), (2 * torch.randn(layout.shape[0])).round()
    weight = bs.to_dense(values, layout).double()
    values, bias = values.to(dtype), bias.to(dtype)
    with running(backend):
        y = forward(x, values, layout, bias, activation)
        grad_x, grad_values = dgrad(grad, values, layout), wgrad(grad, x, layout)
    assert torch.equal(y, ACTIVATIONS[activation](x.double() @ weight.T + bias.double()).to(dtype))
    assert torch.equal(grad_x, (grad.double() @ weight).to(dtype))
    assert torch.equal(grad_values, bs.from_dense(grad.double().T @ x.double(), layout).to(dtype))


@on_every_isa_in_every_dtype
def test_every_number_of_tokens(backend, dtype):
    torch.manual_seed(0)
    layout = bs.patterns.erdos_renyi((70, 90), block_size=1, epsilon=0.7, seed=0)
    assert (np.diff(layout.row_start) == 0).any()
    with running(backend):
        for tokens in [*range(1, 18), 31, 32, 33, 48, 63, 80, 100, 127, 128, 129, 257]:
            check_products(backend, layout, tokens, dtype)


@on_every_isa
@pytest.mark.parametrize("tokens", [1, 6, 300])
def test_large_layers_agree_with_scipy(backend, tokens):
    sparse = pytest.importorskip("scipy.sparse")
    torch.manual_seed(0)
    shape = (30_000, 20_000)  # panels beyond the caches of a core, and outputs beyond those of all
    layout = bs.patterns.erdos_renyi(shape, block_size=1, epsilon=1, seed=0)
    x, grad, values = torch.randn(tokens, shape[1]), torch.randn(tokens, shape[0]), torch.randn(layout.values_shape)
    numbers = values.double().view(-1).numpy()
    weight = sparse.csr_matrix((numbers, layout.col_of_block, layout.row_start), shape=shape)
    with running(backend):
        y, grad_x, grad_values = forward(x, values, layout), dgrad(grad, values, layout), wgrad(grad, x, layout)
    most = bound(backend, torch.float32)
    assert_close(y, torch.from_numpy((weight @ x.double().numpy().T).T), most, "forward")
    assert_close(grad_x, torch.from_numpy((weight.T @ grad.double().numpy().T).T), most, "dgrad")
    rows, cols = layout.row_of_block.copy(), layout.col_of_block.copy()
    assert_close(grad_values.view(-1), (grad.double()[:, rows] * x.double()[:, cols]).sum(0), most, "wgrad")
    assert (y[:, np.diff(layout.row_start) == 0] == 0).all()


@on_every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_any_number_of_threads_and_of_tokens(backend, dtype):
    torch.manual_seed(0)
    layout = bs.patterns.erdos_renyi((3000, 2000), block_size=1, epsilon=5, seed=0)
    x, grad = torch.randn(150, 2000, dtype=dtype), torch.randn(150, 3000, dtype=dtype)
    values = torch.randn(layout.values_shape, dtype=dtype)
    with running(backend):
        y, grad_x, _ = assert_same_bits(
            lambda: (forward(x, values, layout), dgrad(grad, values, layout), wgrad(grad, x, layout)), (1, 2, 5, 2)
        )
        for tokens in (1, 3, 7, 16, 40, 100):
            assert torch.equal(forward(x[:tokens], values, layout), y[:tokens])
            assert torch.equal(dgrad(grad[:tokens], values, layout), grad_x[:tokens])


@on_every_isa
def test_hubs_and_long_sums_lose_little(backend):
    torch.manual_seed(0)
    n = 50_000
    row, col = np.arange(n), np.zeros(n, dtype=int)
    layout = bs.BlockLayout.from_indices(np.r_[col, row[1:]], np.r_[row, col[1:]], (n, n), block_size=1)
    x, grad, values = torch.randn(5, n), torch.randn(5, n), torch.randn(layout.values_shape)
    first_row, first_col = values[:n].view(-1).double(), torch.cat([values[:1], values[n:]]).view(-1).double()
    with running(backend):
        assert_close(forward(x, values, layout)[:, 0], x.double() @ first_row, 6e-7, "forward")
        assert_close(dgrad(grad, values, layout)[:, 0], grad.double() @ first_col, 6e-7, "dgrad")
        few = bs.BlockLayout.from_indices([0, 1], [1, 0], (2, 2), block_size=1)
        grad, x = torch.randn(12288, 2), torch.randn(12288, 2)
        assert_close(wgrad(grad, x, few), bs.from_dense(grad.double().T @ x.double(), few), 6e-7, "wgrad")


@on_every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=15)
@given(
    layout=layouts(max_grid=90, blocks=(1,)),
    tokens=st.integers(1, 20) | st.sampled_from([31, 32, 33, 63, 64, 100, 127, 128, 129]),
    strides=st.sampled_from(STRIDES),
    needs=st.tuples(st.booleans(), st.booleans()),
    wide=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_all_gradients_at_once(backend, dtype, layout, tokens, strides, needs, wide, threads, seed):
    torch.manual_seed(seed)
    x, grad = (strided(tokens, size, dtype, strides) for size in layout.shape[::-1])
    values = torch.randn(layout.values_shape, dtype=dtype)
    before = torch.get_num_threads()
    with running(backend):
        expected = dgrad(grad, values, layout), wgrad(grad, x, layout)
        if wide:
            plan = tuple(index.astype(np.int64) for index in column_plan(layout))
            own = {"_crow": layout.row_start.astype(np.int64), "_col": layout.col_of_block.astype(np.int64)}
            layout = bs.BlockLayout(layout.mask(), block_size=1)
            layout.__dict__.update(own)
            layout.derived("linear columns", lambda: plan)
        # NaN shows reads of memory that was not written.
        cpu._small.memory = torch.full((1 << 20,), math.nan).view(torch.uint8)
        torch.set_num_threads(threads)
        try:
            found = cpu.gradients(grad, x, values, layout, *needs)
        finally:
            torch.set_num_threads(before)
    if found is None:
        assert tokens > 8, "these fit one panel on any instruction set"
        return
    grad_x, grad_values, grad_bias = found
    assert [grad_x is not None, grad_bias is not None] == list(needs)
    assert torch.equal(grad_values, expected[1])
    if grad_x is not None:
        assert torch.equal(grad_x, expected[0])
    if grad_bias is not None:
        torch.testing.assert_close(grad_bias, grad.sum(0), rtol=1e-5, atol=1e-4)


def test_sixteen_bits_have_each_gradient_from_a_call_of_its_own():
    layout = bs.patterns.erdos_renyi((20, 30), block_size=1, epsilon=3, seed=0)
    x, grad, values = torch.randn(4, 30), torch.randn(4, 20), torch.randn(layout.values_shape)
    x, grad, values = x.bfloat16(), grad.bfloat16(), values.bfloat16()
    assert cpu.gradients(grad, x, values, layout, True, True) is None


@on_every_isa
@pytest.mark.parametrize("tokens", [1, 20])
def test_int64_indices_give_the_same_bits(backend, tokens, monkeypatch):
    # As of layouts of 2^31 numbers and more, which are too large for a test.
    torch.manual_seed(0)
    layout = bs.patterns.erdos_renyi((300, 200), block_size=1, epsilon=3, seed=0)
    x, grad, values = torch.randn(tokens, 200), torch.randn(tokens, 300), torch.randn(layout.values_shape)

    def products(layout):
        return forward(x, values, layout), dgrad(grad, values, layout), wgrad(grad, x, layout)

    with running(backend):
        expected = products(layout)
        wide = bs.patterns.erdos_renyi((300, 200), block_size=1, epsilon=3, seed=0)
        plan = tuple(index.astype(np.int64) for index in column_plan(layout))
        wide.__dict__.update(_crow=layout.row_start.astype(np.int64), _col=layout.col_of_block.astype(np.int64))
        wide.derived("linear columns", lambda: plan)
        assert all(torch.equal(a, b) for a, b in zip(products(wide), expected, strict=True))


@given(layout=layouts(max_grid=12, blocks=(1,)))
def test_the_column_plan_is_the_transposed_layout_in_8_bytes_a_number(layout):
    start, row, position = column_plan(layout)
    assert np.array_equal(start, layout.T.row_start)
    assert np.array_equal(row, layout.T.col_of_block)
    assert np.array_equal(position, layout.transpose_order)
    assert row.nbytes + position.nbytes == 8 * layout.nnz
    assert column_plan(layout) is column_plan(layout)


def test_the_core_refuses_indices_of_mixed_width():
    index = np.zeros(2, dtype=np.int32)
    with pytest.raises(ValueError, match="all int32 or all int64"):
        cpu_core.core().csr_transposed(
            start=index, col=index.astype(np.int64), to_start=index, to_row=index, to_position=index
        )


def test_training_keeps_two_indices_for_each_number():
    layout = bs.patterns.erdos_renyi((500, 400), block_size=1, epsilon=5, seed=0)
    values = torch.randn(layout.values_shape, requires_grad=True)
    x = torch.randn(9, 400, requires_grad=True)
    bs.linear(x, values, layout).sum().backward()
    assert list(layout._derived) == ["linear columns"]
    assert layout._transposed is None
    assert layout._rows is None
