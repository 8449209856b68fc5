"""Options that a constructor hands to its base, shown and checked by their names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Init = TypeVar("Init", bound=Callable[..., None])


def spelled_out(base: type) -> Callable[[Init], Init]:
    """For an `__init__` with `**options`, which are the base's keyword-only ones: signature and errors are as if it had
    listed them."""

    def decorate(init: Init) -> Init:
        own = inspect.signature(init)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        of_base = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        options = [p for p in of_base if p.kind is p.KEYWORD_ONLY and p.name not in own.parameters]
        known = {p.name for p in (*kept, *options)}

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            for name in given:
                if name not in known:
                    raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}")
            init(self, *args, **given)

        checked.__signature__ = own.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate
