"""Sparse training as pure functions under jit: SET and RigL with a fixed number of blocks."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..checked import number
from ..errors import BlockSparseError
from .layouts import Layout, check_indices, check_jax_layout
from .products import DTYPES, check_values, checked_array

__all__ = ["follow", "rigl_step", "set_step"]

State = TypeVar("State")


def set_step(
    key: jax.Array, values: jax.Array, layout: Layout, fraction: float | jax.Array = 0.3
) -> tuple[jax.Array, Layout, jax.Array]:
    """Drop the blocks with the smallest norms, and grow the same number at random free places, with values 0.

    It runs under jit, and another layout or fraction causes no new trace. Blocks that were dropped do not grow again in
    the same step; fewer are dropped if there are fewer free places. Memory and time grow with the grid, not with `nnz`.

    Args:
        key: the key of the random places.
        values: `[nnz, block_out, block_in]`.
        layout: the positions of these blocks.
        fraction: the fraction of the blocks to drop, 0 to 1, rounded to a whole number of blocks; 0.3 by default. If
            it is traced and out of range, the new values are NaN.

    Returns:
        The new values and layout, and `source`, int32 `[nnz]`: the position in the old layout of each block of the new
        one, -1 for new blocks. `follow` applies it to an optimizer's state.

    Raises:
        BlockSparseError: sizes do not fit the layout, the grid has 2^31 blocks, or what is not traced is invalid: the
            fraction is out of range, or the indices are not those of a layout.

    Example:
        >>> import jax, blocksparse as bs, blocksparse.jax as bsj
        >>> layout = bsj.layout(bs.patterns.random((64, 128), block_size=16, density=0.25, seed=0))
        >>> values = jax.random.normal(jax.random.key(0), layout.values_shape)
        >>> values, layout, source = jax.jit(bsj.set_step)(jax.random.key(1), values, layout, 0.5)
        >>> layout.nnz, int((source == -1).sum())
        (8, 4)

    Source: Mocanu et al., Scalable training of artificial neural networks with adaptive sparse connectivity (2018).
    """
    values = _checked(values, layout)
    return _replace(values, layout, jax.random.uniform(key, layout.grid), fraction)


def rigl_step(
    values: jax.Array, grad: jax.Array, layout: Layout, fraction: float | jax.Array = 0.3
) -> tuple[jax.Array, Layout, jax.Array]:
    """Drop the blocks with the smallest norms, and grow the same number where the dense gradient has the largest ones.

    New values are 0. Memory and time grow with the dense weight, so call it once in 100 steps or so.

    Args:
        values: `[nnz, block_out, block_in]`.
        grad: `[out_features, in_features]`, the gradient of the loss at the dense weight `to_dense(values, layout)`.
        layout: the positions of the values' blocks.
        fraction: as in `set_step`.

    Returns:
        As `set_step`.

    Raises:
        BlockSparseError: as `set_step`; the gradient has another shape than the dense weight.

    Example:
        >>> import jax, jax.numpy as jnp, blocksparse as bs, blocksparse.jax as bsj
        >>> layout = bsj.layout(bs.patterns.random((64, 128), block_size=16, density=0.25, seed=0))
        >>> values, x = jax.random.normal(jax.random.key(0), layout.values_shape), jnp.ones((8, 128))
        >>> grad = jax.grad(lambda weight: jnp.tanh(x @ weight.T).sum())(bsj.to_dense(values, layout))
        >>> values, layout, source = jax.jit(bsj.rigl_step)(values, grad, layout)
        >>> layout.nnz, int((source == -1).sum())
        (8, 2)

    Source: Evci et al., Rigging the lottery: making all tickets winners (2020).
    """
    values, grad = _checked(values, layout), checked_array("grad", grad)
    if grad.shape != layout.shape:
        raise BlockSparseError.expected("grad", f"shape {layout.shape} for {layout!r}", tuple(grad.shape))
    (rows, cols), (block_out, block_in) = layout.grid, layout.block_shape
    blocks = _at_least_float32(grad).reshape(rows, block_out, cols, block_in)
    return _replace(values, layout, (blocks**2).sum((1, 3)), fraction)


def follow(state: State, shape: tuple[int, ...], source: jax.Array) -> State:
    """Return parameters or an optimizer's state with the blocks moved as in a step; new blocks get 0.

    Args:
        state: a pytree, for example the state of an optax optimizer. Arrays of other shapes stay as they are.
        shape: the shape of the values, `layout.values_shape`. Two weights of one shape need a call each, on the states
            of their own.
        source: the third result of `set_step` or `rigl_step`.

    Raises:
        BlockSparseError: `source` is not an int vector with an entry per block; out of range, if it is not traced.

    Example:
        >>> import jax.numpy as jnp, blocksparse.jax as bsj
        >>> momentum = {"values": jnp.array([[[1.0]], [[2.0]]]), "bias": jnp.ones(3)}
        >>> bsj.follow(momentum, (2, 1, 1), jnp.array([-1, 0]))["values"].ravel()
        Array([0., 1.], dtype=float32)
    """
    if not isinstance(shape, tuple | list) or not shape:
        raise BlockSparseError.expected("shape", "layout.values_shape", repr(shape))
    source, shape = checked_array("source", source), tuple(shape)
    if source.shape != shape[:1] or not jnp.issubdtype(source.dtype, jnp.integer):
        got = f"{source.dtype.name} {list(source.shape)}"
        raise BlockSparseError.expected("source", f"ints [{shape[0]}]", got)
    if not isinstance(source, jax.core.Tracer) and ((source < -1) | (source >= shape[0])).any():
        raise BlockSparseError.expected("source", f"ints from -1 to {shape[0] - 1}", source.tolist())

    def move(leaf: Any) -> Any:
        return _take(leaf, source) if getattr(leaf, "shape", None) == shape else leaf

    return jax.tree.map(move, state)


def _checked(values: Any, layout: Layout) -> jax.Array:
    check_jax_layout(layout)
    if layout.grid[0] * layout.grid[1] >= 2**31:
        raise BlockSparseError.expected("layout", "a grid below 2^31 blocks", repr(layout))
    values = check_values(values, layout)
    if values.dtype.name not in DTYPES:
        raise BlockSparseError.expected("values", f"one of {', '.join(DTYPES)}", values.dtype.name)
    check_indices(layout)
    return values


def _at_least_float32(x: jax.Array) -> jax.Array:
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def _replace(
    values: jax.Array, layout: Layout, growth: jax.Array, fraction: Any
) -> tuple[jax.Array, Layout, jax.Array]:
    """Replace the fraction of the blocks with the smallest norms by the free ones with the largest growth scores."""
    if not isinstance(fraction, jax.core.Tracer):
        number("fraction", fraction.item() if isinstance(fraction, jax.Array) and not fraction.ndim else fraction, 0, 1)
    (rows, cols), nnz = layout.grid, layout.nnz
    smallest = jnp.argsort((_at_least_float32(values) ** 2).sum((1, 2)), stable=True)
    fraction = jnp.asarray(fraction)
    in_range = (fraction >= 0) & (fraction <= 1)
    dropped = jnp.minimum(jnp.round(jnp.where(in_range, fraction, 0) * nnz), rows * cols - nnz).astype(jnp.int32)
    stays = jnp.zeros(nnz, bool).at[smallest].set(jnp.arange(nnz) >= dropped)

    # The blocks of the new layout are those with the largest scores: infinite for those that stay, else growth.
    old = layout.row_of_block() * cols + layout.col
    growth = jnp.nan_to_num(growth.reshape(-1), nan=0.0, posinf=jnp.finfo(growth.dtype).max)
    scores = growth.at[old].set(jnp.where(stays, jnp.inf, -jnp.inf))
    keys = jnp.sort(jax.lax.top_k(scores, nnz)[1].astype(jnp.int32))
    row_start = jnp.searchsorted(keys, jnp.arange(rows + 1, dtype=jnp.int32) * cols).astype(jnp.int32)
    at = jnp.searchsorted(old, keys).clip(0, nnz - 1)
    source = jnp.where((old[at] == keys) & stays[at], at, -1).astype(jnp.int32)
    values = jnp.where(in_range, _take(values, source), jnp.nan)
    return values, dataclasses.replace(layout, row_start=row_start, col=keys % cols), source


def _take(blocks: jax.Array, source: jax.Array) -> jax.Array:
    """Return the blocks at these positions, 0 for -1."""
    taken = blocks[source]  # -1 takes the last block
    return jnp.where((source >= 0).reshape(-1, *(1,) * (blocks.ndim - 1)), taken, jnp.zeros((), blocks.dtype))
