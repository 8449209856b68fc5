"""Functions that make layouts, of weights and of attention."""

from .attention import fixed_attention, small_world_attention, strided_attention
from .weights import (
    banded,
    barabasi_albert,
    block_diagonal,
    butterfly,
    dense,
    erdos_renyi,
    random,
    shuffled_block_diagonal,
    watts_strogatz,
    watts_strogatz_2d,
)

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
