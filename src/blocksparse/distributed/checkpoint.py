"""Checkpoints of models on one or several processes, which load into any number of processes and any layouts."""

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
from torch.distributed.tensor import DTensor

from ..checked import averaged_axis, is_state_of_blocks
from ..checkpoint import as_json, parsed
from ..errors import BlockSparseError, first_line
from ..files import path_of
from ..layout import BlockLayout
from ..nn.module import BlockSparseModule
from ..state_indices import layout_of_indices
from ..surgery.sharding import local_of
from ..surgery.weight_handle import handle_of
from .fsdp import sharded_like
from .group import all_gather, on_all, reraise_comm_errors
from .sharded_weight import layout_of_part
from .state import DistributedState, LocalChunk, shard_range
from .storage import AtomicWriter, ChunkSavePlanner, RowRequest, StoredCheckpoint

INDICES = ("crow_indices", "col_indices")


def save_checkpoint(
    module: nn.Module,
    folder: str | Path,
    prefix: str = "",
    optimizer: torch.optim.Optimizer | None = None,
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a model, its layouts and its optimizer's state to a folder. All processes call it.

    Each process writes the blocks that it stores, in pieces, with their places in the whole weight. Tensors that
    several processes have are written once. The folder holds either the old checkpoint or the new one at any moment.
    `torch.distributed.checkpoint.load` reads it too, into a model with the same layouts and no tensor-parallel layer.

    Args:
        module: plain, in DistributedDataParallel, or sharded by `fully_shard`; layers may be tensor-parallel.
        folder: on a file system that all processes share; created if missing.
        prefix: prepended to the names in the checkpoint, such as "model.".
        optimizer: the one that trains the module; None saves no optimizer state.
        about: further facts that JSON can express. If processes differ, those of rank 0 are saved.

    Raises:
        BlockSparseError: in all processes, if the checkpoint cannot be written. The old one remains.

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
    state = on_all(lambda: DistributedState(module, optimizer))
    ranges = state.block_ranges()
    tensors, chunks = on_all(lambda: _entries(state, ranges, prefix))
    if about is not None:
        tensors[f"{prefix}/about"] = on_all(lambda: _json_tensor(about))
    try:
        with warnings.catch_warnings(), reraise_comm_errors():
            warnings.simplefilter("ignore")  # of a single process, and of a checkpoint that is replaced
            dcp.save(tensors, storage_writer=AtomicWriter(folder), planner=ChunkSavePlanner(chunks))
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
    """Load a checkpoint of `save_checkpoint`; its layouts replace the model's. All processes call it.

    Any number of processes may load it; each reads the blocks that it stores. Checkpoints that
    `torch.distributed.checkpoint.save` made of a state dict load too. Nothing changes until all processes have read
    everything they need, so loading takes the memory of a second copy of what each process stores.

    Args:
        module: as for `save_checkpoint`, with layers of the same sizes and block sizes; wrapped and sharded in any way.
        folder: the folder with the checkpoint.
        prefix: the prefix of the module's names in the checkpoint.
        optimizer: receives its state and the hyperparameters of its groups; None skips them.
        strict: whether to refuse a checkpoint with tensors, below the prefix, that no process has.

    Returns:
        The `about` of the checkpoint; {} if it has none.

    Raises:
        BlockSparseError: in all processes, if there is no checkpoint, if it is damaged, or if it belongs to
            another model.
    """
    folder = path_of("folder", folder)
    state = on_all(lambda: DistributedState(module, optimizer))
    known = {name for names in all_gather(sorted(state.tensors)) for name in names}
    loading = on_all(lambda: _Loading(state, folder, prefix, known if strict else None))
    loading.apply()
    return loading.about


def _check_shared(folder: Path) -> None:
    """Raise in all processes unless they name one folder, and all see a file that rank 0 creates in it."""
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
    state: DistributedState, ranges: Mapping[str, tuple[range, int]], prefix: str
) -> tuple[dict[str, Tensor], dict[str, LocalChunk]]:
    """Return the checkpoint's entries by name: tensors that PyTorch's planner writes, and chunks that ours writes."""
    tensors: dict[str, Tensor] = {}
    chunks: dict[str, LocalChunk] = {}

    def add(name: str, tensor: Tensor, owner: str) -> None:
        """Add a tensor in the way of the state's tensor `owner`."""
        if state.layer_of_values(owner) is not None:
            chunks[prefix + name] = LocalChunk.from_rows(tensor, *ranges.get(owner.rpartition(".")[0], ()))
        elif (sharding := state.shardings.get(owner)) is not None:
            chunks[prefix + name] = LocalChunk.from_rows(tensor, sharding.local_indices, sharding.size)
        else:
            tensors[prefix + name] = tensor

    for name, tensor in state.tensors.items():
        layer, _, last = name.rpartition(".")
        if not (layer in ranges and last in INDICES):
            add(name, tensor, name)
    for name, module in state.layers.items():
        tensors[f"{prefix}{name}/grid"] = torch.tensor([*_grid(module), *module.layout.block_shape], device="cpu")
        if module.part is not None:
            for axis, index in zip(("rows", "cols"), module.part.global_indices(module.layout), strict=True):
                chunks[f"{prefix}{name}/{axis}"] = LocalChunk.from_rows(
                    torch.tensor(index, device="cpu").long(), *ranges[name]
                )
    for name, parameter in state.trained_parameters().items():
        optimizer_state = state.optimizer.state.get(parameter, {})
        for key, value in optimizer_state.items():
            if isinstance(value, Tensor):
                has_rows = value.shape == parameter.shape or _is_per_block(state, name, key, value, parameter.shape)
                add(f"{name}/{key}", value, name if has_rows else f"{name}/{key}")
        others = {key: value for key, value in optimizer_state.items() if not isinstance(value, Tensor)}
        group, kind = _hyperparameters(state, parameter), type(state.optimizer).__name__
        tensors[f"{prefix}{name}/group"] = _json_tensor({"optimizer": kind, "group": group, "state": others})
    return tensors, chunks


