"""The instruction sets of the CPU backend share special values, subnormal numbers, and the same bits each time.

Sums run in another order on each set, so that finite results agree within rounding. Which numbers are NaN, infinite or
0 is the same on all, and as in the reference. Numbers here are small integers, whose sums are exact in any order, with
at most one special value in each sum.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

import blocksparse as bs
from blocksparse.ops import dropout, lstm_gates, momentum
from blocksparse.ops.checks import SUM_DTYPES
from linear_backends import CPU, assert_same_bits, cases, dgrad, forward, name_of, running, wgrad
from processes import run_script

ISAS = [backend.removeprefix("cpu-") for backend in CPU]
on_every_isa = pytest.mark.parametrize("isa", ISAS)
OWN = [(case.values[0].removeprefix("cpu-"), case.values[1]) for case in cases(CPU)]
on_every_isa_in_its_dtypes = pytest.mark.parametrize(
    ("isa", "dtype"), OWN, ids=lambda value: value if isinstance(value, str) else name_of(value)
)
PAIRED = [(isa, f"{isa}_emulated") for isa in ("avx512_bf16", "amx") if {isa, f"{isa}_emulated"} <= {*ISAS}]


@pytest.fixture(autouse=True)
def one_thread():
    """Operands here are small: a test asks for the threads that it is about."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def specials(dtype):
    info = torch.finfo(dtype)
    huge, small = info.max, info.smallest_normal
    finite = [size for number in (huge, huge / 4, small, small / 4) for size in (number, -number)]
    return [torch.nan, torch.inf, -torch.inf, *finite, -0.0]


def integers(*shape, dtype):
    return torch.randint(-2, 3, shape).to(dtype)


def scattered(matrix, stored, numbers):
    """Puts them at places that are stored, no two of them in one row or one column."""
    rows, cols = set(), set()
    for row, col in stored.nonzero()[torch.randperm(int(stored.sum()))].tolist():
        if len(rows) == len(numbers):
            break
        if row not in rows and col not in cols:
            matrix[row, col] = numbers[len(rows)]
            rows.add(row), cols.add(col)
    return matrix


