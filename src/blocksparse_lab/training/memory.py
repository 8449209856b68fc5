"""Check whether a model fits into memory before it is built."""

from __future__ import annotations

from blocksparse.errors import BlockSparseError

from ..machine import available_memory

# Bytes per parameter: the parameter, its gradient, and the least state that an optimizer keeps.
BYTES_PER_PARAMETER = 12


def check_room(what: str, parameters: float) -> None:
    """Raise if a model of this many parameters could not be trained in the available memory.

    `what` names the model or the option that sets its size.

    >>> from blocksparse_lab.training.memory import check_room
    >>> check_room("width 100,000,000", 4e16)
    Traceback (most recent call last):
    ...
    blocksparse.errors.BlockSparseError: width 100,000,000: expected a model that trains in ..., got ...
    """
    try:
        available = available_memory()
    except (OSError, ValueError):  # memory unknown on this system: the allocation itself will fail
        return
    if BYTES_PER_PARAMETER * parameters > available:
        raise BlockSparseError.expected(
            what,
            f"a model that trains in the available {available / 1e9:,.1f} GB",
            f"at least {parameters:,.0f} parameters, which need {BYTES_PER_PARAMETER * parameters / 1e9:,.1f} GB",
        )
