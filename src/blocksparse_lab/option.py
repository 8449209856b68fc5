"""Dataclass fields that are also options of the command line."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, name: str | None = None) -> Any:
    """Return a dataclass field that is also a command-line option. Fields without help are not options.

    Args:
        default: of the field and the option.
        help: shown by `--help`.
        name: of the option; by default the field's name.

    >>> from dataclasses import dataclass, fields
    >>> from blocksparse_lab.option import option
    >>> @dataclass
    ... class Sizes:
    ...     width: int = option(64, "Hidden units.")
    >>> Sizes().width, fields(Sizes)[0].metadata["help"]
    (64, 'Hidden units.')
    """
    return field(default=default, metadata={"help": help, "option": name})
