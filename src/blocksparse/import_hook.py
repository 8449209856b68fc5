"""Callbacks that run when another library is imported; importing it ourselves would take seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Finder(MetaPathFinder):
    """A finder that wraps the loader of one module, so that the callback runs after the module's own code.

    Looking for the module, without importing it, does not remove this finder.
    """

    def __init__(self, name: str, callback: Callable[[ModuleType], object]):
        self.name, self.callback = name, callback

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the awaited module, with a loader that also makes the callback; None for other modules."""
        spec = PathFinder.find_spec(name, path) if name == self.name else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self.callback(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def when_imported(name: str, callback: Callable[[ModuleType], object]) -> None:
    """Call `callback` with the module `name`: now if it is imported already, else as soon as it is."""
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, callback))
