"""A progress bar for what is done in stages, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(bar_width=24),
    TaskProgressColumn(),
    TimeElapsedColumn(),
    TextColumn("left"),
    TimeRemainingColumn(),
)


@contextmanager
def stages(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function of (stage, done, total) that shows the newest stage in one line; on terminals only."""
    tasks: dict[str, Any] = {}
    with Progress(*_COLUMNS, console=console, transient=True, disable=not console.is_terminal) as progress:

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    progress.update(task, visible=False)
                tasks[what] = progress.add_task(what, total=None)
            progress.update(tasks[what], completed=done, total=total or None)

        yield tell
