"""`Linear` for Flax NNX; import it as `blocksparse.jax.nnx`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..layout import BlockLayout
from .layouts import Layout, check_replacement
from .parameters import from_state, initial_parameters, padded_linear, to_state

__all__ = ["Index", "Linear"]


class Index(nnx.Variable):
    """An index array of a layout: state that no gradient and no optimizer changes."""


class Linear(nnx.Module):
    """`flax.nnx.Linear` with a block-sparse weight: y = activation(x W^T + b).

    Args:
        in_features, out_features: positive sizes; the layer pads them to multiples of the block.
        layout: a `BlockLayout` of the padded weight `[out_features, in_features]`.
        density: fraction of the weights that a random layout stores if no layout is given; None stores all.
        block_size: an int or (rows, columns), used if no layout is given; 32 by default.
        use_bias: whether the layer has a bias `[out_features]`; True by default.
        activation: None, "relu", "gelu" or "silu".
        param_dtype: of the parameters, float32 by default.
        rngs: its stream `params` draws the layout, weights and biases, which are uniform within 1 / sqrt(fan_in).

    Shapes: `[..., in_features] -> [..., out_features]`. `values` and `bias` are `nnx.Param`, the indices `Index`.

    Raises:
        BlockSparseError: sizes, layout and density do not fit; in the call as `blocksparse.jax.linear`.

    Example:
        >>> import jax.numpy as jnp, blocksparse.jax.nnx
        >>> from flax import nnx
        >>> layer = blocksparse.jax.nnx.Linear(128, 64, density=0.25, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((10, 128))).shape
        (10, 64)
    """

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
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        indices, values, bias = initial_parameters(
            in_features, out_features, layout, density, block_size, use_bias, param_dtype, rngs.params()
        )
        self.values, self.bias = nnx.Param(values), None if bias is None else nnx.Param(bias)
        self.row_start, self.col = Index(indices.row_start), Index(indices.col)
        self.grid, self.block_shape, self.activation = indices.grid, indices.block_shape, activation
        self.in_features, self.out_features = int(in_features), int(out_features)

    @property
    def layout(self) -> Layout:
        """The positions of the blocks."""
        return Layout(self.row_start[...], self.col[...], self.grid, self.block_shape)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the outputs."""
        bias = None if self.bias is None else self.bias[...]
        sizes = self.in_features, self.out_features
        return padded_linear(x, self.values[...], self.layout, bias, self.activation, *sizes)

    def replace(self, layout: Layout, values: jax.Array, bias: jax.Array | None = None) -> None:
        """Change to another layout of its sizes, and values, as of `set_step`; None keeps the bias."""
        check_replacement(layout, values, self.layout)
        _assign(self.row_start, layout.row_start)
        _assign(self.col, layout.col)
        _assign(self.values, values)
        if self.bias is not None and bias is not None:
            _assign(self.bias, bias)

    def state_dict(self, prefix: str = "") -> dict[str, jax.Array]:
        """Return parameters and indices under the names of `bs.nn.Linear`, for `safetensors.flax.save_file`."""
        return to_state(self.layout, self.values[...], None if self.bias is None else self.bias[...], prefix)

    def load_state_dict(self, state: Mapping[str, Any], prefix: str = "") -> None:
        """Change the parameters and the layout to those of a state dict of either front end."""
        now = self.values[...], None if self.bias is None else self.bias[...]
        self.replace(*from_state(state, self.layout, *now, prefix))


def _assign(variable: nnx.Variable[Any], value: jax.Array) -> None:
    """Replace the array of a variable by one that may have another shape."""
    if hasattr(nnx.Variable, "set_value"):
        variable.set_value(value)
    else:
        variable[...] = value  # Flax 0.12.0, the release for JAX 0.7.2
