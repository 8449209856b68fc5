"""The compiled CPU core, shared by all ops: is it there, which instruction set, whose threads."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from ..errors import BlockSparseError

ISA_VARIABLE = "BLOCKSPARSE_CPU_ISA"
# What the core calls the dtypes that it serves.
DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_forced: list[str] = []


@cache
def _load() -> tuple[ModuleType | None, str | None]:
    try:
        from .. import _core
    except ImportError as error:
        return None, (
            f"the compiled core blocksparse._core does not load ({error}). Build it with `pip install .` in the "
            "source tree (needs a C++17 compiler), or `make setup` for development"
        )
    # The addresses of PyTorch's own parallel loop: one pool of threads for both, sized by torch.set_num_threads.
    (library,) = (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")
    torch_cpu = ctypes.CDLL(str(library))
    try:
        loop, count = torch_cpu.torch_parallel_for, torch_cpu.torch_get_num_threads
    except AttributeError:
        return None, f"PyTorch {torch.__version__} does not share its threads: 2.10 or newer is needed"
    _core.share_threads(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (loop, count)))
    return _core, None


@cache
def unavailable() -> str | None:
    """Why the compiled core cannot be used, or None when it can."""
    reason = _load()[1]
    if reason is None:
        try:
            isa()
        except BlockSparseError as error:
            reason = str(error)
    return reason


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the core cannot serve such tensors, or None when it can: the `refusal` of each op's CPU backend."""
    if device.type != "cpu":
        return f"it serves tensors on the CPU, not on {device}"
    if dtype not in DTYPES:
        return f"it serves {', '.join(str(known) for known in DTYPES)}"
    return unavailable()


def core() -> ModuleType:
    """The compiled module; a BlockSparseError that says how to build it where it is missing."""
    module, reason = _load()
    if module is None:
        raise BlockSparseError(reason)
    return module


def isas() -> dict[str, bool]:
    """The instruction sets compiled in, slowest first, and whether this CPU has them."""
    return dict(core().isas())


def isa() -> str:
    """The instruction set in use: the best this CPU has, or what the environment variable says; chosen once."""
    return _forced[-1] if _forced else _chosen()


@cache
def _chosen() -> str:
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted:
        return _checked(wanted, f"environment variable {ISA_VARIABLE}")
    return [name for name, here in isas().items() if here and not name.endswith("_emulated")][-1]


@contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Within it, the CPU kernels run with the instruction set `name`: for tests and comparisons."""
    _forced.append(_checked(name, "isa"))
    try:
        yield
    finally:
        _forced.pop()


def _checked(name: str, subject: str) -> str:
    here = [isa for isa, present in isas().items() if present]
    if name not in here:
        raise BlockSparseError.expected(subject, f"an instruction set this CPU has ({', '.join(here)})", repr(name))
    return name
