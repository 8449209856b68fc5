"""Operations, each in a folder of its own, and the registry of the backends that serve them."""

from .conv import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from .expert_linear import collect, expert_linear, parts_of, route, spread
from .flops import count_flops
from .linear import linear, linear_transposed
from .registry import BackendStatus, backends, use_backend

__all__ = [
    "BackendStatus",
    "backends",
    "collect",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "expert_linear",
    "linear",
    "linear_transposed",
    "parts_of",
    "route",
    "spread",
    "use_backend",
]

count_flops()
