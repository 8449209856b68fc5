"""Checkpoints: tensors and what they are about in one safetensors file, which is whole at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import BlockSparseError

FORMAT = "blocksparse checkpoint"
VERSION = 1

# As safetensors names them.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def save(path: str | Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Writes a checkpoint in place of the one there is; whatever happens meanwhile, one of the two is there, whole.

    Tensors go to the file one by one from where they are: contiguous ones on the CPU take no more memory.

    Args:
        path: the file; a second one, `path.part`, is beside it while this runs.
        tensors: of any shapes and devices, and of `DTYPES`. Those that share memory are stored one by one.
        about: what goes with them, ready for JSON.

    Raises:
        BlockSparseError: it could not be written, or a tensor is of another dtype. What was there is still there.

    >>> import tempfile, torch
    >>> from blocksparse.recipes import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(f"{folder}/last.safetensors", {"x": torch.arange(3)}, {"step": 7})
    ...     checkpoint.load(f"{folder}/last.safetensors")
    ({'x': tensor([0, 1, 2])}, {'step': 7})
    """
    path = Path(path)
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise BlockSparseError.expected(name, f"one of {', '.join(map(str, DTYPES))}", tensor.dtype)
    metadata = {"format": FORMAT, "version": str(VERSION), "about": json.dumps(about)}
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
    """The tensors of a checkpoint, on the CPU, and what it is about.

    Raises:
        BlockSparseError: no such file, one cut short, one that is no checkpoint of ours or of a later version.
    """
    with opened(path) as (tensors, about):
        # Copies: a file that is mapped must not be replaced on every system.
        return {name: tensor.clone() for name, tensor in tensors.items()}, about


@contextmanager
def opened(path: str | Path) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    """As `load`, without a copy: the tensors are the file itself, to be copied to where they belong within the `with`.

    Raises:
        BlockSparseError: as `load`.

    >>> import tempfile, torch
    >>> from blocksparse.recipes import checkpoint
    >>> x = torch.zeros(3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(f"{folder}/last.safetensors", {"x": torch.ones(3)}, {})
    ...     with checkpoint.opened(f"{folder}/last.safetensors") as (tensors, about):
    ...         x.copy_(tensors["x"])
    tensor([1., 1., 1.])
    """
    path = Path(path)
    if not path.is_file():
        raise BlockSparseError.expected("checkpoint", "a file", f"{path}, which is {_kind(path)}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check(path, metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = json.loads(metadata["about"])
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise BlockSparseError.expected(
            str(path), "a whole checkpoint", f"{path.stat().st_size:,} bytes, cut short or of another kind: {error}"
        ) from error
    yield tensors, about


def write_text(path: Path, text: str) -> None:
    """Writes a text file as `save` writes a checkpoint: the old one or the new one is there, whole.

    Raises:
        BlockSparseError: it could not be written.
    """
    try:
        _replace(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise BlockSparseError.expected(str(path), "a file to write to", error.strerror or error) from error


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose name begins with the prefix, by the rest of it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Gives a file what `write` writes at once, and on the disk too: its bytes are there before it has its name."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with suppress(OSError):  # where all went well it has moved by now
            part.unlink()
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write(file: IO[bytes], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """In the format of safetensors, whose own `save_file` leaves a file of a random name behind when it is killed."""
    # The widest numbers first, so that each tensor begins at a multiple of its numbers' size.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            file.write(flat.view(torch.uint8).numpy().data)


def _check(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        got = f"a safetensors file with format {metadata.get('format')!r}"
        raise BlockSparseError.expected(str(path), f"a file with format {FORMAT!r}", got)
    if metadata.get("version") != str(VERSION):
        raise BlockSparseError.expected(str(path), f"version {VERSION} of the format", metadata.get("version"))


def _kind(path: Path) -> str:
    return "a folder" if path.is_dir() else "not there"
