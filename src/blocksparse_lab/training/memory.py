"""Checks whether a model fits into memory, before any of it is made."""

from __future__ import annotations

from blocksparse.errors import BlockSparseError

from ..machine import available_memory

# Bytes of a number that is learned: itself, its gradient, and what an optimizer keeps of it at least.
BYTES = 12


def check_room(what: str, parameters: float) -> None:
    """Refuses a model, or the option that gives its size, that could not be trained in the available memory.

    >>> from blocksparse_lab.training.memory import check_room
    >>> check_room("width 100,000,000", 4e16)
    Traceback (most recent call last):
    ...
    blocksparse.errors.BlockSparseError: width 100,000,000: expected a model that trains in ..., got ...
    """
    try:
        there = available_memory()
    except (OSError, ValueError):  # a system that does not tell; there the allocation itself fails
        return
    if BYTES * parameters > there:
        raise BlockSparseError.expected(
            what,
            f"a model that trains in the {there / 1e9:,.1f} GB there are",
            f"one of {parameters:,.0f} parameters or more, which take {BYTES * parameters / 1e9:,.1f} GB",
        )
