"""How `torch.distributed.checkpoint` writes and reads the blocks of many processes: planners, and files of a folder."""

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

from .held import Rows

# Bytes that are written, or read, at once; a reader holds as many besides what it keeps.
PIECE = 32 * 2**20


class SavePlanner(DefaultSavePlanner):
    """Writes rows in pieces besides the tensors of PyTorch's planner; equal pieces are written by one process."""

    def __init__(self, rows: Mapping[str, list[Rows]]):
        super().__init__(flatten_state_dict=False)
        self.rows = rows

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[*plan.items, *(item for name in self.rows for item in self._items(name))])
        return self.plan

    def _items(self, name: str) -> list[WriteItem]:
        items = []
        for rows in self.rows[name]:
            step = max(1, PIECE // max(1, rows.local[:1].nbytes))
            rest = [0] * (rows.local.dim() - 1)
            for begin in range(0, len(rows.local), step) if rows.total else [0]:
                offsets = torch.Size([rows.first + begin, *rest])
                size = torch.Size([min(step, len(rows.local) - begin), *rows.local.shape[1:]])
                properties = TensorProperties.create_from_tensor(rows.local.detach())
                data = TensorWriteData(ChunkStorageMetadata(offsets, size), properties, rows.shape)
                items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        name, data = write_item.index.fqn, write_item.tensor_data
        if name not in self.rows or data is None:
            return super().resolve_data(write_item)
        at = data.chunk.offsets[0]
        rows = next(rows for rows in self.rows[name] if rows.first <= at < rows.end or rows.total == 0)
        return rows.local.detach()[at - rows.first : at - rows.first + data.chunk.sizes[0]]


class Writer(FileSystemWriter):
    """Writes a checkpoint next to the one in the folder, and then replaces that, atomically."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.fs = _Files()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        token = secrets.token_hex(4)  # of this checkpoint's files
        plans = super().prepare_global_plan(plans)
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=f"__{token}{plan.storage_data.prefix}"))
            for plan in plans
        ]

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        folder = Path(self.path)
        if os.name == "posix":
            opened = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)
        own = {info.relative_path for info in (metadata.storage_data or {}).values()}
        for other in folder.glob("*.distcp"):  # of the checkpoint before, and of those that were killed
            if other.name not in own:
                with suppress(OSError):
                    other.unlink()


class _Files(FileSystem):
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Leaves the old description: renaming the new one to its name replaces it at once."""


class Reader(FileSystemReader):
    """Reads a folder; its description may only be made of what such descriptions are made of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Description(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{type(metadata).__name__} in place of a description")
        return metadata


class _Description(pickle.Unpickler):
    # A module is imported by being named: these are there already.
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
        found = super().find_class(module, name) if module in self.modules and "." not in name else None
        plain = is_dataclass(found) or (isinstance(found, type) and issubclass(found, Enum))
        if (
            (module.startswith("torch.distributed.") and plain)
            or (module == "torch" and isinstance(found, torch.dtype | torch.layout | torch.memory_format))
            or (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout"))
            or (module.startswith("pathlib") and name in ("PosixPath", "WindowsPath") and found is not None)
        ):  # fmt: skip
            return found
        if (module, name) == ("builtins", "getattr"):  # by which Python 3.11.0 to 3.11.3 write members of an Enum
            return _member
        raise pickle.UnpicklingError(f"{module}.{name}, which no description of a checkpoint has")


def _member(kind: Any, name: Any) -> Enum:
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(name, str) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError(f"{name!r} of {kind!r}, which is no member of an Enum")


class Wanted:
    """Rows `[n]` that a process wants of a stored tensor, in any order, and where they are put, `[n, ...]`."""

    def __init__(self, rows: np.ndarray, into: Tensor):
        self.order = np.argsort(rows, kind="stable")
        self.rows, self.into = rows[self.order], into

    def within(self, begin: int, end: int) -> slice:
        """Of these, in rising order, the ones from a row to another."""
        return slice(*np.searchsorted(self.rows, (begin, end)))


class LoadPlanner(DefaultLoadPlanner):
    """Reads requested rows, piece by piece, besides the tensors that PyTorch's planner takes."""

    def __init__(self, tensors: dict[str, Tensor], wanted: Mapping[str, Wanted], metadata: Metadata):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.wanted, self.stored = wanted, metadata
        self.set_up_planner(tensors, metadata, True)

    def plan(self) -> LoadPlan:
        plan = create_default_local_load_plan(self.state_dict, self.stored)
        return LoadPlan([*plan.items, *(item for name in self.wanted for item in self._items(name))])

    def _items(self, name: str) -> list[ReadItem]:
        stored: Any = self.stored.state_dict_metadata[name]
        items = []
        for chunk in stored.chunks:
            begin, rest = chunk.offsets[0], [0] * (len(chunk.sizes) - 1)
            mine = self.wanted[name].within(begin, begin + chunk.sizes[0])
            if mine.start == mine.stop:
                continue
            # From the first of these rows to the last one.
            first, end = (int(self.wanted[name].rows[at]) for at in (mine.start, mine.stop - 1))
            place = torch.Size([first, *rest])
            items.append(
                ReadItem(
                    LoadItemType.TENSOR,
                    dest_index=MetadataIndex(name, place),
                    dest_offsets=place,
                    storage_index=MetadataIndex(name, chunk.offsets),
                    storage_offsets=torch.Size([first - begin, *rest]),
                    lengths=torch.Size([end + 1 - first, *chunk.sizes[1:]]),
                )
            )
        return items

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        name = read_item.dest_index.fqn
        if name not in self.wanted:
            return super().resolve_tensor(read_item)
        stored: Any = self.stored.state_dict_metadata[name]
        return torch.empty(read_item.lengths, dtype=stored.properties.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        wanted = self.wanted.get(read_item.dest_index.fqn)
        if wanted is None:
            return
        first = read_item.dest_offsets[0]
        mine = wanted.within(first, first + read_item.lengths[0])
        found = tensor[torch.from_numpy(wanted.rows[mine] - first)]
        wanted.into[torch.from_numpy(wanted.order[mine])] = found.to(wanted.into)


class Folder:
    """A checkpoint in a folder."""

    def __init__(self, folder: Path):
        self.reader = Reader(folder)
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, True)
        self.tensors = {
            name: one
            for name, one in self.metadata.state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }

    def read(self, tensors: dict[str, Tensor], wanted: Mapping[str, Wanted] | None = None) -> None:
        """Fills tensors, and the requested rows of others."""
        planner = LoadPlanner(tensors, wanted or {}, self.metadata)
        plan = self.reader.prepare_local_plan(planner.plan())
        self.reader.read_data(plan, planner).wait()

    def whole(self, name: str) -> Tensor:
        stored = self.tensors[name]
        found = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.read({name: found})
        return found
