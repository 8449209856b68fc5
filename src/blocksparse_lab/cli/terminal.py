"""What all commands share: tables, lines and progress bars on the terminal, and the files that an option asks for."""

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

from ..text_table import table as table

JsonFile = Annotated[Path | None, typer.Option("--json", help="A file for the numbers.")]

COUNT = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
LEFT = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())


def say(console: Console, text: str, style: str | None = None) -> None:
    """Prints a line as it is: not wrapped, so that it can be copied, and without colours that guess."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def short(number: float, letters: str = "kMBT") -> str:
    """
    >>> short(86_319_360), short(1.2e9, "kMG"), short(512)
    ('86.3M', '1.2G', '512')
    """
    for power, letter in reversed(list(enumerate(letters, 1))):
        if number >= 1000**power:
            return f"{number / 1000**power:.3g}{letter}"
    return f"{number:.3g}"


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "epoch"), plural(1200, "epoch")
    ('1 epoch', '1,200 epochs')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


# -- progress ------------------------------------------------------------------------------------------------------


def bar(console: Console, *columns: ProgressColumn, transient: bool = True) -> Progress:
    """A bar, with counts unless columns are given; on terminals only."""
    return Progress(*(columns or COUNT), console=console, transient=transient, disable=not console.is_terminal)


@contextmanager
def stages(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function of (stage, done, total) that shows the newest stage in one line; on terminals only."""
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


def make_folder(out: Path) -> Path:
    """Makes the folder of an `--out`; called before anything takes time."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BlockSparseError.expected("out", "a folder to write to", f"{out} ({error.strerror})") from error
    return out


def write(console: Console, option: str, path: Path, content: str | dict[str, Any], more: str = "") -> None:
    """Writes a file that an option asks for, a dict as JSON, and says so."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BlockSparseError.expected(option, "a file to write", f"{path} ({error.strerror})") from error
    say(console, f"wrote {path}{more}")