class _Loading:
    """The layouts, tensors and optimizer state that this process has read; `apply` gives them to the model.

    Args:
        state: the model that the checkpoint is loaded into.
        folder: the folder with the checkpoint.
        prefix: the prefix of the model's names in the checkpoint.
        known: the names that the checkpoint may have; None accepts any.
    """

    def __init__(self, state: DistributedState, folder: Path, prefix: str, known: set[str] | None):
        self.state, self.folder, self.prefix = state, folder, prefix
        try:
            self.stored = StoredCheckpoint(folder)
        except Exception as error:  # a broken pickle may raise anything
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
            raise self._error("the tensors of this model", f"{min(others)} besides")
        self.layouts: dict[str, BlockLayout] = {}  # of whole weights
        self.loaded: dict[str, Tensor] = {}
        self.optimizer_states: dict[str, dict[str, Any]] = {}
        self.groups: dict[str, dict[str, Any]] = {}
        self.tensors: dict[str, Tensor] = {}  # to be read whole
        self.requests: dict[str, RowRequest] = {}
        try:
            self._read()
        except BlockSparseError:
            raise
        except Exception as error:
            raise self._error("a whole checkpoint", _reason(error)) from error

    def _error(self, expected: str, got: object) -> BlockSparseError:
        """Return an error about the checkpoint's folder."""
        return BlockSparseError.expected(str(self.folder), expected, got)

    def _read(self) -> None:
        """Read the layouts, then all tensors and the optimizer's state at once."""
        self.about = self._json("/about") if "/about" in self.sizes else {}
        local = {name: self._read_layout(name, module) for name, module in self.state.layers.items()}
        rows = {f"{name}.values".removeprefix("."): places for name, (_, places) in local.items()}
        rows |= {name: sharding.local_indices for name, sharding in self.state.shardings.items()}
        for name, tensor in self.state.tensors.items():
            layer, _, last = name.rpartition(".")
            if layer in local and last in INDICES:
                self.loaded[name] = getattr(local[layer][0], last)(tensor.device)
            else:
                self.loaded[name] = self._allocate(name, tensor, rows.get(name))
        for name, parameter in self.state.trained_parameters().items():
            self._read_optimizer_state(name, parameter, rows.get(name))
        self.stored.read(self.tensors, self.requests)

    def _json(self, name: str) -> dict[str, Any]:
        """Return the dict that a tensor of the checkpoint holds as JSON."""
        value = parsed(self.stored.read_tensor(self.prefix + name).numpy().tobytes())
        if not isinstance(value, dict):
            raise self._error(f"a dict in {name}", f"{value!r:.99}")
        return value

    def _size(self, name: str) -> torch.Size:
        """Return the stored size of a tensor; raise a BlockSparseError if the checkpoint lacks it."""
        if name not in self.sizes:
            raise self._error(f"the tensors of this model, {name} with them", "none of that name")
        return self.sizes[name]

    def _read_layout(self, name: str, module: BlockSparseModule) -> tuple[BlockLayout, np.ndarray]:
        """Read a layer's layout, check that the layer can take it, and store it in `self.layouts`.

        Return the layout of the part of the weight that this process has, and for each of its blocks the row of the
        checkpoint's values, int64 `[nnz]`.
        """
        grid, block, label = _grid(module), module.layout.block_shape, name or "the layer"
        if f"{name}/grid" in self.sizes:
            stored = self.stored.read_tensor(f"{self.prefix}{name}/grid").tolist()
            if stored != [*grid, *block]:
                got = f"{tuple(stored[:2])} blocks of {tuple(stored[2:])}"
                raise self._error(f"{label} with {grid} blocks of {block}", got)
        if f"{name}/rows" in self.sizes:
            rows, cols = (self.stored.read_tensor(f"{self.prefix}{name}/{axis}").numpy() for axis in ("rows", "cols"))
            whole, order = BlockLayout.from_indices(rows, cols, grid, block), np.lexsort((cols, rows))
        else:
            indices = [f"{name}.{index}".removeprefix(".") for index in INDICES]
            for index in indices:
                self._size(index)
            crow, col = (self.stored.read_tensor(self.prefix + index) for index in indices)
            try:
                whole = layout_of_indices(crow, col, grid, block)
            except BlockSparseError as error:
                raise self._error(f"a layout of {grid} blocks for {label}", error) from error
            order = np.arange(whole.nnz)
        layout, local = layout_of_part(module, whole)
        self.layouts[name] = whole
        if layout != module.layout:
            if self.state.is_ddp and layout.nnz != module.layout.nnz:
                got = f"{layout.nnz} in the checkpoint; load before the model is wrapped in DistributedDataParallel"
                raise self._error(f"{label} with {module.layout.nnz} blocks, as its gradients have", got)
            if "values" not in module._parameters:
                raise self._error(f"the layout of {label}, whose values are computed from others", "another")
        return layout, order[local]

    def _allocate(self, name: str, tensor: Tensor, rows: np.ndarray | None) -> Tensor:
        """Return an empty tensor, sharded like `tensor`, and note that it, or its stored `rows`, must be read."""
        size, properties = self._size(name), self.stored.tensors[self.prefix + name].properties
        if tensor.is_meta:
            raise BlockSparseError.expected(
                name, "a tensor with numbers: call to_empty first", "one on the meta device"
            )
        if properties.dtype.is_floating_point != tensor.dtype.is_floating_point or properties.dtype.is_complex:
            raise self._error(f"{name} of {tensor.dtype}", properties.dtype)
        if rows is None:
            if size != tensor.shape:
                raise self._error(f"{name} of {list(tensor.shape)}", list(size))
            self.tensors[self.prefix + name] = empty = torch.empty_like(tensor, requires_grad=False)
            return empty
        least = int(rows.max()) + 1 if len(rows) else 0
        if size[1:] != tensor.shape[1:] or size[0] < least:
            raise self._error(f"{name} of [{least} or more, {str(list(tensor.shape[1:]))[1:]}", list(size))
        begin, end = shard_range(tensor, len(rows)) if isinstance(tensor, DTensor) else (0, len(rows))
        local = local_of(tensor.detach()).new_empty([end - begin, *tensor.shape[1:]])
        self.requests[self.prefix + name] = RowRequest(rows[begin:end], local)
        return sharded_like(tensor, local, len(rows)) if isinstance(tensor, DTensor) else local

    def _read_optimizer_state(self, name: str, parameter: nn.Parameter, rows: np.ndarray | None) -> None:
        """Read a parameter's group, and request its state.

        `rows` are the stored rows that this process needs; None for all.
        """
        if f"{name}/group" not in self.sizes:
            raise self._error(f"the optimizer's state of {name}", "none: save it with optimizer=...")
        entry = self._json(f"{name}/group")
        group, state = entry.get("group"), entry.get("state")
        if not isinstance(group, dict) or not isinstance(state, dict):
            raise self._error(f"the optimizer's state of {name}", f"{entry!r:.99}")
        saved, own = entry.get("optimizer"), type(self.state.optimizer).__name__
        if saved is not None and saved != own:  # earlier versions saved no class
            raise self._error(f"the state of {own} for {name}", f"that of {saved}")
        self.groups[name] = group
        self.optimizer_states[name] = dict(state)
        for full in [key for key in self.sizes if key.startswith(f"{name}/") and key != f"{name}/group"]:
            key = full.removeprefix(f"{name}/")
            if key in ("grid", "rows", "cols"):
                continue
            size, dtype = self.sizes[full], self.stored.tensors[self.prefix + full].properties.dtype
            if size == self.sizes[name]:
                # In the parameter's memory format and sharding, but of its own dtype.
                value = self._allocate(full, parameter.detach().to(dtype), rows)
            elif _is_per_block(self.state, name, key, torch.empty(size, device="meta"), self.sizes[name]):
                local = local_of(parameter.detach())
                part = local.new_empty(len(local), *size[1:], dtype=dtype)
                if isinstance(parameter, DTensor):
                    part = sharded_like(parameter, part, len(parameter))
                value = self._allocate(full, part, rows)
            else:
                value = torch.empty(size, dtype=dtype, device=_device_of(key, parameter, self.state))
                self.tensors[self.prefix + full] = value
            self.optimizer_states[name][key] = value

    @torch.no_grad()
    def apply(self) -> None:
        """Load what was read into the module and the optimizer."""
        for name, module in self.state.layers.items():
            weight, layout = handle_of(module), self.layouts[name]
            if weight.layout != layout:
                values = self.loaded[f"{name}.values".removeprefix(".")]
                weight.set_layout(layout, torch.full((layout.nnz,), -1, device="cpu"), new=local_of(values))
        self.state.root.load_state_dict({own: self.loaded[name] for own, name in self.state.names.items()})
        names = {id(parameter): name for name, parameter in self.state.trained_parameters().items()}
        for group in self.state.optimizer.param_groups if names else ():
            for parameter in group["params"]:
                name = names[id(parameter)]
                if self.optimizer_states[name]:
                    self.state.optimizer.state[parameter] = self.optimizer_states[name]
                else:
                    self.state.optimizer.state.pop(parameter, None)
                for key, value in self.groups[name].items():
                    before = group.get(key)
                    if isinstance(before, Tensor):
                        before.fill_(value)
                    elif key in group:
                        group[key] = tuple(value) if isinstance(before, tuple) else value


