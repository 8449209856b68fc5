"""Tables, lines, progress bars and output files, shared by all commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from blocksparse.errors import BlockSparseError

from ..folders import make_folder as make_folder
from ..text_table import table as table

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the numbers to this JSON file.")]

COUNT = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
LEFT = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line verbatim: not wrapped, so that it can be copied, and without highlighting."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def short(number: float, letters: str = "kMBT") -> str:
    """Format a number in three digits and a letter.

    >>> short(86_319_360), short(1.2e9, "kMG"), short(512)
    ('86.3M', '1.2G', '512')
    """
    for power, letter in reversed(list(enumerate(letters, 1))):
        if number >= 1000**power:
            return f"{number / 1000**power:.3g}{letter}"
    return f"{number:.3g}"


def plural(count: int, noun: str) -> str:
    """Format a count and its noun.

    >>> plural(1, "epoch"), plural(1200, "epoch")
    ('1 epoch', '1,200 epochs')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


# -- progress ------------------------------------------------------------------------------------------------------


def bar(console: Console, *columns: ProgressColumn, transient: bool = True) -> Progress:
    """Return a progress bar, by default with counts; shown only on terminals."""
    return Progress(*(columns or COUNT), console=console, transient=transient, disable=not console.is_terminal)


@contextmanager
def stages(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of (stage, done, total) that shows the newest stage in one line, only on terminals."""
    tasks: dict[str, Any] = {}
    with bar(console, *COUNT[:2], TaskProgressColumn(), *LEFT) as progress:

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    progress.update(task, visible=False)
                tasks[what] = progress.add_task(what, total=None)
            progress.update(tasks[what], completed=done, total=total or None)

        yield tell


# -- files ---------------------------------------------------------------------------------------------------------


def write(console: Console, option: str, path: Path, content: str | dict[str, Any], more: str = "") -> None:
    """Write the file of an option, a dict as JSON, and report it."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BlockSparseError.expected(option, "a file to write", f"{path} ({error.strerror})") from error
    say(console, f"wrote {path}{more}")
