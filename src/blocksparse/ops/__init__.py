"""The operations: one folder each, one registry of the backends that serve them."""

from .linear import linear, linear_transposed
from .registry import BackendStatus, backends, use_backend

__all__ = ["BackendStatus", "backends", "linear", "linear_transposed", "use_backend"]
