"""Checkpoints: tensors and a description in one safetensors file, replaced atomically.

The file has a CRC-32 of each tensor and of its header. These detect damage by disks, memory and networks. A
cryptographic digest would take several times as long, and would not prevent anybody from writing another file either.
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

# The start of the header, after its length. Then comes the header's checksum, computed with zeros in its place.
_BEGIN = b'{"__metadata__": {"checksum": "'
_ZEROS = b"00000000"

# The maximum number of levels of nested JSON, because code that reads it can recurse at each level.
MAX_DEPTH = 50

_BINARY = getattr(os, "O_BINARY", 0)  # on Windows

# The names of dtypes in safetensors.
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
    """Write a checkpoint atomically: at any moment the file is either the complete old one or the complete new one.

    Tensors are written one by one from their memory; contiguous tensors on the CPU need no further memory.

    Args:
        path: the file; a second file, `path.part`, exists during the call.
        tensors: tensors by name, of any shape and device, with a dtype of `DTYPES`; or `TensorStream`s, which are read
            in the order of `in_order`. Tensors that share memory are stored separately.
        about: the description, a dict that JSON can express.

    Raises:
        BlockSparseError: the file cannot be written, a value is not a tensor with data of these dtypes, or JSON cannot
            express `about`. The old file is unchanged then.

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
            raise BlockSparseError.expected(name, "a tensor with data", "one on the meta device")
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
    """Return the tensors of a checkpoint, on the CPU, and its description.

    Raises:
        BlockSparseError: the file does not exist, is truncated or damaged, or is not a checkpoint of this version.
    """
    with opened(path) as (tensors, about):
        # Copies, because some systems do not allow a mapped file to be replaced.
        return {name: tensor.clone() for name, tensor in tensors.items()}, about


