"""The tensors of a model that one or several processes store, by the names that they have in the plain model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checked import check_model
from ..errors import BlockSparseError
from ..nn.module import BlockSparseModule
from ..surgery.optimizer import unwrapped
from ..surgery.sharding import local_of

# torch.compile and activation checkpointing add these to the names of the modules that they wrap.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, eq=False)
class LocalChunk:
    """The part of a tensor that this process stores: some rows, and of these a range along each further axis.

    Args:
        local: the stored numbers, `[rows, ...]`; `[1]` of a scalar.
        rows: ascending, the place of each local row in the whole tensor.
        shape: the shape of the whole tensor.
        ranges: the stored range along each further axis.
    """

    local: Tensor
    rows: np.ndarray | range
    shape: tuple[int, ...]
    ranges: tuple[slice, ...]

    @classmethod
    def from_tensor(cls, name: str, tensor: Tensor) -> LocalChunk:
        """Return the local chunk of a plain tensor, or of a DTensor sharded along any axes."""
        if tensor.is_meta:
            raise BlockSparseError.expected(name, "a tensor with numbers", "one on the meta device")
        offset, size = local_box(name, tensor)
        local = local_of(tensor.detach())
        if not tensor.dim():
            return cls(local.reshape(1), range(1), (), ())
        first, *others = (slice(begin, begin + length) for begin, length in zip(offset, size, strict=True))
        return cls(local, range(first.start, first.stop), tuple(tensor.shape), tuple(others))

    @classmethod
    def from_rows(cls, tensor: Tensor, rows: np.ndarray | range | None = None, total: int | None = None) -> LocalChunk:
        """Return the local rows of a tensor that is plain or sharded by rows.

        Args:
            tensor: `[n, ...]`; under tensor parallelism, this process's part of the whole.
            rows: `[n]`, the place of each row in the whole; by default the tensor is the whole.
            total: the number of rows of the whole.
        """
        rows, local = range(len(tensor)) if rows is None else rows, tensor.detach()
        total = len(rows) if total is None else total
        if isinstance(local, DTensor):
            begin, end = shard_range(local, len(local))
            local, rows = local.to_local()[: end - begin], rows[begin:end]
        return cls(local, rows, (total, *tensor.shape[1:]), tuple(slice(0, size) for size in tensor.shape[1:]))

    def runs(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the consecutive rows: the place of the first one in the whole tensor, and their numbers."""
        ends = [*(np.flatnonzero(np.diff(self.rows) != 1) + 1).tolist(), len(self.rows)]
        for begin, end in zip([0, *ends], ends, strict=False):
            if begin < end:
                yield int(self.rows[begin]), self.local[begin:end]

    def between(self, begin: int, end: int) -> tuple[np.ndarray, Tensor]:
        """Return the local rows in [begin, end) of the whole tensor: their places after `begin`, and their numbers."""
        if isinstance(self.rows, range):
            first = self.rows.start
            mine = slice(*(min(max(at - first, 0), len(self.rows)) for at in (begin, end)))
        else:
            mine = slice(*np.searchsorted(self.rows, (begin, end)).tolist())
        return np.asarray(self.rows[mine], dtype=np.int64) - begin, self.local[mine].cpu()


