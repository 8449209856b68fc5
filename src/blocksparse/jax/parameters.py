"""Parameters of the layers for Equinox and Flax: first values, and the state dicts that PyTorch's layers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import patterns
from ..checked import checked_array as host_array
from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout
from ..state_indices import layout_of_indices
from .layouts import Layout, layout

__all__ = ["from_state", "initial_parameters", "to_state"]


def initial_parameters(
    in_features: int, out_features: int, stored: BlockLayout | None, density: float | None,
    block_size: int | tuple[int, int], use_bias: bool, dtype: Any, key: jax.Array,
) -> tuple[Layout, jax.Array, jax.Array | None]:  # fmt: skip
    """Return the layout, values and bias of a new layer, uniform within 1 / sqrt(fan_in) as in `bs.nn.Linear`."""
    layout_key, values_key, bias_key = jax.random.split(key, 3)
    if stored is None and density is not None and isinstance(layout_key, jax.core.Tracer):
        raise BlockSparseError("A random layout needs its key outside of jit and vmap: give the layer a layout.")
    shape = out_features, in_features
    if stored is not None:
        check_layout(stored)
        if density is not None:
            raise BlockSparseError.expected("density", "None if a layout is given", density)
        if stored.shape != shape:
            raise BlockSparseError.expected("layout", f"shape {shape}", repr(stored))
    elif density is None:
        stored = patterns.dense(shape, block_size)
    else:
        seed = int(jax.random.randint(layout_key, (), 0, 2**31 - 1))
        stored = patterns.random(shape, block_size, density, seed)
    fan_in = np.diff(stored.row_start) * stored.block_shape[1]  # of each block row
    bound = jnp.asarray(1 / np.sqrt(np.maximum(fan_in, 1)), dtype)
    values = jax.random.uniform(values_key, stored.values_shape, dtype, -1, 1)
    values *= bound[stored.row_of_block][:, None, None]
    bias = None
    if use_bias:
        bias = jax.random.uniform(bias_key, (out_features,), dtype, -1, 1) * jnp.repeat(bound, stored.block_shape[0])
    return layout(stored), values, bias


def to_state(layout: Layout, values: jax.Array, bias: jax.Array | None, prefix: str = "") -> dict[str, jax.Array]:
    """Return parameters and indices under the names that `bs.nn.Linear` gives them in a state dict."""
    state = {"crow_indices": layout.row_start, "col_indices": layout.col, "values": values}
    return {prefix + name: each for name, each in (state | ({} if bias is None else {"bias": bias})).items()}


def from_state(
    state: Mapping[str, Any], layout_now: Layout, values: jax.Array, bias: jax.Array | None, prefix: str = ""
) -> tuple[Layout, jax.Array, jax.Array | None]:
    """Return the layout, values and bias of a state dict for a layer that has these now; other names are ignored.

    Raises:
        BlockSparseError: a name is missing, indices are those of another grid, or a shape or dtype differs.
    """
    names = [prefix + name for name in to_state(layout_now, values, bias)]
    missing = [name for name in names if name not in state]
    if missing:
        raise BlockSparseError.expected("state", f"{', '.join(names)}", f"none of the name {missing[0]!r}")
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
