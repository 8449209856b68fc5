"""Functions that draw layouts, each into one file. They import matplotlib when they are called."""

from .degrees import degree_histogram
from .dense import dense_against_sparse
from .evolution import distance_map
from .matrix import matrix
from .replacement import Replacement, replacement
from .spreading import spreading

__all__ = [
    "Replacement",
    "degree_histogram",
    "dense_against_sparse",
    "distance_map",
    "matrix",
    "replacement",
    "spreading",
]