def layout_of(block_size):
    mask = torch.rand(64 // block_size, 96 // block_size) < 0.6
    mask[0], mask[1:, 0] = False, True  # a row without blocks
    return bs.BlockLayout(mask, block_size=block_size)


def operands(dtype, block_size, where):
    """x, grad, values, bias and the layout; `where` names the one of the first three that has special values."""
    layout = layout_of(block_size)
    stored = bs.to_dense(torch.ones(layout.values_shape), layout) != 0
    weight = integers(64, 96, dtype=dtype) * stored
    x, grad, bias = (integers(*shape, dtype=dtype) for shape in ((40, 96), (40, 64), (64,)))
    matrix = {"x": x, "grad": grad, "values": weight}[where]
    apart = (torch.arange(40) % 3 == 0)[:, None].expand(matrix.shape) if where != "values" else stored  # for three taps
    scattered(matrix, apart, specials(dtype))
    return x, grad, bs.from_dense(weight, layout), bias, layout


def linear(x, grad, values, bias, layout):
    plain, fused = (forward(x, values, layout, bias, activation) for activation in (None, "relu"))
    return plain, fused, dgrad(grad, values, layout), wgrad(grad, x, layout)


def conv(x, grad, values, bias, layout):
    """Rows are the positions of an image; the special values of a weight are at its first tap."""
    x, grad = (each.T.reshape(1, each.shape[1], -1).clone() for each in (x, grad))
    others = values.nan_to_num(1).clamp(-2, 2)
    values = torch.stack([values, others, others], -1)
    x, values = x.requires_grad_(), values.requires_grad_()
    y = bs.conv1d(x, values, layout, bias, padding=1, activation=None)
    return y.detach(), *torch.autograd.grad(y, (x, values), grad)


PRODUCTS = {"linear": linear, "conv": conv}
every_product = pytest.mark.parametrize("product", PRODUCTS)


def flushed(tensor):
    return torch.where(tensor.abs() < torch.finfo(tensor.dtype).smallest_normal, torch.zeros_like(tensor), tensor)


@every_product
@on_every_isa_in_its_dtypes
def test_special_values_are_those_of_the_reference(isa, dtype, product):
    function, slack = PRODUCTS[product], 16 * torch.finfo(dtype).smallest_normal
    cases = [operands(dtype, size, where) for size in (1, 2, 8, 32) for where in ("x", "grad", "values")]
    with running(f"cpu-{isa}"):
        found = [function(*case) for case in cases]
    with running("reference"):
        if dtype == torch.bfloat16:
            cases = [[*map(flushed, tensors), layout] for *tensors, layout in cases]
        expected = [function(*case) for case in cases]
    for got, right in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        # A subnormal number may be lost when added to an integer that another cancels.
        torch.testing.assert_close(got, right, rtol=0, atol=slack, equal_nan=True)
        assert not got.isnan().all()
    assert any(y.isnan().any() for y, *_ in found)


@every_product
@on_every_isa_in_its_dtypes
def test_empty_rows_are_the_activated_bias_for_any_input(isa, dtype, product):
    for block_size in (1, 8):
        x, grad, values, bias, layout = operands(dtype, block_size, "x")
        x.fill_(torch.nan)
        with running(f"cpu-{isa}"):
            got = PRODUCTS[product](x, grad, values, bias, layout)[0]
        rows = got[:, :block_size] if product == "linear" else got[0, :block_size].T
        assert torch.equal(rows, bias[:block_size].expand_as(rows))


# -- subnormal numbers ---------------------------------------------------------------------------------------------


def of_powers(dtype, block_size, x, grad, values):
    """Operands full of these powers of two, and a bias of zeros."""
    layout = layout_of(block_size)
    shapes = ((40, 96), x), ((40, 64), grad), (layout.values_shape, values)
    return (
        *(torch.full(shape, 2.0**power, dtype=dtype) for shape, power in shapes),
        torch.zeros(64, dtype=dtype),
        layout,
    )


@every_product
@pytest.mark.parametrize(("low", "other"), [(-130, 20), (-100, -32)], ids=["operands", "results"])
@on_every_isa
def test_subnormal_numbers_count_as_zero_in_products_of_bfloat16(isa, low, other, product):
    cases = {
        (low, other, other): (0, -1),  # x, grad, values: y and the gradient at values are 0
        (other, low, other): (-2, -1),
        (other, other, low): (0, -2),
    }
    with running(f"cpu-{isa}"):
        for block_size, threads, powers in itertools.product((1, 2, 32), (1, 2), cases):
            torch.set_num_threads(threads)
            results = PRODUCTS[product](*of_powers(torch.bfloat16, block_size, *powers))
            for index in cases[powers]:
                assert (results[index] == 0).all(), (block_size, threads, powers, index)


@on_every_isa
def test_a_subnormal_bias_of_bfloat16_counts_as_zero_and_a_normal_one_does_not(isa):
    for block_size, activation in itertools.product((1, 2, 32), (None, "relu")):
        x, _, values, bias, layout = of_powers(torch.bfloat16, block_size, 0, 0, 0)
        smallest = torch.finfo(torch.bfloat16).smallest_normal
        bias[0::2], bias[1::2] = smallest / 2, smallest
        with running(f"cpu-{isa}"):
            y = forward(x * 0, values, layout, bias, activation)
        assert (y[:, 0::2] == 0).all()
        assert (y[:, 1::2] == smallest).all()


@every_product
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=lambda dtype: str(dtype)[6:])
@on_every_isa
def test_other_dtypes_keep_subnormal_numbers(isa, dtype, product):
    power = {torch.float32: -140, torch.float64: -1060, torch.float16: -20}[dtype]
    for block_size in (1, 32):
        *tensors, layout = of_powers(dtype, block_size, power, power, 0)
        with running(f"cpu-{isa}"):
            y = PRODUCTS[product](*tensors, layout)[0]
        terms = bs.to_dense(torch.ones(layout.values_shape, dtype=torch.float64), layout).sum(1) * 2.0**power
        expected, got = (3 * terms, y[0, :, 5]) if product == "conv" else (terms, y[5])
        assert torch.equal(got, expected.to(dtype))


