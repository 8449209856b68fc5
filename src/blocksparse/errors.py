"""The error and the warning of the library, and the help pages that they name."""

import sys
import warnings
from collections.abc import Mapping
from enum import StrEnum
from typing import Self

__all__ = ["BlockSparseError", "SparsityWarning"]

# A message names at most this number of weights.
MAX_NAMED = 6

# Warnings are shown at the first line outside of these packages.
NOT_THE_USERS = "blocksparse", "torch", "contextlib"


def format_reasons(reasons: Mapping[str, str]) -> list[str]:
    """Return a line "name: reason" for each of the first weights, and the number of the others.

    >>> format_reasons({"head": "it is narrow"})
    ['head: it is narrow']
    """
    lines = [f"{name}: {reason}" for name, reason in list(reasons.items())[:MAX_NAMED]]
    return lines + [f"and {len(reasons) - MAX_NAMED} more"] * (len(reasons) > MAX_NAMED)


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message, or its type if it has none.

    >>> first_line(ValueError("too long\nby 3")), first_line(AssertionError())
    ('too long', 'AssertionError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class Page(StrEnum):
    """A page of Python's help that messages name, as the call that shows it.

    >>> print(f"see {Page.SPARSIFY}")
    see help(blocksparse.sparsify)
    """

    BACKENDS = "help(blocksparse.backends)"
    LAYOUTS = "help(blocksparse.BlockLayout)"
    SPARSIFY = "help(blocksparse.sparsify)"
    CALIBRATE = "help(blocksparse.sparsity.reconstruct)"
    COMPRESS = "help(blocksparse.compress)"
    PRUNE = "help(blocksparse.sparsity.GradualPruning)"
    SPARSE_TRAINING = "help(blocksparse.sparsity.SET)"
    TENSOR_PARALLEL = "help(blocksparse.distributed.parallelize_module)"


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
        """Return the error "subject: expected ..., got ...", with a page of Python's help."""
        return cls(f"{subject}: expected {expected}, got {got}" + (f"; see {page}" if page else ""))


class SparsityWarning(UserWarning):
    """A model has not become as sparse as requested; the message lists the weights left dense, with the reasons."""


def warn_user(message: str) -> None:
    """Give a SparsityWarning at the line of the user's program that has called this library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] in NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, SparsityWarning, stacklevel=level)
