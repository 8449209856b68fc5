"""Checkpoints of models that one or many processes train, for any other number of processes and of blocks."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from ..checkpoint import as_json, parsed
from ..errors import BlockSparseError
from ..files import path_of
from ..layout import BlockLayout, layout_of_indices
from ..nn.module import BlockSparseModule
from ..surgery.sharding import local_of
from ..surgery.weight_handle import handle_of
from .group import all_gather, on_all, reraise_comm_errors
from .held import Held, Rows, as_sharded, cut_rows, local_like, rows_of
from .sharded_weight import part_of
from .storage import Folder, SavePlanner, Wanted, Writer

INDICES = ("crow_indices", "col_indices")


def save_checkpoint(
    module: nn.Module,
    folder: str | Path,
    prefix: str = "",
    optimizer: torch.optim.Optimizer | None = None,
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model, its layouts and its optimizer's state to a folder, by all processes together.

    Each process writes the blocks that it stores, in pieces, with their places in the whole weight; what several
    processes have is written once. At any moment the folder has the checkpoint before or the new one, whole. Plain
    `torch.distributed.checkpoint.load` reads it too where the layouts are the model's, and no weight is cut in parts.

    Args:
        module: plain, in DistributedDataParallel, or sharded by `fully_shard`; layers may be parts of a tensor-parallel
            model.
        folder: on a file system that all processes have. Made where there is none.
        prefix: of the names in the checkpoint, such as "model.".
        optimizer: that trains it, or None.
        about: what else goes with it, ready for JSON; where processes differ, that of rank 0 counts.

    Raises:
        BlockSparseError: it could not be written, in all processes; what was there is still there.

    >>> import tempfile, blocksparse as bs
    >>> from blocksparse.distributed import load_checkpoint, save_checkpoint
    >>> layer, other = (bs.nn.Linear(64, 64, density=density, block_size=8) for density in (0.5, 0.25))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(layer, folder, about={"step": 7})
    ...     load_checkpoint(other, folder)
    {'step': 7}
    >>> other.layout == layer.layout, other.values.equal(layer.values)
    (True, True)
    """
    folder = path_of("folder", folder)
    _check_shared(folder)
    held = on_all(lambda: Held(module, optimizer))
    parts = held.parts()
    plain, rows = on_all(lambda: _entries(held, parts, prefix))
    if about is not None:
        plain[f"{prefix}/about"] = on_all(lambda: _bytes(about))
    try:
        with warnings.catch_warnings(), reraise_comm_errors():
            warnings.simplefilter("ignore")  # that there is one process, and that a checkpoint is replaced
            dcp.save(plain, storage_writer=Writer(folder), planner=SavePlanner(rows))
    except (dcp.CheckpointException, OSError) as error:
        raise BlockSparseError.expected(str(folder), "a folder to write a checkpoint to", _reason(error)) from error


