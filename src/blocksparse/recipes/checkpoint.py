"""Checkpoints: tensors and what they are about in one safetensors file, which is whole at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from ..errors import BlockSparseError

FORMAT = "blocksparse checkpoint"
VERSION = 1


def save(path: str | Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Writes a checkpoint in place of the one there is; whatever happens meanwhile, one of the two is there, whole.

    Args:
        path: the file; a second one, `path.part`, is beside it while this runs.
        tensors: of any shapes, dtypes and devices. Those that share memory are stored one by one.
        about: what goes with them, ready for JSON.

    Raises:
        BlockSparseError: it could not be written. What was there is still there.

    >>> import tempfile, torch
    >>> from blocksparse.recipes import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save(f"{folder}/last.safetensors", {"x": torch.arange(3)}, {"step": 7})
    ...     checkpoint.load(f"{folder}/last.safetensors")
    ({'x': tensor([0, 1, 2])}, {'step': 7})
    """
    path = Path(path)
    metadata = {"format": FORMAT, "version": str(VERSION), "about": json.dumps(about)}
    try:
        _replace(path, to_bytes(_apart(tensors), metadata))
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        left = "the checkpoint before it is whole" if path.exists() else "there is none before it"
        raise BlockSparseError.expected(
            str(path),
            "a place to write a checkpoint to",
            f"{reason}; {left}. Free some space or correct the folder, then run again",
        ) from error


def load(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint, on the CPU, and what it is about.

    Raises:
        BlockSparseError: no such file, one cut short, one that is no checkpoint of ours or of a later version.
    """
    path = Path(path)
    if not path.is_file():
        raise BlockSparseError.expected("checkpoint", "a file", f"{path}, which is {_kind(path)}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check(path, metadata)
            # Copies: a file that is mapped must not be replaced on every system.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads(metadata["about"])
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise BlockSparseError.expected(
            str(path), "a whole checkpoint", f"{path.stat().st_size:,} bytes, cut short or of another kind: {error}"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Writes a text file as `save` writes a checkpoint: the old one or the new one is there, whole.

    Raises:
        BlockSparseError: it could not be written.
    """
    try:
        _replace(path, text.encode())
    except OSError as error:
        raise BlockSparseError.expected(str(path), "a file to write to", error.strerror or error) from error


def _replace(path: Path, content: bytes) -> None:
    """Gives a file this content at once, and on the disk too: its bytes are there before it has its name."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
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


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU of which no two share memory."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return found


def _check(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        got = f"a safetensors file with format {metadata.get('format')!r}"
        raise BlockSparseError.expected(str(path), f"a file with format {FORMAT!r}", got)
    if metadata.get("version") != str(VERSION):
        raise BlockSparseError.expected(str(path), f"version {VERSION} of the format", metadata.get("version"))


def _kind(path: Path) -> str:
    return "a folder" if path.is_dir() else "not there"
