"""From a trained model to a fast and accurate one: what densities would give, and training towards one of them."""

from .compress import compress
from .result import CompressionResult, Point
from .tradeoff import LayerShare, Tradeoff, tradeoff
from .zeros import from_zeros

__all__ = ["CompressionResult", "LayerShare", "Point", "Tradeoff", "compress", "from_zeros", "tradeoff"]


def __dir__() -> list[str]:
    return __all__
