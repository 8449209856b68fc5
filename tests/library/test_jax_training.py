"""Sparse training of `blocksparse.jax`, its layers for Equinox and Flax, and checkpoints that both front ends load."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import blocksparse as bs

jax = pytest.importorskip("jax", reason="blocksparse.jax needs JAX: pip install jax")
pytest.importorskip("blocksparse._core", reason="the compiled core is not there")

import jax.numpy as jnp  # noqa: E402

import blocksparse.jax as bsj  # noqa: E402

LAYOUT = bs.patterns.random((24, 32), block_size=(2, 4), density=0.3, seed=0)


def drawn(layout=LAYOUT, seed=0):
    return bsj.layout(layout), jax.random.normal(jax.random.key(seed), layout.values_shape, jnp.float32)


def check_step(old, values, fraction, new, new_values, source):
    """Check what SET and RigL have in common; return the blocks that were dropped and those that grew."""
    before, after = old.block_layout(), new.block_layout()
    assert after.nnz == before.nnz
    stays = np.asarray(source) >= 0
    count = min(round(fraction * before.nnz), before.grid[0] * before.grid[1] - before.nnz)
    assert (~stays).sum() == count
    dropped = np.setdiff1d(np.arange(before.nnz), source[stays])
    norms = np.linalg.norm(np.asarray(values), axis=(1, 2))
    assert set(dropped) == set(np.argsort(norms, kind="stable")[:count])
    assert np.array_equal(after.keys_of_blocks()[stays], before.keys_of_blocks()[source[stays]])
    assert not np.isin(after.keys_of_blocks()[~stays], before.keys_of_blocks()).any()
    assert np.array_equal(new_values[stays], values[source[stays]])
    assert not np.asarray(new_values)[~stays].any()
    return before.keys_of_blocks()[dropped], after.keys_of_blocks()[~stays]


@pytest.mark.parametrize("fraction", [0, 0.3, 0.5, 1])
@pytest.mark.parametrize("density", [0.3, 0.9, 1.0])
def test_set_moves_the_smallest_blocks(fraction, density):
    old, values = drawn(bs.patterns.random((24, 32), block_size=(2, 4), density=density, seed=0))
    new_values, new, source = jax.jit(bsj.set_step)(jax.random.key(1), values, old, fraction)
    check_step(old, values, fraction, new, new_values, source)


def test_rigl_grows_where_the_gradient_is_largest():
    old, values = drawn()
    grad = jax.random.normal(jax.random.key(3), LAYOUT.shape)
    new_values, new, source = bsj.rigl_step(values, grad, old, 0.4)
    _, grown = check_step(old, values, 0.4, new, new_values, source)
    norms = np.linalg.norm(np.asarray(grad).reshape(12, 2, 8, 4), axis=(1, 3)).ravel()
    free = np.setdiff1d(np.arange(96), LAYOUT.keys_of_blocks())
    assert set(grown) == set(free[np.argsort(-norms[free])[: len(grown)]])
    nan_values, nan_layout, nan_source = bsj.rigl_step(values, grad * jnp.nan, old, 0.4)
    check_step(old, values, 0.4, nan_layout, nan_values, nan_source)


def test_steps_under_jit_cause_no_new_trace():
    traces = []

    @jax.jit
    def step(key, values, layout, fraction):
        traces.append(layout)
        return bsj.set_step(key, values, layout, fraction)

    layout, values = drawn()
    for i, fraction in enumerate((0.3, 0.2, 0.1)):
        old, old_values = layout, values
        values, layout, source = step(jax.random.key(i), values + 1, layout, fraction)
        check_step(old, old_values + 1, fraction, layout, values, source)
    assert len(traces) == 1


def test_the_state_of_an_optimizer_follows():
    optax = pytest.importorskip("optax")
    layout, values = drawn()
    parameters = {"values": values, "bias": jnp.ones(24)}
    optimizer = optax.adam(0.1)
    gradients = jax.tree.map(jnp.ones_like, parameters)
    _, state = optimizer.update(gradients, optimizer.init(parameters))
    _, _, source = bsj.set_step(jax.random.key(0), values, layout, 0.5)
    after = bsj.follow(state, layout.values_shape, source)
    assert jnp.array_equal(after[0].mu["values"][:, 0, 0] > 0, source >= 0)
    assert jnp.array_equal(after[0].mu["bias"], state[0].mu["bias"])
    assert after[0].count == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda key, values, layout: bsj.set_step(key, values, layout, 1.5), r"^fraction: expected a number from 0"),
        (lambda key, values, layout: bsj.set_step(key, values, layout, "half"), r"^fraction: expected .* got 'half'"),
        (lambda key, values, layout: bsj.set_step(key, values, layout, jnp.float32(2)), r"^fraction: .* got 2\.0"),
        (lambda key, values, layout: bsj.set_step(key, values[1:], layout), r"^values: expected shape"),
        (lambda key, values, layout: bsj.set_step(key, values, LAYOUT), r"^layout: expected a pytree"),
        (lambda key, values, layout: bsj.rigl_step(values, values, layout), r"^grad: expected shape \(24, 32\)"),
        (lambda key, values, layout: bsj.set_step(key, values.astype(int), layout), r"^values: expected one of"),
        (lambda key, values, layout: bsj.follow({}, values.shape, jnp.zeros(3, int)), r"^source: expected ints \["),
        (lambda key, values, layout: bsj.follow({}, (2, 1, 1), jnp.array([0, 2])), r"^source: expected ints from -1"),
        (lambda key, values, layout: bsj.follow({}, 5, jnp.array([0])), r"^shape: expected layout"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call, message):
    layout, values = drawn()
    with pytest.raises(bs.BlockSparseError, match=message):
        call(jax.random.key(0), values, layout)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, 2, float("nan")])
def test_a_traced_fraction_out_of_range_makes_the_values_nan(fraction):
    layout, values = drawn()
    values, layout, source = jax.jit(bsj.set_step)(jax.random.key(0), values, layout, fraction)
    assert jnp.isnan(values).all()
    assert (source == jnp.arange(layout.nnz)).all()


@pytest.mark.parametrize("col", [0, -1, 32])
@pytest.mark.parametrize(
    "call",
    [
        lambda values, layout: bsj.to_dense(values, layout),
        lambda values, layout: bsj.from_dense(jnp.ones(layout.shape), layout),
        lambda values, layout: bsj.set_step(jax.random.key(0), values, layout),
        lambda values, layout: bsj.rigl_step(values, jnp.ones(layout.shape), layout),
    ],
)
def test_indices_that_a_caller_replaced_are_checked(call, col):
    layout, values = drawn()
    damaged = dataclasses.replace(layout, col=jnp.full_like(layout.col, col))
    with pytest.raises(bs.BlockSparseError):
        call(values, damaged)


# -- layers --------------------------------------------------------------------------------------------------------


def equinox_layer(**options):
    pytest.importorskip("equinox")
    from blocksparse.jax.equinox import Linear

    return Linear(32, 24, key=jax.random.key(0), **options)


def nnx_layer(**options):
    nnx = pytest.importorskip("flax.nnx")
    from blocksparse.jax.nnx import Linear

    return Linear(32, 24, rngs=nnx.Rngs(0), **options)


LAYERS = pytest.mark.parametrize("make", [equinox_layer, nnx_layer])


@LAYERS
def test_layers_refuse_layouts_of_other_sizes(make):
    layer = make(block_size=4)
    replace = layer.replaced if hasattr(layer, "replaced") else layer.replace
    for shape, block in (((64, 32), 4), ((24, 32), 8)):
        layout = bsj.layout(bs.patterns.dense(shape, block))
        with pytest.raises(bs.BlockSparseError, match=r"^layout: expected shape \(24, 32\) in blocks of \(4, 4\)"):
            replace(layout, jnp.ones(layout.values_shape))
    with pytest.raises(bs.BlockSparseError, match=r"^values: expected shape"):
        replace(layer.layout, jnp.ones((1, 4, 4)))
    with pytest.raises(bs.BlockSparseError, match=r"^layout: expected a pytree"):
        replace(LAYOUT, jnp.ones(LAYOUT.values_shape))


@pytest.mark.parametrize("step", [bsj.set_step, bsj.rigl_step])
def test_steps_and_gradients_follow_strict_promotion(step):
    layout, values = drawn()
    first = values if step is bsj.rigl_step else jax.random.key(0)
    second = jnp.ones(layout.shape, jnp.bfloat16) if step is bsj.rigl_step else values.astype(jnp.bfloat16)
    first = first.astype(jnp.bfloat16) if step is bsj.rigl_step else first
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        step(first, second, layout)
        jax.grad(lambda bias: bsj.linear(jnp.ones((3, 32)), values, layout, bias, "relu").sum())(jnp.ones(24))


@LAYERS
def test_a_layer_computes_what_the_function_does(make):
    layer, x = make(layout=LAYOUT, activation="relu"), jnp.ones((2, 5, 32), jnp.float32)
    state = layer.state_dict()
    expected = jax.nn.relu(x @ bsj.to_dense(state["values"], layer.layout).T + state["bias"])
    assert jnp.allclose(layer(x), expected, atol=1e-6)
    fan_in = np.diff(LAYOUT.row_start)[LAYOUT.row_of_block] * 4
    largest = jnp.abs(state["values"]).max((1, 2))
    assert (largest <= 1 / np.sqrt(fan_in)).all()
    assert (largest > 0.3 / np.sqrt(fan_in)).all()
    assert "bias" not in make(density=0.5, block_size=8, use_bias=False).state_dict()
    assert make(block_size=8).layout.density == 1


@LAYERS
def test_layers_pad_sizes_to_whole_blocks(make):
    layer = make(density=0.5, block_size=(9, 10), activation="silu")
    state, x = layer.state_dict(), jax.random.normal(jax.random.key(1), (2, 5, 32), jnp.float32)
    weight = bsj.to_dense(state["values"], layer.layout)
    assert weight.shape == (27, 40)
    assert not jnp.any(weight[24:])
    assert not jnp.any(weight[:, 32:])
    assert 0.4 < layer.layout.density < 0.6
    expected = jax.nn.silu(x @ weight[:24, :32].T + state["bias"])
    assert jnp.allclose(layer(x), expected, atol=1e-6)
    model = bs.nn.Linear(32, 24, density=0.5, block_size=(9, 10), activation="silu")
    model.load_state_dict({name: torch.tensor(np.asarray(each)) for name, each in state.items()})
    torch.testing.assert_close(model(torch.tensor(np.asarray(x))), torch.tensor(np.asarray(layer(x))))
    with pytest.raises(bs.BlockSparseError, match=r"^x: expected \[\.\.\., 32\], got \(3, 40\)"):
        layer(jnp.ones((3, 40)))


@LAYERS
def test_a_checkpoint_loads_in_the_other_front_end(make, tmp_path):
    safetensors = pytest.importorskip("safetensors.flax")
    from safetensors.torch import load_file, save_file

    layer, path = make(layout=LAYOUT), str(tmp_path / "layer.safetensors")
    safetensors.save_file(layer.state_dict("0."), path)
    model = torch.nn.Sequential(bs.nn.Linear(32, 24, density=0.3, block_size=(2, 4)))
    model.load_state_dict(load_file(path))
    x = torch.randn(5, 32)
    assert model[0].layout == LAYOUT
    assert torch.equal(model(x), torch.tensor(jax.device_get(layer(jnp.asarray(x.numpy())))))

    other = torch.nn.Sequential(bs.nn.Linear(32, 24, layout=bs.patterns.random((24, 32), (2, 4), 0.5, seed=3)))
    save_file(other.state_dict(), path)
    layer = layer.load_state_dict(safetensors.load_file(path), "0.") or layer  # Equinox returns another layer
    assert layer.layout.block_layout() == other[0].layout
    assert torch.equal(other(x), torch.tensor(jax.device_get(layer(jnp.asarray(x.numpy())))))


@LAYERS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": None}, r"^state: expected crow_indices, .* got none of the name 'values'"),
        ({"values": jnp.ones((3, 2, 4))}, r"^values: expected float32 \["),
        ({"bias": jnp.ones(24, jnp.bfloat16)}, r"^bias: expected float32 \[24\], got bfloat16"),
        ({"crow_indices": jnp.zeros(4, int)}, "crow_indices: expected"),
    ],
)
def test_a_state_that_does_not_fit_is_named(make, change, message):
    layer = make(layout=LAYOUT)
    state = {name: each for name, each in (layer.state_dict() | change).items() if each is not None}
    with pytest.raises(bs.BlockSparseError, match=message):
        layer.load_state_dict(state)


@LAYERS
def test_a_bias_is_not_dropped(make):
    with pytest.raises(bs.BlockSparseError, match="state: expected no bias"):
        make(layout=LAYOUT, use_bias=False).load_state_dict(make(layout=LAYOUT).state_dict())


@LAYERS
def test_arguments_of_layers_are_checked(make):
    for options, message in (
        ({"layout": LAYOUT.T}, r"^layout: expected shape \(24, 32\)"),
        ({"layout": LAYOUT, "density": 0.5}, r"^density: expected None if a layout is given"),
        ({"block_size": 0}, r"^block_size: expected"),
        ({"layout": 3}, "^layout: expected a BlockLayout"),
    ):
        with pytest.raises(bs.BlockSparseError, match=message):
            make(**options)


def test_a_random_layout_under_jit_is_named():
    eqx = pytest.importorskip("equinox")
    from blocksparse.jax.equinox import Linear

    with pytest.raises(bs.BlockSparseError, match="outside of jit"):
        eqx.filter_jit(lambda key: Linear(32, 24, density=0.5, block_size=8, key=key))(jax.random.key(0))


def test_equinox_trains_values_and_leaves_indices():
    eqx, optax = pytest.importorskip("equinox"), pytest.importorskip("optax")
    layer, x, optimizer = equinox_layer(layout=LAYOUT), jnp.ones((4, 32), jnp.float32), optax.sgd(0.1)
    state = optimizer.init(eqx.filter(layer, eqx.is_inexact_array))

    @eqx.filter_jit
    def train(layer, state):
        loss, grads = eqx.filter_value_and_grad(lambda layer: (layer(x) ** 2).mean())(layer)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(layer, updates), state, loss

    layer, state, first = train(layer, state)
    values, layout, source = bsj.set_step(jax.random.key(0), layer.values, layer.layout)
    layer, state = layer.replaced(layout, values), bsj.follow(state, layout.values_shape, source)
    for _ in range(5):
        layer, state, last = train(layer, state)
    assert last < first
    assert layer.layout.block_layout() == layout.block_layout()


def test_nnx_trains_values_and_leaves_indices():
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    layer, x = nnx_layer(layout=LAYOUT), jnp.ones((4, 32), jnp.float32)
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def train(layer, optimizer):
        loss, grads = nnx.value_and_grad(lambda layer: (layer(x) ** 2).mean())(layer)
        optimizer.update(layer, grads)
        return loss

    first = train(layer, optimizer)
    values, layout, _ = bsj.set_step(jax.random.key(0), layer.values[...], layer.layout)
    layer.replace(layout, values)
    for _ in range(5):
        last = train(layer, optimizer)
    assert last < first
    assert layer.layout.block_layout() == layout.block_layout()
