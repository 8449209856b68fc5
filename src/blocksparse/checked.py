"""Numbers as a user hands them in, or a BlockSparseError that says what they should be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .errors import BlockSparseError
from .layout import is_int


def integer(name: str, value: Any, least: int, below: int | None = None, of: str = "") -> int:
    """The value as an int from `least` on, and below a bound, `of` something; numpy's ints are taken, bools are not.

    >>> from blocksparse.checked import integer
    >>> integer("m", 9, 1, below=4, of="the number of blocks")
    Traceback (most recent call last):
    ...
    blocksparse.errors.BlockSparseError: m: expected an int, 1 or more and below the number of blocks, 4, got 9
    """
    if not is_int(value) or value < least or (below is not None and value >= below):
        bound = "" if below is None else f" and below {of}{', ' if of else ''}{below}"
        raise BlockSparseError.expected(name, f"an int, {least} or more{bound}", repr(value))
    return int(value)


def number(name: str, value: Any, least: float, most: float = math.inf, *, below: float = math.inf) -> float:
    """The value as a finite float from `least` to `most`, or below a bound; ints are taken, bools are not.

    >>> from blocksparse.checked import number
    >>> number("dropout", 1, 0, below=1)
    Traceback (most recent call last):
    ...
    blocksparse.errors.BlockSparseError: dropout: expected a number from 0 to below 1, got 1
    """
    real = is_int(value) or isinstance(value, float | np.floating)
    if not real or not math.isfinite(value) or not least <= value <= most or value >= below:
        wanted = f"a finite number, {least:g} or more"
        if min(most, below) < math.inf:
            wanted = f"a number from {least:g} to " + (f"below {below:g}" if below <= most else f"{most:g}")
        raise BlockSparseError.expected(name, wanted, repr(value))
    return float(value)
