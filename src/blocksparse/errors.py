"""The error and the warning of the library, and the pages of documentation that they name."""

from enum import StrEnum
from typing import Self

__all__ = ["BlockSparseError", "SparsityWarning"]

# How many weights a message names at most.
MAX_NAMED = 6


class Page(StrEnum):
    """A page of the documentation that messages name: its file in the repository, under which the site has it too.

    >>> print(f"see {Page.INSTALL}")
    see docs/start/install.md
    """

    INSTALL = "docs/start/install.md"
    LAYOUTS = "docs/understand/layouts.md"
    SPARSIFY = "docs/how_to/sparsify.md"
    CALIBRATE = "docs/how_to/calibrate.md"
    PRUNE = "docs/how_to/prune.md"
    SPARSE_TRAINING = "docs/how_to/sparse_training.md"
    TENSOR_PARALLEL = "docs/distributed/tensor_parallel.md"


class BlockSparseError(ValueError):
    """An invalid argument or state, with what was expected and what was found: shapes, dtypes and the layout.

    >>> import blocksparse as bs
    >>> bs.BlockLayout([[True, False]], block_size=0)
    Traceback (most recent call last):
    ...
    blocksparse.errors.BlockSparseError: block_size: expected a positive int or a pair of them (rows, columns), got 0
    """

    @classmethod
    def expected(cls, subject: str, expected: object, got: object, page: Page | None = None) -> Self:
        """Return the error "subject: expected ..., got ...", with a page of the documentation that helps."""
        return cls(f"{subject}: expected {expected}, got {got}" + (f"; see {page}" if page else ""))


class SparsityWarning(UserWarning):
    """A model has not become as sparse as requested; the message lists the weights left dense, with the reasons."""
