"""The JAX front end on the same compiled core: block-sparse products and sparse training, inside jit, on the CPU.

>>> import jax, jax.numpy as jnp
>>> import blocksparse as bs
>>> import blocksparse.jax as bsj
>>> layout = bsj.layout(bs.patterns.random((64, 128), block_size=32, density=0.5, seed=0))
>>> values = jax.random.normal(jax.random.key(0), layout.values_shape)
>>> y = jax.jit(bsj.linear)(jnp.ones((10, 128)), values, layout)
>>> y.shape
(10, 64)
"""

from . import requirements  # noqa: F401  (checks the version first)
from .conversion import from_dense, to_dense
from .layouts import Layout, layout
from .products import linear, linear_transposed
from .sparse_training import follow, rigl_step, set_step

__all__ = [
    "Layout",
    "follow",
    "from_dense",
    "layout",
    "linear",
    "linear_transposed",
    "rigl_step",
    "set_step",
    "to_dense",
]


def __dir__() -> list[str]:
    return __all__
