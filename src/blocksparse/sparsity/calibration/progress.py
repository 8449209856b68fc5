"""A line on a terminal that says how far something long has come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")
AFTER = 2.0  # seconds without a word


def progress(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """The items, with a line on stderr that counts them: on a terminal, if it takes more than two seconds."""
    total = len(items) if total is None and isinstance(items, Sized) else total
    begin, shown = time.monotonic(), False
    try:
        for done, item in enumerate(items):
            if sys.stderr.isatty() and time.monotonic() - begin > AFTER:
                print(f"\r{label} {done + 1}/{total}", end="", file=sys.stderr, flush=True)
                shown = True
            yield item
    finally:
        if shown:
            print(file=sys.stderr)
