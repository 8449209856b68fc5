"""Settings whose default, check and help are said once: fields of dataclasses, from which the command line is made."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, name: str | None = None) -> Any:
    """A dataclass field that is an option of the command line too; a field without help is none.

    Args:
        default: of the field and of the option.
        help: what it is.
        name: of the option, where it is not the field's.

    >>> from dataclasses import dataclass, fields
    >>> from blocksparse_lab.option import option
    >>> @dataclass
    ... class Sizes:
    ...     width: int = option(64, "Hidden units.")
    >>> Sizes().width, fields(Sizes)[0].metadata["help"]
    (64, 'Hidden units.')
    """
    return field(default=default, metadata={"help": help, "option": name})