def _grid(module: BlockSparseModule) -> tuple[int, int]:
    """Return the grid of the whole weight, of which the module may have a part."""
    return module.layout.grid if module.part is None else module.part.grid


def _hyperparameters(state: DistributedState, parameter: nn.Parameter) -> dict[str, Any]:
    """Return those entries of a parameter's group that JSON can express."""
    group = state.param_group(parameter).items()
    values = {key: value.item() if isinstance(value, Tensor) else value for key, value in group}
    return {key: value for key, value in values.items() if key != "params" and _is_json(value)}


def _is_per_block(state: DistributedState, name: str, key: str, value: Tensor, shape: torch.Size) -> bool:
    """Return whether a state of a parameter `name` of this shape has a row for each block, but another shape."""
    is_factored = averaged_axis(key, value, shape) is not None
    return state.layer_of_values(name) is not None and (is_factored or is_state_of_blocks(key, value, shape))


def _device_of(key: str, parameter: nn.Parameter, state: DistributedState) -> torch.device:
    """Return where PyTorch's optimizers keep an entry of another shape than the parameter's: counts are on the CPU."""
    group = state.param_group(parameter)
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return parameter.device if on_device else torch.device("cpu")


def _is_json(value: Any) -> bool:
    """Return whether JSON can express a value."""
    if isinstance(value, tuple | list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)


def _json_tensor(about: Mapping[str, Any]) -> Tensor:
    """Return facts as JSON in a uint8 tensor."""
    return torch.frombuffer(bytearray(as_json(about).encode()), dtype=torch.uint8)


def _reason(error: BaseException) -> str:
    """Describe a failure in one line; of failures in several processes, the one of the lowest rank, with that rank."""
    if isinstance(error, dcp.CheckpointException):
        rank, (inner, _) = min(error.failures.items())
        return f"process {rank}: {_reason(inner)}"
    if any(word in str(error) for word in ("weights_only", "PytorchStreamReader")):
        # PyTorch's own message advises to load the file anyway, which would run the code in it.
        return "a data file that is cut or damaged"
    return f"{type(error).__name__}: {first_line(error)}"
