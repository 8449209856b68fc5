"""`blocksparse.jax` in processes of its own: without PyTorch, on several devices, and on many threads at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax", reason="blocksparse.jax needs JAX: pip install jax")
pytest.importorskip("blocksparse._core", reason="the compiled core is not there")

START = """
import sys
sys.modules["torch"] = None  # importing it raises ModuleNotFoundError
import jax, jax.numpy as jnp
import blocksparse as bs, blocksparse.jax as bsj

block_layout = bs.patterns.random((512, 512), block_size=32, density=0.2, seed=0)
layout = bsj.layout(block_layout)
x, values = jnp.ones((256, 512)), jax.random.normal(jax.random.key(0), layout.values_shape)
dense = x @ bsj.to_dense(values, layout).T
"""


def run(script: str, **environment: str) -> None:
    """Run a script after START, and check that it ends without an error."""
    result = subprocess.run(
        [sys.executable, "-c", START + script], env=os.environ | environment, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_products_without_torch():
    run("""
assert jnp.allclose(bsj.linear(x, values, layout), dense, atol=1e-3)
assert layout.block_layout() == block_layout
""")


def test_shard_map_and_the_error_without_it():
    run(
        """
from functools import partial
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.device_put(jnp.arange(256.0 * 512).reshape(256, 512) / 1e5, NamedSharding(mesh, P("batch")))

@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=(P("batch"), P(), P()), out_specs=P("batch"))
def product(x, values, layout):
    return bsj.linear(x, values, layout)

dense = x @ bsj.to_dense(values, layout).T
assert jnp.allclose(product(x, values, layout), dense, atol=1e-3)
loss = lambda values: jnp.tanh(product(x, values, layout)).sum()
dense_loss = lambda values: jnp.tanh(x @ bsj.to_dense(values, layout).T).sum()
assert jnp.allclose(jax.grad(loss)(values), jax.grad(dense_loss)(values), atol=1e-2)
for call in (bsj.linear, jax.jit(bsj.linear)):
    try:
        call(x, values, layout)
    except bs.BlockSparseError as error:
        assert "call it inside jax.shard_map" in str(error), error
    else:
        raise AssertionError("sharded operands outside of shard_map")
""",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )


def test_independent_calls_ffts_and_gradients_at_once_do_not_hang():
    run("""
@jax.jit
def everything(x, values, layout):
    xs = [x + i for i in range(8)]
    products = [bsj.linear(x, values, layout) for x in xs]
    spectra = [jnp.fft.fft(x).real for x in xs]
    gradients = [jax.grad(lambda values: bsj.linear(x, values, layout).sum())(values) for x in xs]
    return products, spectra, gradients

first = jax.block_until_ready(everything(x, values, layout))
for _ in range(50):
    results = [everything(x, values, layout) for _ in range(2)]
    assert all(jax.tree.all(jax.tree.map(jnp.array_equal, first, each)) for each in results)
""")
