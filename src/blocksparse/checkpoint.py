"""Checkpoints: tensors and their description in one safetensors file, replaced atomically.

The file has a CRC-32 of each tensor and one of its header. It is for what disks, memory and networks do to files, and
is several times as fast as a cryptographic digest, which would not keep anybody from writing another file either.
"""

from __future__ import annotations

import errno
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .checked import is_int
from .errors import BlockSparseError
from .files import path_of

__all__ = [
    "TensorStream",
    "about",
    "as_json",
    "check_sizes",
    "in_order",
    "load",
    "opened",
    "parsed",
    "part",
    "read_json",
    "save",
    "task_of",
    "write_text",
]

FORMAT = "blocksparse checkpoint"
VERSION = 2  # 1 had no checksums

# What each file begins with after its length, and then the checksum of the header, as if it were zeros there.
_BEGIN = b'{"__metadata__": {"checksum": "'
_ZEROS = b"00000000"

# Levels of nested JSON, as code that walks through it may recurse at each level.
DEEPEST = 50

_BINARY = getattr(os, "O_BINARY", 0)  # on Windows

# As safetensors names them.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class TensorStream:
    """A tensor that arrives in pieces, for example from other processes.

    Args:
        shape, dtype: those of the whole tensor.
        pieces: consecutive pieces of the flattened tensor, in any shapes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Iterable[Tensor]


def save(path: str | Path, tensors: Mapping[str, Tensor | TensorStream], about: Mapping[str, Any]) -> None:
    """Writes a checkpoint atomically: at any moment the file holds either the old one or the new one, whole.

    Tensors go to the file one by one from where they are: contiguous ones on the CPU take no more memory.

    Args:
        path: the file; a second one, `path.part`, exists while this runs.
        tensors: of any shapes and devices, and of `DTYPES`; or of `TensorStream`s, which are read in the order of
            `in_order`. Those that share memory are stored one by one.
        about: what goes with them, ready for JSON.

    Raises:
        BlockSparseError: it could not be written, something that is no tensor with numbers of these dtypes, an `about`
            that JSON cannot express. What was there is still there.

    >>> import tempfile, torch
    >>> from blocksparse import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(f"{folder}/last.safetensors", {"x": torch.arange(3)}, {"step": 7})
    ...     checkpoint.load(f"{folder}/last.safetensors")
    ({'x': tensor([0, 1, 2])}, {'step': 7})
    """
    path = path_of("checkpoint", path)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor | TensorStream):
            raise BlockSparseError.expected(name, "a tensor", type(tensor).__name__)
        if isinstance(tensor, Tensor) and tensor.is_meta:
            raise BlockSparseError.expected(name, "a tensor with numbers", "one on the meta device")
        if tensor.dtype not in DTYPES:
            raise BlockSparseError.expected(name, f"one of {', '.join(map(str, DTYPES))}", tensor.dtype)
    metadata = {"format": FORMAT, "version": str(VERSION), "about": as_json(about)}
    try:
        _replace(path, lambda file: _write(file, tensors, metadata))
    except OSError as error:
        left = "the checkpoint before it is whole" if path.exists() else "there is none before it"
        raise BlockSparseError.expected(
            str(path),
            "a place to write a checkpoint to",
            f"{error.strerror or error}; {left}. Free some space or correct the folder, then run again",
        ) from error


def load(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of a checkpoint, on the CPU, and its description.

    Raises:
        BlockSparseError: no such file, one cut short, one of which a byte has changed, one that is no checkpoint of
            ours or of another version.
    """
    with opened(path) as (tensors, about):
        # Copies, as not every system lets a mapped file be replaced.
        return {name: tensor.clone() for name, tensor in tensors.items()}, about


