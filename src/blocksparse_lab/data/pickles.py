"""Read untrusted pickles of plain data: numbers, texts, lists, dicts and numpy arrays.

Stand-ins replace the functions of numpy and scipy, and no function that a pickle names is called. Opcodes are checked
before, and dict keys during the read: the hash of nested tuples can take 2^n steps in a file of n, or overflow the
stack.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from blocksparse import files
from blocksparse.errors import BlockSparseError

# Each opcode makes at most one object. Pubmed's graph needs 200,000.
MAX_STEPS = 1 << 21
MAX_DIMENSIONS = 8

_DTYPES = ("b1", "u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
_STEPS = re.compile(
    "PROTO|FRAME|STOP|MARK|NONE|NEW(TRUE|FALSE|OBJ)|(BIN)?INT[12]?|LONG[14]?|(BIN)?FLOAT|BYTEARRAY8|MEMOIZE|BUILD|REDUCE"
    "|(SHORT_)?(BIN)?(STRING|UNICODE|BYTES)8?|(LONG_)?(BIN)?(PUT|GET)|(EMPTY_)?(TUPLE[123]?|LIST|DICT)|APPENDS?"
    "|SETITEMS?|(STACK_)?GLOBAL"
)


class PickleError(ValueError):
    """A fault in a pickle."""


@dataclass
class _Dtype:
    name: Any = None
    order: Any = "="

    def __setstate__(self, state: Any) -> None:
        _, self.order, *_ = state

    def numpy(self) -> np.dtype[Any]:
        name, order = (x.decode("latin1") if isinstance(x, bytes) else x for x in (self.name, self.order))
        if name not in _DTYPES or order not in ("<", ">", "=", "|"):
            # Arrays of objects may contain themselves many times over.
            raise PickleError(f"an array of {name[:40] if isinstance(name, str) else f'a {type(name).__name__}'}")
        return np.dtype(order + name)


@dataclass
class Array:
    """An array as its pickle describes it, unchecked."""

    shape: Any = None
    dtype: Any = None
    fortran: Any = False
    data: Any = None

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, self.fortran, self.data = state

    def numpy(self) -> np.ndarray:
        """Check the description and return the array, a copy."""
        dtype = self.dtype.numpy() if isinstance(self.dtype, _Dtype) else None
        shape, data = self.shape, self.data
        if isinstance(data, str):  # Python 2's bytes are read as str
            data = data.encode("latin1")
        fine = isinstance(shape, tuple) and len(shape) <= MAX_DIMENSIONS
        fine = fine and all(type(n) is int and n >= 0 for n in shape)
        if dtype is None or not fine or not isinstance(data, bytes | bytearray):
            raise PickleError("an array without a shape, a dtype or its bytes")
        if math.prod(shape) * dtype.itemsize != len(data) or math.prod(filter(None, shape)) >= 2**60:
            raise PickleError(f"{len(data)} bytes for an array of {dtype} {list(shape)}")
        array = np.frombuffer(data, dtype).reshape(shape, order="F" if self.fortran is True else "C")
        return np.array(array, dtype.newbyteorder("="), order="C")


class Csr:
    """A scipy sparse matrix as its pickle describes it, unchecked."""

    parts: Mapping[Any, Any] = MappingProxyType({})

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise PickleError("a matrix without its parts")
        self.parts = state


@dataclass(frozen=True)
class _Function:
    """A stand-in for a function that a pickle names."""

    name: str
    call: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self.call(*arguments)
        except TypeError:
            raise PickleError(f"{self.name} of something else than it takes") from None

    def __setstate__(self, state: Any) -> None:
        raise PickleError("a state of a function")


def _modules(*modules: str, **names: Any) -> dict[tuple[str, str], Any]:
    return {(module, name): _Function(f"{module}.{name}", call) for module in modules for name, call in names.items()}


_KNOWN: dict[tuple[str, str], Any] = {
    **_modules(
        "numpy.core.multiarray",
        "numpy._core.multiarray",
        _reconstruct=lambda *_: Array(),
        scalar=lambda dtype, data: Array((), dtype, False, data).numpy().item(),
    ),
    **_modules(
        "numpy.core.numeric",
        "numpy._core.numeric",
        _frombuffer=lambda data, dtype, shape, order, *_: Array(shape, dtype, order == "F", data),
    ),
    **_modules("numpy", ndarray=Array, dtype=lambda name, *_: _Dtype(name)),
    **_modules("collections", defaultdict=lambda *_: {}),
    **_modules("builtins", "__builtin__", list=lambda: [], bytes=lambda: b""),
    **_modules("_codecs", encode=lambda text, *_: text),  # Python 3's bytes in Python 2's protocols
    **{(module, "csr_matrix"): Csr for module in ("scipy.sparse", "scipy.sparse.csr", "scipy.sparse._csr")},
}


class _Reader(pickle._Unpickler):  # the Python version, whose opcodes can be overridden
    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise PickleError(f"{module[:40]}.{name[:40]} is not to be in it")
        return _KNOWN[module, name]

    def _with_plain_keys(self, code: bytes, keys: slice) -> None:
        """Run a dict opcode after a check of its keys."""
        for key in self.stack[keys]:
            if not isinstance(key, str | bytes | int | float):
                raise PickleError(f"a {type(key).__name__} as a key")
        step: Callable[[Any], None] = pickle._Unpickler.dispatch[code[0]]
        step(self)

    dispatch[pickle.SETITEM[0]] = lambda self: self._with_plain_keys(pickle.SETITEM, slice(-2, -1))
    dispatch[pickle.SETITEMS[0]] = lambda self: self._with_plain_keys(pickle.SETITEMS, slice(0, None, 2))
    dispatch[pickle.DICT[0]] = lambda self: self._with_plain_keys(pickle.DICT, slice(0, None, 2))


def read(path: Any, subject: str, wanted: str) -> Any:
    """Read a pickle, with an `Array` or a `Csr` for each array or sparse matrix.

    Python 2's texts, and bytes in its protocols, are read as Latin-1.

    Args:
        subject: names the file in errors about reading it.
        wanted: what the file should be.
    """
    data = files.read(path, subject)
    try:
        _check_steps(data)
        return _Reader(io.BytesIO(data), encoding="latin1").load()
    except Exception as error:  # a broken pickle may raise anything
        raise BlockSparseError.expected(str(path), wanted, f"a broken one: {str(error)[:200]}") from error


def _check_steps(data: bytes) -> None:
    """Raise if opcodes need more time or memory than the file has bytes, or make more than plain data."""
    for steps, (code, argument, _) in enumerate(pickletools.genops(data)):
        if steps == MAX_STEPS:
            raise PickleError(f"more than {MAX_STEPS:,} steps")
        if not _STEPS.fullmatch(code.name):
            raise PickleError(f"{code.name} is not to be in it")
        size = argument if type(argument) is int else 0
        if not -(2**63) <= size < 2**63:
            raise PickleError("a number that is no int64")
        if ("PUT" in code.name and size > MAX_STEPS) or (code.name == "FRAME" and size > len(data)):
            raise PickleError(f"{code.name} {size:,}")
