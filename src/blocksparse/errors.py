"""The one error class of the library, and its warning."""

from typing import Self

from .pages import Page

__all__ = ["BlockSparseError", "SparsityWarning"]

# The most weights that a message names.
NAMED = 6


class BlockSparseError(ValueError):
    """A user's mistake, reported as "expected ..., got ..." with shapes, dtypes and the layout.

    >>> import blocksparse as bs
    >>> bs.BlockLayout([[True, False]], block_size=0)
    Traceback (most recent call last):
    ...
    blocksparse.errors.BlockSparseError: block_size: expected a positive int or a pair of them (rows, columns), got 0
    """

    @classmethod
    def expected(cls, subject: str, expected: object, got: object, page: Page | None = None) -> Self:
        """The error of a `subject`, such as an argument's name, that is not what was expected; a page that helps."""
        return cls(f"{subject}: expected {expected}, got {got}" + (f"; see {page}" if page else ""))


class SparsityWarning(UserWarning):
    """A model does not become as sparse as it was asked to be; the message lists the weights left out, and why."""