def flushes(count):
    """Which subnormal numbers count as 0 for PyTorch, on as many threads as it takes for them."""
    return torch.full((count,), 1e-40) * 1 == 0


@on_every_isa
def test_the_users_own_mode_is_as_before_on_every_thread(isa):
    torch.set_num_threads(2)
    tensors = of_powers(torch.bfloat16, 8, -130, -130, 20)
    x, grad, *others = of_powers(torch.float32, 8, -140, -140, 0)
    single = x.repeat(100, 1), grad.repeat(100, 1), *others  # enough for two threads
    with running(f"cpu-{isa}"):
        for product in PRODUCTS.values():
            product(*tensors)
            assert not flushes(1 << 17).any()
        kept = linear(*single)[0]
        assert torch.set_flush_denormal(True)
        for product in PRODUCTS.values():
            product(*tensors)
            assert flushes(1).all()
        # PyTorch sets the mode of the calling thread alone; a product takes it to its other threads.
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert (linear(*single)[0] == 0).all()
            assert flushes(1).all()
        torch.set_flush_denormal(False)
        torch.set_num_threads(2)
        assert not flushes(1 << 17).any()
        assert torch.equal(linear(*single)[0], kept)
        assert (kept != 0).any()


@on_every_isa
def test_float16_denormals_are_read_even_if_the_user_flushes(isa):
    tensors = of_powers(torch.float16, 8, -20, -20, 0)
    with running(f"cpu-{isa}"):
        expected = linear(*tensors)
        torch.set_flush_denormal(True)
        found = linear(*tensors)
    assert all(torch.equal(got, right) for got, right in zip(found, expected, strict=True))
    assert (found[0] != 0).any()


# -- what is done number by number ---------------------------------------------------------------------------------


