"""Functions that make layouts: of weights, and of attention between queries and keys."""

from .attention import fixed_attention, small_world_attention, strided_attention
from .random_layouts import erdos_renyi, random
from .regular import banded, block_diagonal, butterfly, dense, shuffled_block_diagonal
from .small_worlds import barabasi_albert, watts_strogatz, watts_strogatz_2d

__all__ = [
    "banded",
    "barabasi_albert",
    "block_diagonal",
    "butterfly",
    "dense",
    "erdos_renyi",
    "fixed_attention",
    "random",
    "shuffled_block_diagonal",
    "small_world_attention",
    "strided_attention",
    "watts_strogatz",
    "watts_strogatz_2d",
]


def __dir__() -> list[str]:
    return __all__
