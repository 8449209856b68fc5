"""`Linear` for Equinox; import it as `blocksparse.jax.equinox`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..layout import BlockLayout
from .layouts import Layout, check_replacement
from .parameters import from_state, initial_parameters, padded_linear, to_state

__all__ = ["Linear"]


class Linear(eqx.Module):
    """`equinox.nn.Linear` with a block-sparse weight: y = activation(x W^T + b).

    Args:
        in_features, out_features: positive sizes; the layer pads them to multiples of the block.
        layout: a `BlockLayout` of the padded weight `[out_features, in_features]`.
        density: fraction of the weights that a random layout stores if no layout is given; None stores all.
        block_size: an int or (rows, columns), used if no layout is given; 32 by default.
        use_bias: whether the layer has a bias `[out_features]`; True by default.
        activation: None, "relu", "gelu" or "silu".
        dtype: of the parameters, float32 by default.
        key: the key of the random layout, weights and biases, which are uniform within 1 / sqrt(fan_in).

    Unlike Equinox's layer it also accepts leading axes: `[..., in_features] -> [..., out_features]`. Its indices are
    int32 leaves, which `eqx.filter_grad` and optimizers that get `eqx.is_inexact_array` leave alone.

    Raises:
        BlockSparseError: sizes, layout and density do not fit; in the call as `blocksparse.jax.linear`.

    Example:
        >>> import jax, jax.numpy as jnp, blocksparse.jax.equinox
        >>> layer = blocksparse.jax.equinox.Linear(128, 64, density=0.25, key=jax.random.key(0))
        >>> layer(jnp.ones((10, 128))).shape
        (10, 64)
    """

    values: jax.Array
    bias: jax.Array | None
    layout: Layout
    activation: str | None = eqx.field(static=True)
    in_features: int = eqx.field(static=True)
    out_features: int = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        layout: BlockLayout | None = None,
        density: float | None = None,
        block_size: int | tuple[int, int] = 32,
        use_bias: bool = True,
        activation: str | None = None,
        dtype: Any = jnp.float32,
        key: jax.Array,
    ):
        self.layout, self.values, self.bias = initial_parameters(
            in_features, out_features, layout, density, block_size, use_bias, dtype, key
        )
        self.activation, self.in_features, self.out_features = activation, int(in_features), int(out_features)

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Return the outputs; `key` is ignored, as in Equinox's own layers."""
        sizes = self.in_features, self.out_features
        return padded_linear(x, self.values, self.layout, self.bias, self.activation, *sizes)

    def replaced(self, layout: Layout, values: jax.Array, bias: jax.Array | None = None) -> Linear:
        """Return a copy with another layout of its sizes, and values, as of `set_step`; None keeps the bias."""
        check_replacement(layout, values, self.layout)
        layer = eqx.tree_at(lambda layer: (layer.layout, layer.values), self, (layout, values))
        return layer if bias is None else eqx.tree_at(lambda layer: layer.bias, layer, bias)

    def state_dict(self, prefix: str = "") -> dict[str, jax.Array]:
        """Return parameters and indices under the names of `bs.nn.Linear`, for `safetensors.flax.save_file`."""
        return to_state(self.layout, self.values, self.bias, prefix)

    def load_state_dict(self, state: Mapping[str, Any], prefix: str = "") -> Linear:
        """Return a copy with the parameters and the layout of a state dict of either front end."""
        return self.replaced(*from_state(state, self.layout, self.values, self.bias, prefix))