@on_every_isa_in_its_dtypes
def test_gates_of_special_values(isa, dtype):
    numbers = torch.tensor([*specials(dtype), 0.0, 1.0, -90.0, 90.0], dtype=dtype)
    sums = SUM_DTYPES[dtype]
    # Each special value in each gate, with ones and with states that are special too.
    z = torch.ones(2 * 4 * len(numbers), 4, dtype=dtype)
    for gate in range(4):
        z.view(2, 4, -1, 4)[:, gate, :, gate] = numbers
    c = torch.cat(
        [
            torch.ones(len(z) // 2, 1),
            torch.tensor([[2.0], [torch.inf], [torch.nan], [-torch.inf]]).repeat(len(z) // 8, 1),
        ]
    )
    c = c.to(sums)
    found = {}
    for backend in (f"cpu-{isa}", "reference"):
        with running(backend):
            h, after, gates = torch.empty_like(c, dtype=dtype), torch.empty_like(c), torch.empty_like(z)
            lstm_gates.forward(z, None, None, c, h_out=h, c_out=after, gates_out=gates)
            found[backend] = h, after, gates
    for got, right in zip(*found.values(), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-2, atol=2e-38, equal_nan=True)
    zero = (z[:, 2] == 0) & z[:, 2].signbit()
    assert zero.any()
    assert gates[zero, 2].signbit().all()
    assert found[f"cpu-{isa}"][2][zero, 2].signbit().all()


@on_every_isa_in_its_dtypes
def test_dropout_of_special_values_has_the_same_bits(isa, dtype):
    x = torch.tensor(specials(dtype), dtype=dtype).repeat(100)
    factors = dropout.factors_of(2**15, -0.5)
    found = {}
    for backend in (f"cpu-{isa}", "reference"):
        with running(backend):
            y, code = dropout.forward(x, factors, 3, 2**15)
            found[backend] = y, code, dropout.backward(x, code, factors)
    for got, right in zip(*found.values(), strict=True):
        assert torch.equal(got.isnan(), right.isnan())
        assert torch.equal(got.nan_to_num(5), right.nan_to_num(5))
        assert torch.equal(got.signbit() & ~got.isnan(), right.signbit() & ~right.isnan())


@on_every_isa_in_its_dtypes
def test_momentum_of_special_values(isa, dtype):
    numbers = torch.tensor(specials(dtype), dtype=dtype)
    weight, velocity, grad = (each.flatten() for each in torch.meshgrid(numbers, numbers, numbers, indexing="ij"))
    after = 0.5 * velocity.double() - 0.25 * grad.double()
    expected = after, 0.5 * weight.double() + after
    with running(f"cpu-{isa}"):
        momentum.step([weight], [velocity], [grad], momentum=0.5, rate=0.25, keep=0.5)
    for got, right in zip((velocity, weight), expected, strict=True):
        slack = torch.finfo(dtype).smallest_normal
        torch.testing.assert_close(got, right.to(dtype), rtol=1e-2, atol=slack, equal_nan=True)


# -- the same bits -------------------------------------------------------------------------------------------------


@every_product
@on_every_isa_in_its_dtypes
def test_the_same_bits_each_time_and_on_any_number_of_threads(isa, dtype, product):
    for block_size in (1, 2, 8, 32):
        layout = layout_of(block_size)
        x, grad, bias = (torch.randn(shape).to(dtype) for shape in ((200, 96), (200, 64), (64,)))
        values = torch.randn(layout.values_shape).to(dtype)
        with running(f"cpu-{isa}"):
            assert_same_bits(partial(PRODUCTS[product], x, grad, values, bias, layout), (1, 2, 2))


@every_product
@pytest.mark.skipif(not PAIRED, reason="no instructions for bfloat16 pairs here, or none emulated")
@pytest.mark.parametrize(("isa", "emulated"), PAIRED)
def test_emulated_instructions_give_the_bits_of_the_real_ones(isa, emulated, product):
    for block_size in (2, 8, 32):
        layout = layout_of(block_size)
        x, grad, bias = (torch.randn(shape).bfloat16() for shape in ((200, 96), (200, 64), (64,)))
        values = torch.randn(layout.values_shape).bfloat16()
        found = []
        for name in (isa, emulated):
            with running(f"cpu-{name}"):
                found.append(PRODUCTS[product](x, grad, values, bias, layout))
        assert all(torch.equal(real, like) for real, like in zip(*found, strict=True))


FIRST_PRODUCT = """
import torch
import blocksparse as bs
from blocksparse.ops.linear.op import LINEAR, LINEAR_WGRAD

torch.set_num_threads(3)
layout = bs.patterns.random((128, 128), block_size=16, density=0.5, seed=0)
x, values = torch.ones(100, 128, dtype=torch.bfloat16), torch.ones(layout.values_shape, dtype=torch.bfloat16)
"""


@pytest.mark.parametrize(
    "product",
    ["LINEAR_WGRAD.compute((x, x), layout, ())", "LINEAR.compute((x, values, None), layout, (False, None))"],
    ids=["wgrad", "linear"],
)
def test_threads_that_a_product_starts_do_not_inherit_its_mode(product, tmp_path):
    script = tmp_path / "script.py"
    flushes = "print((torch.full((1 << 17,), 1e-40) * 1 == 0).any().item())"
    script.write_text(f"{FIRST_PRODUCT}{product}\n{flushes}\n")
    assert run_script(1, script, folder=tmp_path).split() == ["False"]
