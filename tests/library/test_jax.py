"""The products of `blocksparse.jax`: the contract of the linear op, and JAX's transformations of it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

import blocksparse as bs
from linear_backends import CPU, Expected, assert_close, bound, cases, running
from linear_cases import BLOCK_SIZES, PRODUCTS, strided

jax = pytest.importorskip("jax", reason="blocksparse.jax needs JAX: pip install jax")
pytest.importorskip("blocksparse._core", reason="the compiled core is not there")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import blocksparse.jax as bsj  # noqa: E402
from blocksparse.jax import primitives  # noqa: E402

LAYOUT = bs.patterns.random((12, 15), (2, 3), density=0.4, seed=0)


@pytest.fixture(autouse=True, scope="module")
def float64():
    """Enable float64 for this module only, because examples in docstrings show float32."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def to_jax(tensor):
    bits = tensor.detach().contiguous().view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else None
    return jnp.asarray(tensor.detach().numpy()) if bits is None else jnp.asarray(bits).view(jnp.bfloat16)


def to_torch(array):
    if array.dtype == jnp.bfloat16:
        return to_torch(array.view(jnp.int16)).view(torch.bfloat16)
    return torch.tensor(jax.device_get(array))


def normal(*shape, dtype=jnp.float64, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


# -- the contract --------------------------------------------------------------------------------------------------


def check_products(backend, layout, tokens, dtype, activation=None, with_bias=True, strides="contiguous"):
    out_features, in_features = layout.shape
    x, grad = strided(tokens, in_features, dtype, strides), torch.randn(tokens, out_features, dtype=dtype)
    values = torch.randn(layout.values_shape, dtype=dtype)
    bias = [torch.randn(out_features, dtype=dtype)] if with_bias else []
    expected = Expected(lambda x, values, *bias: F.linear(x, bs.to_dense(values, layout), *bias), [x, values, *bias],
                        activation)  # fmt: skip
    gradients = expected.gradients(grad)
    jax_layout, most = bsj.layout(layout), bound(backend, dtype)
    x, values, grad, *bias = map(to_jax, (x, values, grad, *bias))

    @jax.jit
    def products(x, values, layout, grad, *bias):
        y = bsj.linear(x, values, layout, *bias, activation=activation)
        _, pull_back = jax.vjp(lambda x, values, *bias: bsj.linear(x, values, layout, *bias), x, values, *bias)
        return y, pull_back(grad), bsj.linear_transposed(grad, values, layout)

    y, gradients_got, dgrad = products(x, values, jax_layout, grad, *bias)
    assert_close(to_torch(y), expected.y, most, "forward", expected.terms)
    for name, got, (right, terms) in zip(("x", "values", "bias"), gradients_got, gradients, strict=False):
        assert_close(to_torch(got), right, most, name, terms)
    assert_close(to_torch(dgrad), gradients[0][0], most, "transposed", gradients[0][1])


@pytest.mark.parametrize(("backend", "dtype"), cases(CPU))
@settings(max_examples=8)
@given(**PRODUCTS)
def test_products_agree_with_float64(backend, dtype, seed, **drawn):
    torch.manual_seed(seed)
    with running(backend):
        check_products(backend, dtype=dtype, **drawn)


@pytest.mark.parametrize("block", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize("backend", CPU)
def test_every_block_size(backend, block):
    out_block, in_block = block if isinstance(block, tuple) else (block, block)
    layout = bs.patterns.random((5 * out_block, 7 * in_block), block, density=0.5, seed=1)
    with running(backend):
        for dtype in (torch.float32, torch.bfloat16):
            check_products(backend, layout, 150, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("block", "tokens"), [(32, 5), (32, 300), ((12, 20), 40), (1, 33)])
def test_both_front_ends_return_the_same_bits(block, tokens, dtype):
    out_block, in_block = block if isinstance(block, tuple) else (block, block)
    layout = bs.patterns.random((16 * out_block, 20 * in_block), block, density=0.2, seed=1)
    x, values = torch.randn(tokens, layout.shape[1], dtype=dtype), torch.randn(layout.values_shape, dtype=dtype)
    bias = torch.randn(layout.shape[0], dtype=dtype)
    got = bsj.linear(*map(to_jax, (x, values)), bsj.layout(layout), to_jax(bias), "silu")
    assert torch.equal(to_torch(got), bs.linear(x, values, layout, bias, "silu"))
    grad = torch.randn(tokens, layout.shape[0], dtype=dtype)
    leaves = x.requires_grad_(), values.requires_grad_()
    expected = torch.autograd.grad(bs.linear(*leaves, layout), leaves, grad)
    pull_back = jax.vjp(lambda x, values: bsj.linear(x, values, bsj.layout(layout)), *map(to_jax, leaves))[1]
    assert all(torch.equal(to_torch(a), b) for a, b in zip(pull_back(to_jax(grad)), expected, strict=True))


def test_nan_reaches_connected_outputs_only():
    layout = bs.BlockLayout([[True, False], [True, True]], block_size=16)
    x = normal(20, 32, dtype=jnp.float32).at[3, 20].set(jnp.nan)
    y = bsj.linear(x, normal(*layout.values_shape, dtype=jnp.float32), bsj.layout(layout), activation="silu")
    assert jnp.isnan(y).sum() == 16
    assert jnp.isnan(y[3, 16:]).all()


@pytest.mark.parametrize("shape", [(15,), (3, 15), (2, 5, 15), (2, 0, 15), (0, 15)], ids=str)
def test_batch_shapes(shape):
    layout, x = bsj.layout(LAYOUT), normal(*shape)
    values = normal(*layout.values_shape)
    expected = x @ bsj.to_dense(values, layout).T
    assert jnp.allclose(bsj.linear(x, values, layout), expected)
    assert bsj.linear(x, values, layout).shape == expected.shape


def test_dense_weights_come_back():
    layout, weight = bsj.layout(LAYOUT), torch.randn(LAYOUT.shape)
    values = bsj.from_dense(to_jax(weight), layout)
    assert torch.equal(to_torch(values), bs.from_dense(weight, LAYOUT))
    assert torch.equal(to_torch(bsj.to_dense(values, layout)), bs.to_dense(to_torch(values), LAYOUT))
    assert jnp.array_equal(jax.grad(lambda weight: bsj.from_dense(weight, layout).sum())(to_jax(weight)) > 0,
                           bsj.to_dense(jnp.ones(layout.values_shape), layout) > 0)  # fmt: skip


# -- derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [pytest.param((1, 1), marks=pytest.mark.full), (2, 3)], ids=str)
def test_derivatives_of_order_3_in_both_modes(block):
    layout = bs.patterns.random((2 * block[0], 3 * block[1]), block, density=0.6, seed=0)
    x, values = normal(2, layout.shape[1]), normal(*layout.values_shape, seed=1)
    check_grads(jax.jit(partial(bsj.linear, layout=bsj.layout(layout))), (x, values), 3, ("fwd", "rev"))
    if block != (1, 1):
        bias = normal(layout.shape[0], seed=2)
        fused = lambda x, values, bias: bsj.linear(x, values, bsj.layout(layout), bias, "silu")  # noqa: E731
        check_grads(jax.jit(fused), (x, values, bias), 2, ("fwd", "rev"))
        transposed = partial(bsj.linear_transposed, layout=bsj.layout(layout))
        check_grads(jax.jit(transposed), (x[:, :4], values), 2, ("fwd", "rev"))


def test_products_with_an_activation_have_no_transpose():
    with pytest.raises(bs.BlockSparseError, match=r"^A product with the activation 'relu' has no transpose"):
        jax.linear_transpose(lambda x: bsj.linear(x, VALUES, GOOD, None, "relu"), X)(jnp.ones((len(X), 12)))


def test_hessian_is_that_of_the_dense_weight():
    layout = bsj.layout(LAYOUT)
    x, values = normal(3, 15), normal(*layout.values_shape, seed=1)
    hessian = jax.jit(jax.hessian(lambda values: jnp.tanh(bsj.linear(x, values, layout)).sum()))(values)
    dense = jax.jit(jax.hessian(lambda values: jnp.tanh(x @ bsj.to_dense(values, layout).T).sum()))(values)
    assert jnp.allclose(hessian, dense)


# -- transformations -----------------------------------------------------------------------------------------------


def stacked_layouts():
    """Return three layouts and their stack; the second one has the row starts of the first, and other columns."""
    first, last = (bs.patterns.random((12, 15), (2, 3), density=0.4, seed=seed) for seed in range(2))
    mirrored = bs.BlockLayout(first.mask().flip(1), first.block_shape)
    layouts = [bsj.layout(layout) for layout in (first, mirrored, last)]
    return layouts, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layouts)


@pytest.mark.parametrize("operands", ["x", "values", "bias", "layout", "x values", "x bias", "all"])
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
def test_vmap_over_any_operands(operands, transposed):
    layouts, stack = stacked_layouts()
    size = 12 if transposed else 15
    batches = {"x": normal(3, 4, size), "values": normal(3, *layouts[0].values_shape, seed=1), "bias": normal(3, 12)}
    mapped = ["x", "values", "bias", "layout"] if operands == "all" else operands.split()
    arguments = [batches[name] if name in mapped else batches[name][0] for name in batches]
    arguments.append(stack if "layout" in mapped else layouts[0])
    axes = [0 if name in mapped else None for name in ("x", "values", "bias", "layout")]

    def product(x, values, bias, layout):
        if transposed:
            return bsj.linear_transposed(x, values, layout) + bias[0]
        return bsj.linear(x, values, layout, bias, "relu")

    def gradient(*arguments):
        return jax.grad(lambda x, values: (product(x, values, *arguments[2:]) ** 2).sum(), (0, 1))(*arguments[:2])

    def slice_of(i):
        pairs = zip(arguments, axes, strict=True)
        return [each if axis is None else layouts[i] if each is stack else each[i] for each, axis in pairs]

    for function in (product, gradient):
        got = jax.jit(jax.vmap(function, axes))(*arguments)
        slices = map(jax.jit(function), *zip(*map(slice_of, range(3)), strict=True))
        expected = jax.tree.map(lambda *leaves: np.stack(leaves), *slices)
        assert jax.tree.all(jax.tree.map(jnp.allclose, got, expected))


def test_nested_vmap_scan_and_checkpoint():
    layout = bsj.layout(LAYOUT)
    x, values = normal(3, 4, 15), normal(2, *layout.values_shape, seed=1)
    every = jax.vmap(jax.vmap(lambda x, values: bsj.linear(x, values, layout), (0, None)), (None, 0))(x, values)
    for i in range(2):
        assert jnp.allclose(every[i], bsj.linear(x, values[i], layout))

    def loss(values, wrap):
        step = wrap(lambda total, values: (total + jnp.tanh(bsj.linear(x, values, layout)).sum(), None))
        return jax.lax.scan(step, 0.0, values)[0]

    plain, saved = (jax.grad(loss)(values, wrap) for wrap in (lambda step: step, jax.checkpoint))
    unrolled = jax.grad(lambda values: sum(jnp.tanh(bsj.linear(x, each, layout)).sum() for each in values))(values)
    assert jnp.allclose(plain, unrolled)
    assert jnp.allclose(saved, unrolled)


def test_vmap_over_an_axis_of_size_0():
    x, values = jnp.ones((2, 15)), jnp.ones((3, 0, *GOOD.values_shape))
    product = partial(bsj.linear, x, layout=GOOD)
    assert jax.vmap(product)(values[0]).shape == (0, 2, 12)
    assert jax.vmap(jax.vmap(product))(values).shape == (3, 0, 2, 12)
    gradient = jax.grad(lambda values: product(values).sum())
    assert jax.vmap(gradient)(values[0]).shape == (0, *GOOD.values_shape)


def test_disable_jit():
    x, values = jnp.ones((2, 15)), jnp.ones(GOOD.values_shape)
    gradient = jax.grad(lambda values: (bsj.linear(x, values, GOOD, activation="relu") ** 2).sum())
    expected = gradient(values)
    with jax.disable_jit():
        assert np.array_equal(gradient(values), expected)


def test_a_layout_of_other_leaves_has_a_repr():
    assert repr(jax.tree.map(lambda _: None, GOOD)) == "Layout(shape=(12, 15), block_size=(2, 3), None, None)"
    assert repr(jax.tree.map(jax.typeof, GOOD)) == repr(GOOD)


def test_another_layout_uses_the_same_program():
    traces = []

    @jax.jit
    def product(x, values, layout):
        traces.append(layout)
        return bsj.linear(x, values, layout)

    layouts, _ = stacked_layouts()
    x, values = normal(4, 15), normal(*layouts[0].values_shape)
    for layout in layouts:
        assert jnp.allclose(product(x, values, layout), x @ bsj.to_dense(values, layout).T)
    assert len(traces) == 1


def test_exported_functions_accept_layouts():
    targets = "blocksparse_xla_linear", "blocksparse_xla_linear_wgrad"
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    layouts, _ = stacked_layouts()
    x, values, (batch,) = normal(4, 15), normal(*layouts[0].values_shape), jax.export.symbolic_shape("batch")
    inputs = jax.ShapeDtypeStruct((batch, 15), x.dtype)
    exported = jax.export.export(jax.jit(bsj.linear), disabled_checks=checks)(inputs, values, layouts[0])
    product = jax.export.deserialize(exported.serialize(vjp_order=1)).call
    for layout in layouts:
        assert jnp.array_equal(product(x, values, layout), bsj.linear(x, values, layout))
    gradient, expected = (
        jax.grad(lambda values, call=call: (call(x, values, layout) ** 2).sum())(values)
        for call in (product, bsj.linear)
    )
    assert jnp.allclose(gradient, expected)


def test_a_layout_survives_a_round_trip():
    layout = bsj.layout(LAYOUT)
    assert layout.block_layout() == LAYOUT
    assert (layout.shape, layout.nnz, layout.density) == (LAYOUT.shape, LAYOUT.nnz, LAYOUT.density)
    assert layout.row_of_block().tolist() == LAYOUT.row_of_block.tolist()
    assert repr(layout).startswith("Layout(shape=(12, 15), block_size=(2, 3), nnz=")


# -- bad input -----------------------------------------------------------------------------------------------------

GOOD = bsj.layout(LAYOUT)
X, VALUES = np.ones((4, 15)), np.ones(GOOD.values_shape)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": X[:, :14]}, r"^x: expected \[\.\.\., 15\] for Layout.*got \(4, 14\)"),
        ({"x": "text"}, "^x: expected an array, got str"),
        ({"x": jnp.float32(1)}, r"^x: expected .* got \(\)"),
        ({"values": VALUES[1:]}, "^values: expected shape"),
        ({"values": VALUES.astype(jnp.float32)}, "^dtypes: expected one of float32, .* x float64 and values float32"),
        ({"x": X.astype(int), "values": VALUES.astype(int)}, "^dtypes: expected"),
        ({"layout": LAYOUT}, r"^layout: expected a pytree: write blocksparse.jax.layout\(layout\)"),
        ({"layout": None}, "^layout: expected a blocksparse.jax.Layout, got NoneType"),
        ({"layout": bsj.Layout(GOOD.row_start[1:], GOOD.col, GOOD.grid, GOOD.block_shape)}, "^layout.row_start: exp"),
        ({"layout": bsj.Layout(GOOD.row_start, GOOD.col * 1.0, GOOD.grid, GOOD.block_shape)}, "^layout.col: expected"),
        ({"bias": jnp.ones(11)}, r"^bias: expected float64 \[12\]"),
        ({"activation": "tanh"}, r"^activation: expected one of \[None, 'relu', 'gelu', 'silu'\], got 'tanh'"),
        ({"activation": ["relu"]}, r"^activation: expected one of"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        bsj.linear(**{"x": X, "values": VALUES, "layout": GOOD} | arguments)


@pytest.mark.parametrize(
    "layout",
    [
        bsj.Layout(GOOD.row_start, GOOD.col + 100, GOOD.grid, GOOD.block_shape),
        bsj.Layout(GOOD.row_start, GOOD.col - 1, GOOD.grid, GOOD.block_shape),
        bsj.Layout(GOOD.row_start.at[1].set(-5), GOOD.col, GOOD.grid, GOOD.block_shape),
        bsj.Layout(GOOD.row_start[::-1], GOOD.col, GOOD.grid, GOOD.block_shape),
        bsj.Layout(GOOD.row_start.at[-1].add(1), GOOD.col, GOOD.grid, GOOD.block_shape),
        bsj.Layout(GOOD.row_start, GOOD.col * 0, GOOD.grid, GOOD.block_shape),
    ],
)
def test_indices_out_of_range_are_refused(layout):
    # JAX chooses the class of the error.
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"the compiled core: expected"):
        jax.block_until_ready(bsj.linear(X, VALUES, layout))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"the compiled core: expected"):
        jax.block_until_ready(jax.grad(lambda values: bsj.linear_transposed(X[:, :12], values, layout).sum())(VALUES))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_arrays_are_named():
    values = jnp.asarray(VALUES) + 1
    jax.jit(lambda values: values + 1, donate_argnums=0)(values)
    with pytest.raises(bs.BlockSparseError, match=r"^values: expected an array with memory"):
        bsj.linear(X, values, GOOD)
    assert jnp.allclose(
        jax.jit(bsj.linear, donate_argnums=0)(jnp.asarray(X) + 0, VALUES, GOOD), bsj.linear(X, VALUES, GOOD)
    )


def test_a_jax_that_refuses_the_handlers_is_named(monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("API version 2.0")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    with pytest.raises(
        bs.BlockSparseError, match=r"^JAX \d.* version 0\.1 of XLA's .*API version 2\.0.* install another"
    ):
        primitives._register(primitives.linear_p, "xla_linear")


def test_layouts_have_to_be_block_layouts_that_int32_counts():
    with pytest.raises(bs.BlockSparseError, match=r"^layout: expected a BlockLayout, got tuple"):
        bsj.layout(())
    with pytest.raises(bs.BlockSparseError, match=r"^layout: expected below 2\^31"):
        bsj.layout(bs.BlockLayout.from_indices([0], [0], (1, 2**31), 1))
    with pytest.raises(bs.BlockSparseError, match=r"^block_layout\(\) reads the indices, which jit traces"):
        jax.jit(lambda layout: layout.block_layout().nnz)(GOOD)
