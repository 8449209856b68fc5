"""Pickles of plain data: numbers, texts, lists, dicts and numpy's arrays, made step by step as the file says.

No function that a pickle names is called, and memory is bounded by the size of the file. Python's own reader is not
safe for files from others: it gives a memo or a text as much memory as the file demands, and crashes on deeply
nested keys.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blocksparse import files
from blocksparse.errors import BlockSparseError

# Steps of a pickle: each makes one object at most. Pubmed's graph takes 200,000.
MOST_STEPS = 1 << 21
MOST_DIMENSIONS = 8

_DTYPES = ("b1", "u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
_CSR = ("scipy.sparse", "scipy.sparse.csr", "scipy.sparse._csr")
_KNOWN = {
    **{(module, "_reconstruct"): "array" for module in _MULTIARRAY},
    **{(module, "scalar"): "scalar" for module in _MULTIARRAY},
    **{(module, "_frombuffer"): "buffer" for module in _NUMERIC},
    **{(module, "csr_matrix"): "csr" for module in _CSR},
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("collections", "defaultdict"): "dict",
    ("__builtin__", "list"): "list",
    ("builtins", "list"): "list",
    ("__builtin__", "bytes"): "bytes",
    ("_codecs", "encode"): "encode",
}


class PickleError(ValueError):
    """A fault in a pickle."""


@dataclass
class Array:
    """An array, as far as its pickle has been read."""

    shape: Any = None
    dtype: Any = None
    fortran: Any = False
    data: Any = None

    def numpy(self) -> np.ndarray:
        """The array, a copy."""
        dtype = self.dtype.numpy() if isinstance(self.dtype, _Dtype) else None
        shape = self.shape if isinstance(self.shape, tuple) else None
        data = self.data
        if isinstance(data, str):  # as Python 2's bytes are read
            try:
                data = data.encode("latin1")
            except UnicodeEncodeError as error:
                raise PickleError("an array of a text") from error
        fine = shape is not None and len(shape) <= MOST_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)
        if dtype is None or shape is None or not fine or not isinstance(data, bytes | bytearray):
            raise PickleError("an array without a shape, a dtype or its bytes")
        if math.prod(shape) * dtype.itemsize != len(data) or math.prod(filter(None, shape)) >= 2**60:
            raise PickleError(f"{len(data)} bytes for an array of {dtype} {list(shape)}")
        array = np.frombuffer(data, dtype).reshape(shape, order="F" if self.fortran is True else "C")
        return np.array(array, dtype.newbyteorder("="), order="C")


@dataclass
class Csr:
    """A sparse matrix of scipy's, as its pickle has it: nothing of it is checked."""

    parts: dict[Any, Any] = field(default_factory=dict)


@dataclass
class _Dtype:
    name: Any
    order: Any = "="

    def numpy(self) -> np.dtype[Any]:
        name = self.name.decode("latin1") if isinstance(self.name, bytes) else self.name
        order = self.order.decode("latin1") if isinstance(self.order, bytes) else self.order
        if name not in _DTYPES or order not in ("<", ">", "=", "|"):
            raise PickleError(f"an array of {_short(name)}")
        return np.dtype(order + name)


@dataclass(frozen=True)
class _Name:
    """The name of a function that the pickle would have called."""

    kind: str


def read(path: Any, subject: str, wanted: str) -> Any:
    """Reads a pickle, with an `Array` or a `Csr` for each array or sparse matrix.

    Texts of Python 2, and bytes in its protocols, are read as Latin-1. Keys of dicts are numbers and texts.

    Args:
        subject: what an error is about where the file cannot be read.
        wanted: what the file should be.
    """
    data = files.read(path, subject)
    try:
        return _load(data)
    except Exception as error:  # a broken pickle may raise anything
        raise BlockSparseError.expected(str(path), wanted, f"a broken one: {str(error)[:200]}") from error


def _load(data: bytes) -> Any:
    machine = _Machine()
    for steps, (code, argument, _) in enumerate(pickletools.genops(data)):
        if steps == MOST_STEPS:
            raise PickleError(f"more than {MOST_STEPS:,} steps")
        machine.step(code.name, argument)
    if len(machine.stack) != 1:
        raise PickleError("more or less than one object")
    return machine.stack[0]


