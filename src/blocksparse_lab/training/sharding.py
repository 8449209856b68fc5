"""FSDP2 for the trainer: each process stores a shard of every parameter and of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from blocksparse.distributed.fsdp import sharded_like
from blocksparse.distributed.state import local_box
from blocksparse.errors import BlockSparseError
from blocksparse.nn.module import BlockSparseModule
from blocksparse.state_indices import layout_of_indices
from blocksparse.surgery.sharding import local_of
from blocksparse.surgery.weight_handle import handle_of

from .callback import Task


def shard(task: Task, processes: int, device: torch.device) -> None:
    """Shard a task's model by FSDP2: each layer of `blocksparse.nn` by itself, the rest with the whole model.

    Raises:
        BlockSparseError: the task replaces its model.
    """
    if task.replaces_model:
        expected = "a task that trains one model throughout, or a run without it"
        raise BlockSparseError.expected("shard", expected, type(task).__name__)
    mesh = init_device_mesh(device.type, (processes,))
    for parameter in task.model.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP2 does not support channels-last
    uses = Counter(map(id, (p for _, p in task.model.named_parameters(remove_duplicate=False))))
    for layer in list(_layers(task.model)):
        own = [uses[id(parameter)] == 1 for parameter in layer.parameters()]
        # Gather shared layers, and layers that are never called, with the whole model.
        if layer is not task.model and own and all(own) and type(layer).forward is not nn.Module.forward:
            fully_shard(layer, mesh=mesh)
    fully_shard(task.model, mesh=mesh)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost `blocksparse.nn` modules of a model."""
    if type(module).__module__.startswith("blocksparse.nn."):
        yield module
    else:
        for child in module.children():
            yield from _layers(child)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, detached, sharing its memory."""
    return local_of(tensor.detach())


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Copy a tensor to the device, sharding and memory format of another tensor of the same shape."""
    if not isinstance(other, DTensor):
        return torch.empty_like(other, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    offset, size = local_box("tensor", other)
    piece = tensor[tuple(slice(begin, begin + length) for begin, length in zip(offset, size, strict=True))]
    return sharded_like(other, piece.to(other.device, copy=True), len(tensor))


@torch.no_grad()
def load_state_dict(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the state of a whole model, with its layouts, into a sharded one."""
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseModule):
            crow, col = (tensors[f"{name}.{key}".removeprefix(".")] for key in ("crow_indices", "col_indices"))
            layout = layout_of_indices(crow, col, module.layout.grid, module.layout.block_shape)
            if layout != module.layout:
                handle_of(module).set_layout(layout, torch.full((layout.nnz,), -1))
    model.load_state_dict(
        {
            name: copy_like(tensors[name], own) if isinstance(own, DTensor) else tensors[name]
            for name, own in model.state_dict().items()
        }
    )
