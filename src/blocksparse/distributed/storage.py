"""How `torch.distributed.checkpoint` writes and reads rows of tensors: planners, an atomic writer, a safe reader."""

from __future__ import annotations

import io
import os
import pickle
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from .state import LocalChunk

# Bytes that are written or read at once. While it loads, a reader needs this memory too.
PIECE_BYTES = 32 * 2**20


class ChunkSavePlanner(DefaultSavePlanner):
    """Plans the writing of local chunks in pieces, besides the tensors of PyTorch's planner.

    If several processes have the same piece, PyTorch has one of them write it.
    """

    def __init__(self, chunks: Mapping[str, LocalChunk]):
        super().__init__(flatten_state_dict=False)
        self.chunks = chunks
        self.pieces: dict[tuple[str, int], Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for name, chunk in self.chunks.items() for item in self._items(name, chunk)]
        self.plan = replace(plan, items=[*plan.items, *items])
        return self.plan

    def _items(self, name: str, chunk: LocalChunk) -> list[WriteItem]:
        """Return the pieces of a chunk to write, and keep their tensors in `pieces`."""
        items = []
        step = max(1, PIECE_BYTES // max(1, chunk.local[:1].nbytes))
        properties = TensorProperties.create_from_tensor(chunk.local)
        # An empty tensor has one empty piece: without one it would not be in the checkpoint.
        for first, rows in chunk.runs() if chunk.shape[0] else [(0, chunk.local)]:
            for begin, piece in enumerate(rows.split(step)):
                at = first + begin * step
                self.pieces[name, at] = piece
                offsets = torch.Size([at, *[0] * (piece.dim() - 1)])
                data = TensorWriteData(ChunkStorageMetadata(offsets, piece.shape), properties, torch.Size(chunk.shape))
                items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        name, data = write_item.index.fqn, write_item.tensor_data
        if name not in self.chunks or data is None:
            return super().resolve_data(write_item)
        return self.pieces[name, data.chunk.offsets[0]]


class AtomicWriter(FileSystemWriter):
    """Writes a checkpoint beside the one in the folder, then replaces that one in a single step."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.fs = _KeepOldMetadata()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give the files of this checkpoint names that no earlier checkpoint has."""
        token = secrets.token_hex(4)  # makes the names of this checkpoint's files unique
        plans = super().prepare_global_plan(plans)
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=f"__{token}{plan.storage_data.prefix}"))
            for plan in plans
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata file, and delete data files that do not belong to this checkpoint."""
        super().finish(metadata, results)
        folder = Path(self.path)
        if os.name == "posix":
            opened = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)
        own = {result.storage_data.relative_path for written in results for result in written}
        for other in folder.glob("*.distcp"):  # of the previous checkpoint, and of writers that were killed
            if other.name not in own:
                with suppress(OSError):
                    other.unlink()


class _KeepOldMetadata(FileSystem):
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Keep the old metadata file: renaming the new one to its name replaces it in a single step."""