class _Machine:
    """The stack, the marks in it, and the memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, code: str, argument: Any) -> None:
        push = self.stack.append
        match code:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "INT" | "BININT" | "BININT1" | "BININT2" | "LONG" | "LONG1" | "LONG4":
                if not -(2**63) <= argument < 2**63:
                    raise PickleError("a number that is no int64")
                push(argument)
            case "FLOAT" | "BINFLOAT" | "STRING" | "BINSTRING" | "SHORT_BINSTRING":
                push(argument)
            case "UNICODE" | "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
                push(argument)
            case "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8" | "BYTEARRAY8":
                push(argument)
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                push(self.memo[argument])
            case "MARK":
                self.marks.append(len(self.stack))
            case "NONE":
                push(None)
            case "NEWTRUE" | "NEWFALSE":
                push(code == "NEWTRUE")
            case "EMPTY_TUPLE":
                push(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                push(tuple(self._pop(int(code[-1]))))
            case "TUPLE":
                push(tuple(self._marked()))
            case "EMPTY_LIST":
                push([])
            case "LIST":
                push(self._marked())
            case "APPEND" | "APPENDS":
                some = self._pop(1) if code == "APPEND" else self._marked()
                self._top(list).extend(some)
            case "EMPTY_DICT":
                push({})
            case "DICT":
                push(_dict({}, self._marked()))
            case "SETITEM" | "SETITEMS":
                some = self._pop(2) if code == "SETITEM" else self._marked()
                _dict(self._top(dict), some)
            case "GLOBAL":
                push(_named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                push(_named(*self._pop(2)))
            case "REDUCE" | "NEWOBJ":
                push(_made(code, *self._pop(2)))
            case "BUILD":
                (state,) = self._pop(1)
                _build(self._top(Array, Csr, _Dtype), state)
            case _:
                raise PickleError(f"{code} is not to be in it")

    def _pop(self, count: int) -> list[Any]:
        """The last objects; those before the last mark are not at hand."""
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            raise PickleError("too few objects")
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def _marked(self) -> list[Any]:
        found = self.stack[self.marks[-1] :]
        del self.stack[self.marks.pop() :]
        return found

    def _top(self, *kinds: type) -> Any:
        if not self.stack or type(self.stack[-1]) not in kinds:
            raise PickleError("something put into what does not hold it")
        return self.stack[-1]


def _dict(into: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    keys = items[::2]
    if len(items) % 2 or not all(type(key) in (int, str, bytes) for key in keys):
        raise PickleError("a dict with keys that are neither numbers nor texts")
    into.update(zip(keys, items[1::2], strict=True))
    return into


def _named(module: Any, name: Any) -> _Name:
    if type(module) is not str or type(name) is not str or (module, name) not in _KNOWN:
        raise PickleError(f"{_short(module)}.{_short(name)} is not to be in it")
    return _Name(_KNOWN[module, name])


def _short(name: Any) -> str:
    # Other objects may contain themselves many times over.
    return name[:40] if isinstance(name, str) else f"a {type(name).__name__}"


def _made(code: str, what: Any, arguments: Any) -> Any:
    """The stand-in for an object that a pickle makes by a call."""
    kind = what.kind if isinstance(what, _Name) else ""
    match code, kind, arguments:
        case "REDUCE", "array", tuple():
            return Array()
        case "REDUCE", "buffer", (data, dtype, shape, order, *_):
            return Array(shape, dtype, order == "F", data)
        case "REDUCE", "scalar", (dtype, data):
            return Array((), dtype, False, data).numpy().item()
        case "REDUCE", "dtype", (name, *_):
            return _Dtype(name)
        case "REDUCE", "encode", (str() as text, *_):  # Python 3's bytes in the protocols of Python 2
            return text
        case "REDUCE", "bytes", ():
            return b""
        case "REDUCE", "dict", tuple():
            return {}
        case "NEWOBJ", "csr", ():
            return Csr()
    raise PickleError(f"a call of {kind or 'an object'} that is not to be in it")


def _build(what: Any, state: Any) -> None:
    match what, state:
        case Array(), (_, shape, dtype, fortran, data):
            what.shape, what.dtype, what.fortran, what.data = shape, dtype, fortran, data
        case _Dtype(), (_, order, *_):
            what.order = order
        case Csr(), dict():
            what.parts = state
        case _:
            raise PickleError(f"a state that is none of {type(what).__name__.strip('_')}")
