"""The block-sparse linear product, y = x W^T, and its transpose, y = x W."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import BlockSparseError
from . import primitives
from .layouts import Layout, check_jax_layout

__all__ = ["check_values", "linear", "linear_transposed"]

DTYPES = ("float32", "float64", "bfloat16", "float16")


def linear(
    x: jax.Array, values: jax.Array, layout: Layout, bias: jax.Array | None = None, activation: str | None = None
) -> jax.Array:
    """Return activation(x W^T + bias) with a block-sparse weight.

    Args:
        x: `[..., in_features]`.
        values: `[nnz, block_out, block_in]`, the blocks of W in the order of `layout`.
        layout: which blocks of the `[out_features, in_features]` weight these are.
        bias: `[out_features]` or None.
        activation: None, "relu", "gelu" (the exact one) or "silu"; fused into the kernel in inference.

    All arrays have one dtype out of float32, float64, bfloat16 and float16 (sums of 16-bit numbers are float32), and
    are on the CPU. The result can be differentiated any number of times, forward and reverse, in x, values and bias.
    It works under `jit`, `vmap` (also over values and layouts), `scan`, `checkpoint` and `shard_map`.

    Returns:
        `[..., out_features]`. The outputs of empty rows are activation(bias), or exactly 0.

    Raises:
        BlockSparseError: sizes do not fit the layout, dtypes are mixed, the activation is unknown, or an array was
            donated to another call; when jit compiles: the arrays are sharded outside of `shard_map`, or not on a CPU.
        ValueError or jax.errors.JaxRuntimeError, as JAX chooses: the indices are not those of a layout, which only
            a run can see.

    Example:
        >>> import jax, jax.numpy as jnp, blocksparse as bs, blocksparse.jax as bsj
        >>> layout = bsj.layout(bs.patterns.random((64, 128), block_size=32, density=0.5, seed=0))
        >>> values = jax.random.normal(jax.random.key(0), layout.values_shape)
        >>> loss = lambda values, x: bsj.linear(x, values, layout, activation="relu").sum()
        >>> jax.grad(loss)(values, jnp.ones((10, 7, 128))).shape
        (4, 32, 32)
    """
    return _product(x, values, layout, bias, activation, transposed=False)


def linear_transposed(x: jax.Array, values: jax.Array, layout: Layout) -> jax.Array:
    """Return x W, the product with the transposed weight, from the same `values` and `layout` without a copy.

    Args:
        x: `[..., out_features]`.
        values: `[nnz, block_out, block_in]`, the blocks of W in the order of `layout`.
        layout: which blocks of the `[out_features, in_features]` weight these are.

    Dtypes, derivatives and transformations are those of `linear`.

    Returns:
        `[..., in_features]`. The outputs of empty columns are exactly 0.

    Raises:
        BlockSparseError: as `linear`.

    Example:
        >>> import jax.numpy as jnp, blocksparse as bs, blocksparse.jax as bsj
        >>> layout = bsj.layout(bs.patterns.dense((64, 128), block_size=32))  # its 64 outputs are the inputs here
        >>> bsj.linear_transposed(jnp.ones((10, 64)), jnp.ones(layout.values_shape), layout).shape
        (10, 128)
    """
    return _product(x, values, layout, None, None, transposed=True)


def _product(x: Any, values: Any, layout: Layout, bias: Any, activation: str | None, transposed: bool) -> jax.Array:
    check_jax_layout(layout)
    x = checked_array("x", x)
    values = check_values(values, layout)
    outputs, inputs = layout.shape[::-1] if transposed else layout.shape
    if x.ndim == 0 or x.shape[-1] != inputs:
        raise BlockSparseError.expected("x", f"[..., {inputs}] for {layout!r}", tuple(x.shape))
    if x.dtype != values.dtype or x.dtype.name not in DTYPES:
        got = f"x {x.dtype.name} and values {values.dtype.name}"
        raise BlockSparseError.expected("dtypes", f"one of {', '.join(DTYPES)} for all arrays", got)
    known = [None, *(name for name in primitives.ACTIVATIONS if name != "none")]
    if not isinstance(activation, str | None) or activation not in known:
        raise BlockSparseError.expected("activation", f"one of {known}", repr(activation))
    if bias is not None:
        bias = checked_array("bias", bias)
        if bias.shape != (outputs,) or bias.dtype != x.dtype:
            expected = f"{x.dtype.name} [{outputs}] for {layout!r}"
            raise BlockSparseError.expected("bias", expected, f"{bias.dtype.name} {list(bias.shape)}")
    tokens = math.prod(x.shape[:-1])
    y = primitives.linear(
        x.reshape(1, tokens, inputs), values[None], bias, (layout.row_start[None], layout.col[None]), layout.grid[1],
        transposed, activation or "none",
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], outputs)


def check_values(values: Any, layout: Layout) -> jax.Array:
    """Return values as an array after a check of their shape."""
    values = checked_array("values", values)
    if values.shape != layout.values_shape:
        raise BlockSparseError.expected("values", f"shape {layout.values_shape} for {layout!r}", tuple(values.shape))
    for name, index, size in (("row_start", layout.row_start, layout.grid[0] + 1), ("col", layout.col, layout.nnz)):
        index = checked_array(f"layout.{name}", index)
        if index.shape != (size,) or index.dtype != jnp.int32:
            expected, got = f"int32 [{size}]", f"{index.dtype.name} {list(index.shape)}"
            raise BlockSparseError.expected(f"layout.{name}", expected, got)
    return values


def checked_array(name: str, value: Any) -> jax.Array:
    """Return a value as an array of JAX that has not been donated to another call."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise BlockSparseError.expected(name, "an array", type(value).__name__) from error
    if not isinstance(array, jax.core.Tracer) and array.is_deleted():
        raise BlockSparseError.expected(
            name, "an array with memory", "one that was donated to a call of jit, or deleted"
        )
    return array
