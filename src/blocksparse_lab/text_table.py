"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


def table(head: Sequence[str], rows: Iterable[Sequence[Any]] = (), words: int = 1, **options: Any) -> Table:
    """Build a table whose first `words` columns are left-aligned words that may be folded; the rest are numbers.

    >>> from rich.console import Console
    >>> Console(width=40).print(table(("net", "error"), [("dense", "1.5 %"), ("sparse", "11 %")]))
    net      error
    ──────────────
    dense    1.5 %
    sparse    11 %
    """
    look: dict[str, Any] = {"header_style": "dim", "pad_edge": False, "show_edge": False} | options
    made = Table(box=SIMPLE_HEAD, **look)
    for nth, name in enumerate(head):
        first = nth < words
        made.add_column(name, justify="left" if first else "right", no_wrap=not first, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
