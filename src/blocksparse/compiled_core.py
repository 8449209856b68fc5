"""The compiled core, shared by the front ends: availability, and the instruction set of its kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

from .errors import BlockSparseError

ISA_VARIABLE = "BLOCKSPARSE_CPU_ISA"
# The newest names that Python calls: a core without one of them was built from older sources.
NEWEST = "plan_blocks", "xla_linear", "expert_linear", "replace_blocks"

# The names that `use_isa` chose, the last one in use; keyed by objects, so that uses may end in any order.
_forced: dict[object, str] = {}


@cache
def load() -> tuple[ModuleType | None, str | None]:
    """Import the compiled core; return it, or None and the reason."""
    try:
        from . import _core
    except ImportError as error:
        return None, (
            f"the compiled core blocksparse._core does not load ({error}). In a clone, build it with `pip install .` "
            "(needs a C++17 compiler) or, to work on the clone, with `make setup`. A wheel has the core for one "
            "version of Python: install the one for this Python again"
        )
    for name in NEWEST:
        if not hasattr(_core, name):
            return None, (
                f"the compiled core blocksparse._core is older than this Python code: it lacks {name}. Build it again "
                "with `pip install .` or, to work on a clone, with `make setup`"
            )
    return _core, None


def core() -> ModuleType:
    """Return the compiled module; if it is missing, raise a BlockSparseError that says how to build it."""
    module, reason = load()
    if module is None:
        raise BlockSparseError(reason)
    return module


def isas() -> dict[str, bool]:
    """Return the instruction sets of the compiled core, slowest first, and whether this CPU has them."""
    return dict(core().isas())


def isa() -> str:
    """Return the instruction set in use: the best of this CPU, or that of the environment variable; chosen once."""
    forced = [*_forced.values()]  # a copy, as other threads change it
    return forced[-1] if forced else _chosen()


@cache
def _chosen() -> str:
    """Return the instruction set of the environment variable, or the best one of this CPU."""
    name = os.environ.get(ISA_VARIABLE)
    if name:
        return _check_isa(name, f"environment variable {ISA_VARIABLE}")
    usable = [name for name, here in isas().items() if here and not name.endswith("_emulated")]
    if not usable:
        raise BlockSparseError(
            f"the compiled core serves {', '.join(isas())}, which this CPU lacks: it was built on another machine. "
            "Build it again on this machine (`pip install .` in a clone), or for any machine with "
            "--config-settings=cmake.define.BLOCKSPARSE_SETS=all"
        )
    return usable[-1]


@contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Run the CPU kernels of the whole process with this instruction set inside the `with`, for tests."""
    key = object()
    _forced[key] = _check_isa(name, "isa")
    try:
        yield
    finally:
        del _forced[key]


def _check_isa(name: str, subject: str) -> str:
    """Check that this CPU has an instruction set, and return its name."""
    here = [isa for isa, present in isas().items() if present]
    if name not in here:
        requirement = f"an instruction set this CPU has and the core was built for ({', '.join(here)})"
        raise BlockSparseError.expected(subject, requirement, repr(name))
    return name
