"""Chooses the backend that serves a call; a refusal has its reason.

A backend of an op is a module in the op's folder with the op's products as functions and a function
`refusal(device, dtype) -> str | None`: why it cannot serve such a call, or None when it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ..errors import BlockSparseError

_BACKEND_OF_DEVICE = {"cpu": "cpu", "cuda": "triton"}
# For the whole process, since autograd runs backward passes in threads of its own; the last entry applies. Keyed, so
# that each `with` removes its own entry, in whatever order threads exit theirs.
_forced: dict[object, str] = {}


@dataclass(frozen=True)
class BackendStatus:
    """One backend as seen from here: usable, or the reason why not."""

    name: str
    reason: str | None = None
    details: str = ""

    @property
    def usable(self) -> bool:
        return self.reason is None

    def __bool__(self) -> bool:
        return self.usable

    def __str__(self) -> str:
        return f"off: {self.reason}" if self.reason else f"usable{': ' + self.details if self.details else ''}"


def backends() -> dict[str, BackendStatus]:
    """Every backend, usable or the reason why not.

    >>> import blocksparse as bs
    >>> list(bs.backends())
    ['triton', 'cpu', 'reference']
    >>> bs.backends()["reference"].usable
    True
    """
    from . import cpu_core
    from .gpu import runtime as triton_runtime

    no_gpu, no_core = triton_runtime.unavailable(), cpu_core.unavailable()
    return {
        "triton": BackendStatus("triton", no_gpu, "" if no_gpu else triton_runtime.details()),
        "cpu": BackendStatus("cpu", no_core, "" if no_core else f"instruction set {cpu_core.isa()}"),
        "reference": BackendStatus("reference", details="plain PyTorch on any device, the definition; slow"),
    }


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within it, every call of the process is served by the backend `name`, or refused with the reason.

    Raises:
        BlockSparseError: no backend of that name, or one that is off here.

    >>> import torch, blocksparse as bs
    >>> layout = bs.patterns.dense((4, 4), block_size=2)
    >>> with bs.use_backend("reference"):
    ...     bs.linear(torch.ones(1, 4), torch.ones(layout.values_shape), layout)
    tensor([[4., 4., 4., 4.]])
    """
    known = backends()
    if not isinstance(name, str) or name not in known:
        raise BlockSparseError.expected("backend", f"one of {', '.join(known)}", repr(name))
    if not known[name]:
        raise BlockSparseError.expected("backend", "a usable one", f"{name!r}, which is off here: {known[name].reason}")
    key = object()
    _forced[key] = name
    try:
        yield
    finally:
        del _forced[key]


def choose(op: str, implementations: Mapping[str, ModuleType], device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The implementation of `op` for tensors of this device and dtype, or a BlockSparseError that says why none."""
    name = _wanted(device)
    if name is None or name not in implementations:
        reason = f"there is no {name or device.type} backend of it yet"
    else:
        refusal = implementations[name].refusal(device, dtype)
        if refusal is None:
            return implementations[name]
        reason = f"the {name} backend refuses: {refusal}"
    raise BlockSparseError.expected(
        op,
        "a dtype and a device that its backend serves",
        f"{dtype} on {device}: {reason}. The plain PyTorch definition runs anywhere, slowly: "
        f'`with blocksparse.use_backend("reference"): ...`',
    )


def choose_or_reference(implementations: Mapping[str, ModuleType], device: torch.device, dtype: torch.dtype) -> Any:
    """As `choose`, of an op whose definition is good enough wherever nothing else serves: there it is taken."""
    found = implementations.get(_wanted(device) or "")
    return implementations["reference"] if found is None or found.refusal(device, dtype) is not None else found


def _wanted(device: torch.device) -> str | None:
    forced = [*_forced.values()]  # a copy, as other threads change it
    return forced[-1] if forced else _BACKEND_OF_DEVICE.get(device.type)