class DistributedState:
    """The tensors of a model, its block-sparse layers, and the optimizer that trains it.

    Args:
        module: plain, in DistributedDataParallel, or sharded by `fully_shard`; its layers may be tensor-parallel.
        optimizer: the one that trains the module, or None.

    Attributes:
        root: the module without DistributedDataParallel.
        names: for each name of `root.state_dict()`, the name without those of wrappers.
        tensors: the state dict, by these names.
        layers: the block-sparse modules.
        shardings: the `AxisSharding` of each dense parameter, such as a bias, that tensor parallelism shards.
        optimizer: the one that holds the states, without wrappers of other libraries.
    """

    def __init__(self, module: nn.Module, optimizer: Any = None):
        check_model(module, "module")
        self.is_ddp = isinstance(module, nn.parallel.DistributedDataParallel)
        self.root: nn.Module = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
        state = self.root.state_dict()
        self.names = {name: _without_wrappers(name) for name in state}
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise BlockSparseError.expected(name, "a tensor in the state dict", type(tensor).__name__)
            self.tensors[self.names[name]] = tensor
        modules = {
            _without_wrappers(f"{name}."): module for name, module in self.root.named_modules(remove_duplicate=False)
        }
        self.layers = {
            name.removesuffix("."): module for name, module in modules.items() if isinstance(module, BlockSparseModule)
        }
        self.shardings: dict[str, Any] = {
            f"{name}{parameter}".removeprefix("."): sharding
            for name, module in modules.items()
            for parameter, sharding in getattr(module, "sharded_parameters", {}).items()
        }
        self.optimizer = unwrapped(optimizer)
        if optimizer is not None and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise BlockSparseError.expected("optimizer", "a torch.optim.Optimizer", type(optimizer).__name__)

    def layer_of_values(self, name: str) -> BlockSparseModule | None:
        """Return the layer whose `values` have this name; None for any other tensor."""
        layer, _, last = name.rpartition(".")
        return self.layers.get(layer) if last == "values" else None

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the optimizer's parameters by name; a BlockSparseError if one is not in the model."""
        if self.optimizer is None:
            return {}
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        by_name = {
            _without_wrappers(name): parameter
            for name, parameter in self.root.named_parameters()
            if id(parameter) in trained
        }
        if others := len(trained) - len(by_name):
            raise BlockSparseError.expected("optimizer", "parameters of the module only", f"{others} of others")
        return by_name

    def param_group(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's group of a parameter."""
        return next(group for group in self.optimizer.param_groups if any(p is parameter for p in group["params"]))

    def block_ranges(self) -> dict[str, tuple[range, int]]:
        """Return, for each tensor-parallel layer, its blocks when the ranks' parts are concatenated, and their total.

        All processes must call it.
        """
        counts = {name: module.layout.nnz for name, module in self.layers.items() if module.part is not None}
        groups = {id(self.layers[name].part.group): self.layers[name].part.group for name in counts}  # type: ignore[union-attr]
        ranges = {}
        for key, group in groups.items():
            mine = {name: nnz for name, nnz in counts.items() if id(self.layers[name].part.group) == key}  # type: ignore[union-attr]
            by_rank: list[dict[str, int]] = [mine]
            if group is not None:
                by_rank = [{}] * dist.get_world_size(group)
                dist.all_gather_object(by_rank, mine, group)
            rank = dist.get_rank(group) if group is not None else 0
            for name, nnz in mine.items():
                first = sum(each[name] for each in by_rank[:rank])
                ranges[name] = range(first, first + nnz), sum(each[name] for each in by_rank)
        return ranges


def local_box(name: str, tensor: Tensor, length: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and size of this process's part of a tensor; `length` replaces the size of axis 0."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # as PyTorch's own checkpoints

    shape = torch.Size([*([] if length is None else [length]), *tensor.shape[0 if length is None else 1 :]])
    if not isinstance(tensor, DTensor):
        return (0,) * len(shape), shape
    if any(placement.is_partial() for placement in tensor.placements):
        raise BlockSparseError.expected(name, "a tensor that is replicated or sharded", tensor.placements)
    size, offset = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return offset, size


def shard_range(tensor: DTensor, length: int) -> tuple[int, int]:
    """Return [begin, end) of this process's rows, if the tensor had `length` rows."""
    offset, size = local_box("values", tensor, length)
    if size[1:] != tensor.shape[1:]:
        raise BlockSparseError.expected("values", "replicated or sharded along the blocks", tensor.placements)
    return (offset[0], offset[0] + size[0]) if size[0] else (0, 0)


def _without_wrappers(name: str) -> str:
    """Return a parameter's name in the model without wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