@contextmanager
def opened(path: str | Path) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Open a checkpoint without copying its tensors: they map the file and are valid only inside the `with`.

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
    with _open(path) as (file, metadata):
        about, sums = parsed(metadata["about"]), parsed(metadata["checksums"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if not isinstance(about, dict) or not isinstance(sums, dict) or sums.keys() != tensors.keys():
            raise ValueError("its description is not that of a checkpoint")
        for name, tensor in tensors.items():
            if (found := _checksum(bytes_of(tensor))) != sums[name]:
                expected = f"{name} as it was written, with checksum {sums[name]}"
                raise BlockSparseError.expected(str(path), expected, f"{found}: the file is damaged")
    yield tensors, about


def about(path: str | Path) -> dict[str, Any]:
    """Return the description in a checkpoint, without reading its tensors.

    Raises:
        BlockSparseError: as `load`, except for damaged tensors, which are not detected.
    """
    with _open(path_of("checkpoint", path)) as (_, metadata):
        description = parsed(metadata["about"])
        if not isinstance(description, dict):
            raise ValueError("its description is not that of a checkpoint")
    return description


def as_json(about: Mapping[str, Any]) -> str:
    """Return the description as JSON text.

    Raises:
        BlockSparseError: JSON cannot express it.
    """
    try:
        return json.dumps(about)
    except (TypeError, ValueError, RecursionError) as error:
        raise BlockSparseError.expected("about", "values that JSON can express", error) from error


def parsed(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        value = json.loads(text)
        _check_depth(value, MAX_DEPTH)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    return value


def _check_depth(value: Any, levels: int) -> None:
    """Raise a RecursionError if dicts and lists are nested in more than this number of levels."""
    if levels == 0:
        raise RecursionError
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, levels - 1)


def read_json(path: Path) -> dict[str, Any]:
    """Return the dict in a JSON file.

    Raises:
        BlockSparseError: the file does not exist or has other content.
    """
    try:
        content = parsed(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BlockSparseError.expected(str(path), "a JSON file", reason) from error
    if not isinstance(content, dict):
        raise BlockSparseError.expected(str(path), "a dict in JSON", type(content).__name__)
    return content


def task_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer's description of its task, or {} if there is none."""
    task = about.get("task")
    return task if isinstance(task, dict) else {}


def check_sizes(path: Path, tensors: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> None:
    """Check the sizes in a configuration against a checkpoint's tensors, before anything of that size is allocated.

    Raises:
        BlockSparseError: a size is not a positive int, or exceeds both the largest size and the number of the tensors.
    """
    most = max([len(tensors), *(size for tensor in tensors.values() for size in tensor.shape)], default=0)
    for name, size in sizes.items():
        if not is_int(size) or not 1 <= size <= most:
            expected = f"{name} as its tensors have it, an int from 1 to {most:,}"
            raise BlockSparseError.expected(str(path), expected, f"{size!r:.99}")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as `save` writes a checkpoint.

    Raises:
        BlockSparseError: the file cannot be written.
    """
    try:
        _replace(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise BlockSparseError.expected(str(path), "a file to write to", error.strerror or error) from error


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose name starts with the prefix, by the rest of the name."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace a file atomically by one that `write` fills; it is on the disk before it gets the file's name."""
    part = path.with_name(f"{path.name}.part")
    # The file of a killed process is removed, not opened, because it can be a link to some other file.
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
        with suppress(OSError):  # after success the file is already renamed
            part.unlink()
    if os.name == "posix":  # other systems cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def in_order(tensors: Mapping[str, Tensor | TensorStream]) -> list[str]:
    """Return the names in the order of the file: widest dtype first, so that all tensors are aligned."""
    return sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)


def _write(file: IO[bytes], tensors: Mapping[str, Tensor | TensorStream], metadata: Mapping[str, str]) -> None:
    """Write the safetensors format; safetensors' `save_file` leaves a file of a random name if it is killed."""
    order = in_order(tensors)
    sums = dict.fromkeys(order, _ZEROS.decode())
    file.write(bytes(len(_header(tensors, metadata, sums))))
    for name in order:
        tensor, checksum = tensors[name], 0
        for piece in tensor.pieces if isinstance(tensor, TensorStream) else [tensor]:
            data = bytes_of(piece)
            checksum = zlib.crc32(data, checksum)
            file.write(data)
        sums[name] = f"{checksum:08x}"
    file.seek(0)
    file.write(_header(tensors, metadata, sums))


def _header(
    tensors: Mapping[str, Tensor | TensorStream], metadata: Mapping[str, str], sums: Mapping[str, str]
) -> bytes:
    """Return the file's header with its length; tensors are in the order of `sums`, whose values do not change it."""
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


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's numbers as bytes, in row-major order; no copy if they are in that order on the CPU."""
    dense = tensor.detach().cpu().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # A contiguous tensor of one number can have any stride.
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def checksum_of(tensors: Iterable[Tensor]) -> str:
    """Return the CRC-32 of tensors, one after the other, as 8 hexadecimal digits."""
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(bytes_of(tensor), checksum)
    return f"{checksum:08x}"


def _checksum(data: bytes | memoryview) -> str:
    """Return the CRC-32 as 8 hexadecimal digits."""
    return f"{zlib.crc32(data):08x}"


@contextmanager
def _open(path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """Open a checkpoint and yield it with its metadata, after checking its header; errors name the file."""
    try:
        present = path.is_file()
    except (OSError, ValueError) as error:  # the name is too long or has a zero byte
        raise BlockSparseError.expected("checkpoint", "a file", f"{str(path)[:80]!r} ({error})") from error
    if not present:
        kind = "a folder" if path.is_dir() else "missing"
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
        got = f"{path.stat().st_size:,} bytes, truncated or of another kind: {error}"
        raise BlockSparseError.expected(str(path), "a whole checkpoint", got) from error


def _check_header(path: Path) -> None:
    """Raise a ValueError unless the header has its own checksum."""
    with open(path, "rb") as file:
        length = file.read(8)
        text = length + file.read(int.from_bytes(length, "little"))
    at = 8 + len(_BEGIN)
    end = at + len(_ZEROS)
    actual = _checksum(text[:at] + _ZEROS + text[end:])
    if text[8:at] != _BEGIN or text[at:end] != actual.encode():
        raise ValueError("its header is damaged")


def _check(path: Path, metadata: Mapping[str, str]) -> None:
    """Raise a BlockSparseError for another format or version."""
    if metadata.get("format") != FORMAT:
        got = f"a safetensors file with format {metadata.get('format')!r}"
        raise BlockSparseError.expected(str(path), f"a file with format {FORMAT!r}", got)
    if metadata.get("version") != str(VERSION):
        raise BlockSparseError.expected(str(path), f"version {VERSION} of the format", metadata.get("version"))