def load_checkpoint(
    module: nn.Module,
    folder: str | Path,
    prefix: str = "",
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Loads a checkpoint of `save_checkpoint` into a model on any number of processes; its layouts replace the model's.

    Each process reads the blocks that it stores. A checkpoint that `torch.distributed.checkpoint.save` made of a state
    dict loads too. Nothing is changed unless all processes have read all they need: that takes the memory of a second
    copy of what each stores.

    Args:
        module: as for `save_checkpoint`, with layers of the same sizes and blocks; wrapped and cut in any way.
        folder: with the checkpoint.
        prefix: of the names in it that are the module's.
        optimizer: gets its state, and the hyperparameters of its groups; None leaves them in the checkpoint.
        strict: whether to refuse tensors in the checkpoint, below the prefix, that no process has.

    Returns:
        What was saved as `about`; {} for none.

    Raises:
        BlockSparseError: no checkpoint, one cut short, one of another model; the same in all processes.
    """
    folder = path_of("folder", folder)
    held = on_all(lambda: Held(module, optimizer))
    names = {name for one in all_gather(sorted(held.tensors)) for name in one}
    loading = on_all(lambda: _Loading(held, folder, prefix, names if strict else None))
    loading.apply()
    return loading.about


def _check_shared(folder: Path) -> None:
    """Raises in all processes unless they name one folder, where all see a file that the first one made."""
    paths = all_gather(str(folder.absolute()))
    for rank, path in enumerate(paths):
        if path != paths[0]:
            raise BlockSparseError.expected("folder", f"{paths[0]} in all processes", f"{path} in process {rank}")
    if len(paths) == 1:
        return
    token = folder / f".{all_gather(secrets.token_hex(8))[0]}.shared"

    def make() -> None:
        if dist.get_rank() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                token.touch()
            except OSError as error:
                raise BlockSparseError.expected(
                    str(folder), "a folder to write a checkpoint to", f"process 0: {_reason(error)}"
                ) from error

    def see() -> None:
        if not token.exists():
            raise BlockSparseError.expected(
                str(folder), "a folder on a file system that all processes share", "none of process 0's files"
            )

    on_all(make)
    try:
        on_all(see)
    finally:
        if dist.get_rank() == 0:
            with suppress(OSError):
                token.unlink()


def _entries(
    held: Held, parts: Mapping[str, tuple[int, int]], prefix: str
) -> tuple[dict[str, Tensor], dict[str, list[Rows]]]:
    """What is written as one tensor, and what in rows, by name."""
    plain: dict[str, Tensor] = {}
    rows: dict[str, list[Rows]] = {}

    def add(name: str, tensor: Tensor, as_name: str) -> None:
        if held.layer_of(as_name) is not None:
            rows[prefix + name] = [rows_of(tensor, parts.get(as_name.rpartition(".")[0]))]
        elif as_name in held.cuts:
            rows[prefix + name] = cut_rows(tensor, held.cuts[as_name])
        else:
            plain[prefix + name] = tensor

    for name, tensor in held.tensors.items():
        layer, _, last = name.rpartition(".")
        if not (layer in parts and last in INDICES):
            add(name, tensor, name)
    for name, module in held.layers.items():
        plain[f"{prefix}{name}/grid"] = torch.tensor([*_grid(module), *module.layout.block_shape])
        if module.part is not None:
            for axis, index in zip(("rows", "cols"), module.part.global_indices(module.layout), strict=True):
                rows[f"{prefix}{name}/{axis}"] = [Rows(torch.tensor(index).long(), *parts[name])]
    for name, parameter in held.trained().items():
        state = held.optimizer.state.get(parameter, {})
        for key, kept in state.items():
            if isinstance(kept, Tensor):
                add(f"{name}/{key}", kept, name if kept.shape == parameter.shape else f"{name}/{key}")
        others = {key: kept for key, kept in state.items() if not isinstance(kept, Tensor)}
        group, kind = _hyperparameters(held, parameter), type(held.optimizer).__name__
        plain[f"{prefix}{name}/group"] = _bytes({"optimizer": kind, "group": group, "state": others})
    return plain, rows


class _Loading:
    """What a process reads, before anything is changed."""

    def __init__(self, held: Held, folder: Path, prefix: str, known: set[str] | None):
        self.held, self.folder, self.prefix = held, folder, prefix
        try:
            self.stored = Folder(folder)
        except Exception as error:  # whatever a broken pickle ends in
            raise BlockSparseError.expected(
                "checkpoint", "a folder of torch.distributed.checkpoint", f"{folder} ({_reason(error)})"
            ) from error
        self.sizes = {
            name.removeprefix(prefix): stored.size
            for name, stored in self.stored.tensors.items()
            if name.startswith(prefix)
        }
        others = {name for name in self.sizes if "/" not in name} - (known if known is not None else self.sizes.keys())
        if others:
            raise self._wrong("the tensors of this model", f"{min(others)} besides")
        self.new: dict[str, Tensor] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.groups: dict[str, dict[str, Any]] = {}
        try:
            self._read()
        except BlockSparseError:
            raise
        except Exception as error:
            raise self._wrong("a whole checkpoint", _reason(error)) from error

    def _wrong(self, expected: str, got: object) -> BlockSparseError:
        return BlockSparseError.expected(str(self.folder), expected, got)

    def _read(self) -> None:
        self.about = self._json("/about") if "/about" in self.sizes else {}
        self.layouts: dict[str, BlockLayout] = {}
        places = {name: self._layout(name, module) for name, module in self.held.layers.items()}
        self.plain: dict[str, Tensor] = {}
        self.wanted: dict[str, Wanted] = {}
        for name, tensor in self.held.tensors.items():
            layer, _, last = name.rpartition(".")
            if layer in places and last in INDICES:
                self.new[name] = getattr(places[layer][0], last)(tensor.device)
            else:
                self.new[name] = self._room(name, tensor, self._rows(name, places))
        for name, parameter in self.held.trained().items():
            self._state(name, parameter, self._rows(name, places))
        self.stored.read(self.plain, self.wanted)

    def _rows(self, name: str, places: Mapping[str, tuple[BlockLayout, np.ndarray]]) -> np.ndarray | None:
        """Which rows of a stored tensor the layer here has, int64; None for all."""
        if self.held.layer_of(name) is not None:
            return places[name.rpartition(".")[0]][1]
        return self.held.cuts[name].here if name in self.held.cuts else None

    def _json(self, name: str) -> dict[str, Any]:
        found = parsed(self.stored.whole(self.prefix + name).numpy().tobytes())
        if not isinstance(found, dict):
            raise self._wrong(f"a dict in {name}", f"{found!r:.99}")
        return found

    def _size(self, name: str) -> torch.Size:
        if name not in self.sizes:
            raise self._wrong(f"the tensors of this model, {name} with them", "none of that name")
        return self.sizes[name]

    def _layout(self, name: str, module: BlockSparseModule) -> tuple[BlockLayout, np.ndarray]:
        """The layout that a layer gets, and where its blocks are in the checkpoint, int64 `[nnz]`."""
        grid, block = _grid(module), module.layout.block_shape
        if f"{name}/grid" in self.sizes:
            stored = self.stored.whole(f"{self.prefix}{name}/grid").tolist()
            if stored != [*grid, *block]:
                got = f"{tuple(stored[:2])} blocks of {tuple(stored[2:])}"
                raise self._wrong(f"{name or 'the layer'} with {grid} blocks of {block}", got)
        if f"{name}/rows" in self.sizes:
            rows, cols = (self.stored.whole(f"{self.prefix}{name}/{axis}").numpy() for axis in ("rows", "cols"))
            whole, order = BlockLayout.from_indices(rows, cols, grid, block), np.lexsort((cols, rows))
        else:
            indices = [f"{name}.{index}".removeprefix(".") for index in INDICES]
            for index in indices:
                self._size(index)
            crow, col = (self.stored.whole(self.prefix + index) for index in indices)
            try:
                whole = layout_of_indices(crow, col, grid, block)
            except BlockSparseError as error:
                raise self._wrong(f"a layout of {grid} blocks for {name or 'the layer'}", error) from error
            order = np.arange(whole.nnz)
        layout, mine = part_of(module, whole)
        self.layouts[name] = whole
        if layout != module.layout:
            if self.held.is_ddp and layout.nnz != module.layout.nnz:
                got = f"{layout.nnz} in the checkpoint; load before the model is wrapped in DistributedDataParallel"
                raise self._wrong(f"{name or 'the layer'} with {module.layout.nnz} blocks, as its gradients have", got)
            if "values" not in module._parameters:
                raise self._wrong(
                    f"the layout of {name or 'the layer'}, whose values are computed from others", "another"
                )
        return layout, order[mine]

    def _room(self, name: str, tensor: Tensor, rows: np.ndarray | None) -> Tensor:
        """The tensor that is to be filled with a stored one, or with rows of it, sharded as this one is."""
        size, properties = self._size(name), self.stored.tensors[self.prefix + name].properties
        if tensor.is_meta:
            raise BlockSparseError.expected(
                name, "a tensor with numbers: call to_empty first", "one on the meta device"
            )
        if properties.dtype.is_floating_point != tensor.dtype.is_floating_point or properties.dtype.is_complex:
            raise self._wrong(f"{name} of {tensor.dtype}", properties.dtype)
        if rows is None:
            if size != tensor.shape:
                raise self._wrong(f"{name} of {list(tensor.shape)}", list(size))
            self.plain[self.prefix + name] = room = torch.empty_like(tensor, requires_grad=False)
            return room
        least = int(rows.max()) + 1 if len(rows) else 0
        if size[1:] != tensor.shape[1:] or size[0] < least:
            raise self._wrong(f"{name} of [{least} or more, {str(list(tensor.shape[1:]))[1:]}", list(size))
        mine = local_like(tensor, len(rows), tensor.dtype)
        self.wanted[self.prefix + name] = Wanted(rows[mine.first : mine.end], mine.local)
        return as_sharded(mine, tensor)

    def _state(self, name: str, parameter: nn.Parameter, rows: np.ndarray | None) -> None:
        if f"{name}/group" not in self.sizes:
            raise self._wrong(f"the optimizer's state of {name}", "none: save it with optimizer=...")
        known = self._json(f"{name}/group")
        group, state = known.get("group"), known.get("state")
        if not isinstance(group, dict) or not isinstance(state, dict):
            raise self._wrong(f"the optimizer's state of {name}", f"{known!r:.99}")
        kind, own = known.get("optimizer"), type(self.held.optimizer).__name__
        if kind is not None and kind != own:  # none in those of earlier versions
            raise self._wrong(f"the state of {own} for {name}", f"that of {kind}")
        self.groups[name] = group
        self.states[name] = dict(state)
        for full in [key for key in self.sizes if key.startswith(f"{name}/") and key != f"{name}/group"]:
            key = full.removeprefix(f"{name}/")
            if key in ("grid", "rows", "cols"):
                continue
            size, dtype = self.sizes[full], self.stored.tensors[self.prefix + full].properties.dtype
            if size == self.sizes[name]:
                # In the parameter's memory format and sharding, but of its own dtype.
                self.states[name][key] = self._room(full, parameter.detach().to(dtype), rows)
            else:
                kept = torch.empty(size, dtype=dtype, device=_device_of(key, parameter, self.held))
                self.plain[self.prefix + full] = self.states[name][key] = kept

    @torch.no_grad()
    def apply(self) -> None:
        """Gives the module and the optimizer what was read."""
        for name, module in self.held.layers.items():
            stored, layout = handle_of(module), self.layouts[name]
            if stored.layout != layout:
                values = self.new[f"{name}.values".removeprefix(".")]
                stored.set_layout(layout, torch.full((layout.nnz,), -1), new=local_of(values))
        self.held.root.load_state_dict({own: self.new[name] for own, name in self.held.names.items()})
        names = {id(parameter): name for name, parameter in self.held.trained().items()}
        for group in self.held.optimizer.param_groups if names else ():
            for parameter in group["params"]:
                name = names[id(parameter)]
                if self.states[name]:
                    self.held.optimizer.state[parameter] = self.states[name]
                else:
                    self.held.optimizer.state.pop(parameter, None)
                for key, value in self.groups[name].items():
                    before = group.get(key)
                    if isinstance(before, Tensor):
                        before.fill_(value)
                    elif key in group:
                        group[key] = tuple(value) if isinstance(before, tuple) else value


def _grid(module: BlockSparseModule) -> tuple[int, int]:
    return module.layout.grid if module.part is None else module.part.grid


def _hyperparameters(held: Held, parameter: nn.Parameter) -> dict[str, Any]:
    group = held.group_of(parameter).items()
    found = {key: value.item() if isinstance(value, Tensor) else value for key, value in group}
    return {key: value for key, value in found.items() if key != "params" and _is_json(value)}


def _device_of(key: str, parameter: nn.Parameter, held: Held) -> torch.device:
    """Where PyTorch's optimizers have what is not as large as the parameter: their counts are on the CPU mostly."""
    group = held.group_of(parameter)
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return parameter.device if on_device else torch.device("cpu")


def _is_json(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)


def _bytes(about: Mapping[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(as_json(about).encode()), dtype=torch.uint8)


def _reason(error: BaseException) -> str:
    """Why it failed, in a line; with the process where it did."""
    if isinstance(error, dcp.CheckpointException):
        rank, (inner, _) = min(error.failures.items())
        return f"process {rank}: {_reason(inner)}"
    if any(word in str(error) for word in ("weights_only", "PytorchStreamReader")):
        # What PyTorch advises, to load it all the same, would run what is in the file.
        return "a data file that is cut or damaged"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
