"""Work that waits for another library: importing that library here would take seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Waiting(MetaPathFinder):
    """Stays until the module is executed: others may ask where it is, and never import it."""

    def __init__(self, name: str, run: Callable[[ModuleType], object]):
        self.name, self.run = name, run

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == self.name else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_run(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self.run(module)

        spec.loader.exec_module = execute_and_run  # type: ignore[method-assign]
        return spec


def when_imported(name: str, run: Callable[[ModuleType], object]) -> None:
    """Calls `run` with the module of this name: now if it has been imported, else as soon as it is."""
    if name in sys.modules:
        run(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Waiting(name, run))
