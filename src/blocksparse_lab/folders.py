"""Folders of an option `--out`: they are made before any work, and errors of the file system name the option."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blocksparse.errors import BlockSparseError
from blocksparse.files import writable_folder


def make_folder(out: Path) -> Path:
    """Make a folder if it is missing, and return it.

    Raises:
        BlockSparseError: no file can be written to it.
    """
    return writable_folder("out", out)


@contextmanager
def report_os_errors(out: Path) -> Iterator[None]:
    """Turn errors of the file system into one about the option `out`."""
    try:
        yield
    except OSError as error:
        raise BlockSparseError.expected("out", "a folder to write to", f"{out} ({error.strerror})") from error
