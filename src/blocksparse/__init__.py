"""Block-sparse neural networks for PyTorch and JAX: stored sparse, trained sparse, run sparse."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import _requirements, patterns  # noqa: F401  (checks versions first)
from .errors import BlockSparseError, SparsityWarning
from .layout import BlockLayout
from .optional_torch import has_torch as _has_torch

if _has_torch or _TYPE_CHECKING:
    from . import nn, sparsity, topology
    from .compression import compress, from_zeros, tradeoff
    from .conversion import densify, load_sparsified, quantize, report, shrink, sparsify
    from .convert import from_dense, to_dense
    from .integrations import export_onnx
    from .ops import (
        backends,
        conv1d,
        conv2d,
        conv3d,
        conv_transpose1d,
        conv_transpose2d,
        conv_transpose3d,
        linear,
        use_backend,
    )
    from .surgery.sharding import register_sharding as _register_sharding

    # Importing `distributed` takes long, so the first sharded weight imports it.
    _register_sharding(lambda: _import_module("blocksparse.distributed.sharding"))
else:

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise AttributeError(f"blocksparse.{name} needs PyTorch: pip install torch. For JAX, use blocksparse.jax")
        raise AttributeError(f"module 'blocksparse' has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "BlockLayout",
    "BlockSparseError",
    "SparsityWarning",
    "backends",
    "compress",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "densify",
    "export_onnx",
    "from_dense",
    "from_zeros",
    "linear",
    "load_sparsified",
    "nn",
    "patterns",
    "quantize",
    "report",
    "shrink",
    "sparsify",
    "sparsity",
    "to_dense",
    "topology",
    "tradeoff",
    "use_backend",
]


def __dir__() -> list[str]:
    return __all__