class SafeReader(FileSystemReader):
    """Reads a checkpoint folder; its metadata file may contain nothing but the types of such metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, unpickled with its own types only."""
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{type(metadata).__name__} in place of a description")
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    # Looking up a name imports its module, so only these modules, which are loaded already, are looked up.
    modules = (
        "torch",
        "torch.serialization",
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
        "torch.distributed._shard.metadata",
        "pathlib",
        "pathlib._local",
    )

    def find_class(self, module: str, name: str) -> Any:
        """Return a type that the metadata of checkpoints may contain, or raise UnpicklingError."""
        value = super().find_class(module, name) if module in self.modules and "." not in name else None
        plain = is_dataclass(value) or (isinstance(value, type) and issubclass(value, Enum))
        if (
            (module.startswith("torch.distributed.") and plain)
            or (module == "torch" and isinstance(value, torch.dtype | torch.layout | torch.memory_format))
            or (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout"))
            or (module.startswith("pathlib") and name in ("PosixPath", "WindowsPath") and value is not None)
        ):  # fmt: skip
            return value
        # PyTorch under Python 3.11.0 to 3.11.3 wrote members of an Enum so. Such checkpoints must still load.
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise pickle.UnpicklingError(f"{module}.{name}, which no description of a checkpoint has")


def _enum_member(kind: Any, name: Any) -> Enum:
    """Return a member of an Enum, in place of `getattr`, which could return anything."""
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(name, str) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError(f"{name!r} of {kind!r}, which is no member of an Enum")


class RowRequest:
    """Rows `[n]` of a stored tensor, in any order, and the tensor `[n, ...]` to read them into."""

    def __init__(self, rows: np.ndarray, into: Tensor):
        self.order = np.argsort(rows, kind="stable")
        self.rows, self.into = rows[self.order], into

    def between(self, begin: int, end: int) -> slice:
        """Return which of the sorted rows lie in [begin, end)."""
        return slice(*np.searchsorted(self.rows, (begin, end)))


class RowLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of requested rows, piece by piece, besides the tensors of PyTorch's planner."""

    def __init__(self, tensors: dict[str, Tensor], requests: Mapping[str, RowRequest], metadata: Metadata):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.requests, self.stored = requests, metadata
        self.set_up_planner(tensors, metadata, True)

    def plan(self) -> LoadPlan:
        plan = create_default_local_load_plan(self.state_dict, self.stored)
        return LoadPlan([*plan.items, *(item for name in self.requests for item in self._items(name))])

    def _items(self, name: str) -> list[ReadItem]:
        """Return the rows to read of each stored piece, from the first to the last requested one."""
        stored: Any = self.stored.state_dict_metadata[name]
        request, items = self.requests[name], []
        for chunk in stored.chunks:
            begin, zeros = chunk.offsets[0], [0] * (len(chunk.sizes) - 1)
            mine = request.between(begin, begin + chunk.sizes[0])
            if mine.start == mine.stop:
                continue
            first, last = int(request.rows[mine.start]), int(request.rows[mine.stop - 1])
            place = torch.Size([first, *zeros])
            items.append(
                ReadItem(
                    LoadItemType.TENSOR,
                    dest_index=MetadataIndex(name, place),
                    dest_offsets=place,
                    storage_index=MetadataIndex(name, chunk.offsets),
                    storage_offsets=torch.Size([first - begin, *zeros]),
                    lengths=torch.Size([last + 1 - first, *chunk.sizes[1:]]),
                )
            )
        return items

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        name = read_item.dest_index.fqn
        if name not in self.requests:
            return super().resolve_tensor(read_item)
        stored: Any = self.stored.state_dict_metadata[name]
        return torch.empty(read_item.lengths, dtype=stored.properties.dtype, device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        request = self.requests.get(read_item.dest_index.fqn)
        if request is not None:
            first = read_item.dest_offsets[0]
            mine = request.between(first, first + read_item.lengths[0])
            rows = tensor[torch.from_numpy(request.rows[mine] - first)]
            request.into[torch.from_numpy(request.order[mine])] = rows.to(request.into)


class StoredCheckpoint:
    """The checkpoint in a folder; `tensors` has the metadata of each tensor by name."""

    def __init__(self, folder: Path):
        self.reader = SafeReader(folder)
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, True)
        self.tensors = {
            name: stored
            for name, stored in self.metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def read(self, tensors: dict[str, Tensor], requests: Mapping[str, RowRequest] | None = None) -> None:
        """Read tensors in place, and the requested rows of others."""
        planner = RowLoadPlanner(tensors, requests or {}, self.metadata)
        plan = self.reader.prepare_local_plan(planner.plan())
        self.reader.read_data(plan, planner).wait()

    def read_tensor(self, name: str) -> Tensor:
        """Return a whole tensor."""
        stored = self.tensors[name]
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
        self.read({name: tensor})
        return tensor
