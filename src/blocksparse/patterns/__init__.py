"""Functions that make layouts: of weights, and of attention between queries and keys."""

from .attention import bigbird, dilated, fixed_attention, small_world_attention, strided_attention
from .random_layouts import constant_fan_in, erdos_renyi, random
from .regular import banded, block_diagonal, butterfly, dense, diagonals, permuted, shuffled_block_diagonal
from .small_worlds import barabasi_albert, watts_strogatz, watts_strogatz_2d
from .windows import documents, sliding_window

__all__ = [
    "banded",
    "barabasi_albert",
    "bigbird",
    "block_diagonal",
    "butterfly",
    "constant_fan_in",
    "dense",
    "diagonals",
    "dilated",
    "documents",
    "erdos_renyi",
    "fixed_attention",
    "permuted",
    "random",
    "shuffled_block_diagonal",
    "sliding_window",
    "small_world_attention",
    "strided_attention",
    "watts_strogatz",
    "watts_strogatz_2d",
]


def __dir__() -> list[str]:
    return __all__
