"""Parameters of the layers for Equinox and Flax: first values, and the state dicts that PyTorch's layers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import patterns
from ..checked import checked_array as host_array
from ..checked import checked_block, integer
from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout
from ..patterns.random_layouts import random_of_features
from ..state_indices import layout_of_indices
from .layouts import Layout, layout
from .products import checked_array, linear

__all__ = ["from_state", "initial_parameters", "padded_linear", "to_state"]


def initial_parameters(
    in_features: int, out_features: int, stored: BlockLayout | None, density: float | None,
    block_size: int | tuple[int, int], use_bias: bool, dtype: Any, key: jax.Array,
) -> tuple[Layout, jax.Array, jax.Array | None]:  # fmt: skip
    """Return the layout, values and bias of a new layer, uniform within 1 / sqrt(fan_in) as in `bs.nn.Linear`."""
    layout_key, values_key, bias_key = jax.random.split(key, 3)
    if stored is None and density is not None and isinstance(layout_key, jax.core.Tracer):
        raise BlockSparseError("A random layout needs its key outside of jit and vmap: give the layer a layout.")
    shape = integer("out_features", out_features, 1), integer("in_features", in_features, 1)
    if stored is not None:
        check_layout(stored)
        if density is not None:
            raise BlockSparseError.expected("density", "None if a layout is given", density)
    block = checked_block(block_size) if stored is None else stored.block_shape
    padded = shape[0] + -shape[0] % block[0], shape[1] + -shape[1] % block[1]
    used_out, used_in = (np.arange(more) < size for more, size in zip(padded, shape, strict=True))
    if stored is None:
        if density is None:
            stored = patterns.dense(padded, block)
        else:
            seed = int(jax.random.randint(layout_key, (), 0, 2**31 - 1))
            if padded == shape:
                stored = patterns.random(shape, block, density, seed)
            else:
                stored = random_of_features((used_out, used_in), block, density, seed)
    if stored.shape != padded:
        raise BlockSparseError.expected("layout", f"shape {padded} for {shape} features", repr(stored))
    rows, cols = stored.row_of_block, stored.col_of_block
    inputs = used_in.reshape(-1, block[1])[cols]
    fan_in = np.bincount(rows, weights=inputs.sum(1), minlength=stored.grid[0])  # of each block row
    bound = jnp.asarray(np.where(fan_in > 0, 1 / np.sqrt(np.maximum(fan_in, 1)), 0), dtype)
    values = jax.random.uniform(values_key, stored.values_shape, dtype, -1, 1) * bound[rows][:, None, None]
    if padded != shape:  # the padding is 0, and stays 0, because it gets no gradient
        used = used_out.reshape(-1, block[0])[rows][:, :, None] & inputs[:, None]
        values = jnp.where(used, values, jnp.zeros((), dtype))
    bias = None
    if use_bias:
        bias = jax.random.uniform(bias_key, shape[:1], dtype, -1, 1) * jnp.repeat(bound, block[0])[: shape[0]]
    return layout(stored), values, bias


def padded_linear(
    x: jax.Array, values: jax.Array, layout: Layout, bias: jax.Array | None, activation: str | None, in_features: int,
    out_features: int,
) -> jax.Array:  # fmt: skip
    """Return activation(x W^T + bias), `[..., out_features]`, with x and the bias padded to whole blocks."""
    padded_out, padded_in = layout.shape
    if padded_in != in_features:
        x = checked_array("x", x)
        if x.ndim == 0 or x.shape[-1] != in_features:
            raise BlockSparseError.expected("x", f"[..., {in_features}]", tuple(x.shape))
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padded_in - in_features)])
    if bias is not None and padded_out != out_features:
        bias = jnp.pad(bias, (0, padded_out - out_features))
    return linear(x, values, layout, bias, activation)[..., :out_features]


def to_state(layout: Layout, values: jax.Array, bias: jax.Array | None, prefix: str = "") -> dict[str, jax.Array]:
    """Return parameters and indices under the names that `bs.nn.Linear` gives them in a state dict."""
    state = {"crow_indices": layout.row_start, "col_indices": layout.col, "values": values}
    return {prefix + name: each for name, each in (state | ({} if bias is None else {"bias": bias})).items()}


def from_state(
    state: Mapping[str, Any], layout_now: Layout, values: jax.Array, bias: jax.Array | None, prefix: str = ""
) -> tuple[Layout, jax.Array, jax.Array | None]:
    """Return the layout, values and bias of a state dict for a layer that has these now; other names are ignored.

    Raises:
        BlockSparseError: a name is missing, the state has a bias that the layer lacks, indices are those of another
            grid, or a shape or dtype differs.
    """
    names = [prefix + name for name in to_state(layout_now, values, bias)]
    missing = [name for name in names if name not in state]
    if missing:
        raise BlockSparseError.expected("state", f"{', '.join(names)}", f"none of the name {missing[0]!r}")
    if bias is None and f"{prefix}bias" in state:
        raise BlockSparseError.expected("state", "no bias (make the layer with use_bias=True)", repr(f"{prefix}bias"))
    crow, col, *floats = (state[name] for name in names)
    stored = layout_of_indices(
        host_array("crow_indices", "a vector of ints", crow), host_array("col_indices", "a vector of ints", col),
        layout_now.grid, layout_now.block_shape,
    )  # fmt: skip
    shapes = [stored.values_shape, *([] if bias is None else [bias.shape])]
    for i, (name, shape) in enumerate(zip(names[2:], shapes, strict=True)):
        array = floats[i] = jnp.asarray(floats[i])
        if array.shape != shape or array.dtype != values.dtype:
            expected, got = f"{values.dtype.name} {list(shape)}", f"{array.dtype.name} {list(array.shape)}"
            raise BlockSparseError.expected(name, expected, got)
    return layout(stored), floats[0], None if bias is None else floats[1]