@contextmanager
def opened(path: str | Path) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Opens a checkpoint as `load` does, without a copy: the tensors map the file and must be copied within the `with`.

    Raises:
        BlockSparseError: as `load`.

    >>> import tempfile, torch
    >>> from blocksparse import checkpoint
    >>> x = torch.zeros(3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(f"{folder}/last.safetensors", {"x": torch.ones(3)}, {})
    ...     with checkpoint.opened(f"{folder}/last.safetensors") as (tensors, about):
    ...         x.copy_(tensors["x"])
    tensor([1., 1., 1.])
    """
    path = path_of("checkpoint", path)
    with _file(path) as (file, metadata):
        about, sums = parsed(metadata["about"]), parsed(metadata["checksums"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if not isinstance(about, dict) or not isinstance(sums, dict) or sums.keys() != tensors.keys():
            raise ValueError("its description is that of no checkpoint")
        for name, tensor in tensors.items():
            if (found := _checksum(_bytes(tensor))) != sums[name]:
                raise BlockSparseError.expected(
                    str(path), f"{name} as it was written, with checksum {sums[name]}", f"{found}: the file is damaged"
                )
    yield tensors, about


def about(path: str | Path) -> dict[str, Any]:
    """Returns the description in a checkpoint, without reading its tensors.

    Raises:
        BlockSparseError: as `load`, but that tensors may be damaged.
    """
    with _file(Path(path)) as (_, metadata):
        found = parsed(metadata["about"])
        if not isinstance(found, dict):
            raise ValueError("its description is that of no checkpoint")
    return found


def as_json(about: Mapping[str, Any]) -> str:
    """The description that goes with tensors, as it is stored.

    Raises:
        BlockSparseError: JSON cannot express it.
    """
    try:
        return json.dumps(about)
    except (TypeError, ValueError, RecursionError) as error:
        raise BlockSparseError.expected("about", "what JSON can express", error) from error


def parsed(text: str | bytes) -> Any:
    """Parses JSON.

    Raises:
        ValueError: it is none, or is nested too deeply.
    """
    try:
        found = json.loads(text)
        _check_depth(found, DEEPEST)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    return found


def _check_depth(found: Any, left: int) -> None:
    if left == 0:
        raise RecursionError
    if isinstance(found, dict | list):
        for one in found.values() if isinstance(found, dict) else found:
            _check_depth(one, left - 1)


def read_json(path: Path) -> dict[str, Any]:
    """The dict in a file of JSON.

    Raises:
        BlockSparseError: no such file, or something else in it.
    """
    try:
        found = parsed(path.read_bytes())
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise BlockSparseError.expected(str(path), "a file of JSON", said) from error
    if not isinstance(found, dict):
        raise BlockSparseError.expected(str(path), "a dict in JSON", type(found).__name__)
    return found


def task_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the trainer's description of its task; {} where there is none."""
    task = about.get("task")
    return task if isinstance(task, dict) else {}


def check_sizes(path: Path, tensors: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> None:
    """Refuses a configuration with sizes that no tensor has, before anything of that size is allocated.

    Raises:
        BlockSparseError: what is no positive int, or more than the largest size and the number of the tensors.
    """
    most = max([len(tensors), *(size for tensor in tensors.values() for size in tensor.shape)], default=0)
    for name, size in sizes.items():
        if not is_int(size) or not 1 <= size <= most:
            expected = f"{name} as its tensors have it, an int from 1 to {most:,}"
            raise BlockSparseError.expected(str(path), expected, f"{size!r:.99}")


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically, as `save` writes a checkpoint.

    Raises:
        BlockSparseError: it could not be written.
    """
    try:
        _replace(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise BlockSparseError.expected(str(path), "a file to write to", error.strerror or error) from error


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the entries whose name begins with the prefix, by the rest of the name."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replaces a file atomically by what `write` writes: its bytes are on the disk before it gets its name."""
    part = path.with_name(f"{path.name}.part")
    # A file that a killed process left is removed, not opened: it may be a link to a file elsewhere.
    part.unlink(missing_ok=True)
    made = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | _BINARY, 0o666)
    try:
        with open(made, "wb") as file:
            write(file)
            file.flush()
            os.fsync(made)
            if not os.path.samestat(os.fstat(made), os.lstat(part)):
                raise OSError(errno.EBUSY, "another process writes it too")
        os.replace(part, path)
    finally:
        with suppress(OSError):  # after a success the file has been renamed already
            part.unlink()
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def in_order(tensors: Mapping[str, Tensor | TensorStream]) -> list[str]:
    """The names in the order of the file: the widest numbers first, so that each tensor begins at a multiple of its
    numbers' size."""
    return sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)


def _write(file: IO[bytes], tensors: Mapping[str, Tensor | TensorStream], metadata: Mapping[str, str]) -> None:
    """In the format of safetensors, whose own `save_file` leaves a file of a random name behind when it is killed."""
    order = in_order(tensors)
    sums = dict.fromkeys(order, _ZEROS.decode())
    file.write(bytes(len(_header(tensors, metadata, sums))))
    for name in order:
        tensor, checksum = tensors[name], 0
        for piece in tensor.pieces if isinstance(tensor, TensorStream) else [tensor]:
            numbers = _bytes(piece)
            checksum = zlib.crc32(numbers, checksum)
            file.write(numbers)
        sums[name] = f"{checksum:08x}"
    file.seek(0)
    file.write(_header(tensors, metadata, sums))


def _header(
    tensors: Mapping[str, Tensor | TensorStream], metadata: Mapping[str, str], sums: Mapping[str, str]
) -> bytes:
    """What is before the tensors, which are in the order of their checksums, with its length; as long for any sums."""
    own = {"checksum": _ZEROS.decode(), **metadata, "checksums": json.dumps(sums)}
    header: dict[str, Any] = {"__metadata__": own}
    end = 0
    for name in sums:
        tensor = tensors[name]
        begin, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    at = 8 + len(_BEGIN)
    return text[:at] + _checksum(text).encode() + text[at + len(_ZEROS) :]


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _checksum(data: bytes | memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


@contextmanager
def _file(path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """Opens a checkpoint with its metadata after checking its header; failures are reported as the file's."""
    try:
        present = path.is_file()
    except (OSError, ValueError) as error:  # a name that is too long, or has a zero byte
        raise BlockSparseError.expected("checkpoint", "a file", f"{str(path)[:80]!r} ({error})") from error
    if not present:
        kind = "a folder" if path.is_dir() else "not there"
        raise BlockSparseError.expected("checkpoint", "a file", f"{path}, which is {kind}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check(path, metadata)
            _check_header(path)
            yield file, metadata
    except BlockSparseError:
        raise
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise BlockSparseError.expected(
            str(path), "a whole checkpoint", f"{path.stat().st_size:,} bytes, cut short or of another kind: {error}"
        ) from error


def _check_header(path: Path) -> None:
    with open(path, "rb") as file:
        length = file.read(8)
        text = length + file.read(int.from_bytes(length, "little"))
    at = 8 + len(_BEGIN)
    end = at + len(_ZEROS)
    found = _checksum(text[:at] + _ZEROS + text[end:])
    if text[8:at] != _BEGIN or text[at:end] != found.encode():
        raise ValueError("its header is damaged")


def _check(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        got = f"a safetensors file with format {metadata.get('format')!r}"
        raise BlockSparseError.expected(str(path), f"a file with format {FORMAT!r}", got)
    if metadata.get("version") != str(VERSION):
        raise BlockSparseError.expected(str(path), f"version {VERSION} of the format", metadata.get("version"))
