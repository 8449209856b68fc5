"""What a process holds of a model that several processes may hold together: names, tensors, and places of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import BlockSparseError
from ..nn.module import BlockSparseModule
from ..surgery.optimizer import unwrapped
from .fsdp import sharded_like

# What torch.compile and checkpointing of activations put into the names of the modules that they wrap.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a tensor that this process stores: `[n, ...]`, from the `first` of `total`."""

    local: Tensor
    first: int
    total: int

    @property
    def end(self) -> int:
        return self.first + len(self.local)

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size([self.total, *self.local.shape[1:]])


class Held:
    """The tensors of a model by the names that they have in a plain one, and its block-sparse layers.

    Args:
        module: plain, in DistributedDataParallel, or sharded by `fully_shard`; its layers may be parts.
        optimizer: that trains it, or None.

    Attributes:
        tensors: the state dict, without the wrappers' names.
        names: these names by those of `root.state_dict()`.
        layers: the block-sparse modules.
        cuts: how dense parameters, such as biases, are cut over the processes of a tensor-parallel layer.
        optimizer: the one that holds the states: wrappers of other libraries are taken off.
    """

    def __init__(self, module: nn.Module, optimizer: Any = None):
        if not isinstance(module, nn.Module):
            raise BlockSparseError.expected("module", "a torch.nn.Module", type(module).__name__)
        self.is_ddp = isinstance(module, nn.parallel.DistributedDataParallel)
        self.root: nn.Module = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
        state = self.root.state_dict()
        self.names = {name: _without_wrappers(name) for name in state}
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise BlockSparseError.expected(name, "a tensor in the state dict", type(tensor).__name__)
            self.tensors[self.names[name]] = tensor
        self.layers = {
            _without_wrappers(f"{name}.").removesuffix("."): module
            for name, module in self.root.named_modules(remove_duplicate=False)
            if isinstance(module, BlockSparseModule)
        }
        self.cuts: dict[str, Any] = {
            f"{_without_wrappers(f'{name}.')}{parameter}": spread
            for name, module in self.root.named_modules(remove_duplicate=False)
            for parameter, spread in getattr(module, "cut_parameters", {}).items()
        }
        self.optimizer = unwrapped(optimizer)
        if optimizer is not None and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise BlockSparseError.expected("optimizer", "a torch.optim.Optimizer", type(optimizer).__name__)

    def layer_of(self, name: str) -> BlockSparseModule | None:
        """The layer whose blocks a tensor has; None for a tensor of any other kind."""
        layer, _, last = name.rpartition(".")
        return self.layers.get(layer) if last == "values" else None

    def trained(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters by their names; a BlockSparseError where one is not the model's."""
        if self.optimizer is None:
            return {}
        given = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        found = {
            _without_wrappers(name): parameter
            for name, parameter in self.root.named_parameters()
            if id(parameter) in given
        }
        if others := len(given) - len(found):
            raise BlockSparseError.expected("optimizer", "parameters of the module only", f"{others} of others")
        return found

    def group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        return next(group for group in self.optimizer.param_groups if any(p is parameter for p in group["params"]))

    def parts(self) -> dict[str, tuple[int, int]]:
        """Of each part the place of its first block in the checkpoint, and the blocks of all parts; all call it."""
        counts = {name: module.layout.nnz for name, module in self.layers.items() if module.part is not None}
        groups = {id(self.layers[name].part.group): self.layers[name].part.group for name in counts}  # type: ignore[union-attr]
        found = {}
        for key, group in groups.items():
            mine = {name: nnz for name, nnz in counts.items() if id(self.layers[name].part.group) == key}  # type: ignore[union-attr]
            everyone: list[dict[str, int]] = [mine]
            if group is not None:
                everyone = [{}] * dist.get_world_size(group)
                dist.all_gather_object(everyone, mine, group)
            rank = dist.get_rank(group) if group is not None else 0
            for name in mine:
                sizes = [one[name] for one in everyone]
                found[name] = sum(sizes[:rank]), sum(sizes)
        return found


def rows_of(tensor: Tensor, part: tuple[int, int] | None = None) -> Rows:
    """The rows of a tensor that are here; of a part's with the place of its first row, and the rows in all."""
    first, total = part or (0, len(tensor))
    if not isinstance(tensor, DTensor):
        return Rows(tensor, first, total)
    begin, end = shard_range(tensor, len(tensor))
    return Rows(tensor.to_local()[: end - begin], first + begin, total)


def cut_rows(tensor: Tensor, spread: Any) -> list[Rows]:
    """The rows that are here of a parameter that is cut over processes: runs of neighbours."""
    mine, total = rows_of(tensor), sum(spread.sizes)
    places = spread.here[mine.first : mine.end]
    starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    ends = [*starts[1:].tolist(), len(places)]
    return [Rows(mine.local[a:b], int(places[a]), total) for a, b in zip(starts.tolist(), ends, strict=True)]


def box_of(name: str, tensor: Tensor, length: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where what this process has of a tensor begins in the whole, and its size; with another `length` of axis 0."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # as PyTorch's own checkpoints

    shape = torch.Size([*([] if length is None else [length]), *tensor.shape[0 if length is None else 1 :]])
    if not isinstance(tensor, DTensor):
        return (0,) * len(shape), shape
    if any(placement.is_partial() for placement in tensor.placements):
        raise BlockSparseError.expected(name, "a tensor that is replicated or sharded", tensor.placements)
    size, offset = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return offset, size


def shard_range(tensor: DTensor, length: int) -> tuple[int, int]:
    """Which of `length` rows this process has, as the tensor is sharded."""
    offset, size = box_of("values", tensor, length)
    if size[1:] != tensor.shape[1:]:
        raise BlockSparseError.expected("values", "replicated or sharded along the blocks", tensor.placements)
    return (offset[0], offset[0] + size[0]) if size[0] else (0, 0)


def local_like(tensor: Tensor, length: int, dtype: torch.dtype) -> Rows:
    """Room for the rows that this process has of a tensor like this one, with `length` rows."""
    if not isinstance(tensor, DTensor):
        return Rows(tensor.new_empty([length, *tensor.shape[1:]], dtype=dtype), 0, length)
    begin, end = shard_range(tensor, length)
    return Rows(tensor.to_local().new_empty([end - begin, *tensor.shape[1:]], dtype=dtype), begin, length)


def as_sharded(rows: Rows, like: Tensor) -> Tensor:
    """The rows as a tensor that is sharded as another one is, if it is."""
    return sharded_like(like, rows.local, rows.total) if isinstance(like, DTensor) else rows.local


def _without_wrappers(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
