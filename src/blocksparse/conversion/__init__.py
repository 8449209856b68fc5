"""Conversion of whole models between dense, block-sparse and 8 bits, and reports on their weights."""

from .densify import densify
from .load import load_sparsified
from .quantize import quantize
from .report import Report, Row, report
from .shrink import shrink
from .sparsify import sparsify

__all__ = ["Report", "Row", "densify", "load_sparsified", "quantize", "report", "shrink", "sparsify"]


def __dir__() -> list[str]:
    return __all__
