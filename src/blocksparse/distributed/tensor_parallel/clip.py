"""Gradient clipping for models whose gradients are sharded over processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...checked import is_int
from ...errors import BlockSparseError
from ...surgery.sharding import local_of


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients of a model so that their norm is at most `max_norm`; return the norm before.

    Under tensor parallelism each process has a part of a layer. `torch.nn.utils.clip_grad_norm_` would use the norm of
    that part and scale the gradients differently on each process. This function adds up the parts and the shards of
    `fully_shard`, and counts replicated gradients once. All processes call it.

    Args:
        model: a module, parallelized in any of these ways or not at all.
        max_norm: a positive number.

    Raises:
        BlockSparseError: a norm that is not positive.

    >>> import blocksparse as bs
    >>> layer = bs.nn.Linear(4, 4, block_size=2, bias=False)
    >>> layer(torch.ones(1, 4)).sum().backward()
    >>> bs.distributed.clip_grad_norm_(layer, 2.0), round(layer.values.grad.norm().item(), 4)
    (tensor(4.), 2.0)
    """
    if not (is_int(max_norm) or isinstance(max_norm, float)) or not max_norm > 0:
        raise BlockSparseError.expected("max_norm", "a positive number", repr(max_norm))
    # The sum of squares for each tuple of groups over which gradients are sharded; () for replicated ones.
    sums: dict[tuple[Any, ...], Tensor] = {}
    grads, seen = [], set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            grad = parameter.grad
            if grad is None or parameter in seen:
                continue
            seen.add(parameter)
            grads.append(grad)
            groups: list[Any] = []
            sharding, part = getattr(module, "sharded_parameters", {}).get(name), getattr(module, "part", None)
            if sharding is not None:
                groups.append(sharding.group)
            elif name == "values" and part is not None:
                groups.append(part.group)
            if isinstance(grad, DTensor):
                mesh = grad.device_mesh
                groups += [mesh.get_group(k) for k, placement in enumerate(grad.placements) if placement.is_shard()]
                grad = grad.to_local()
            square = grad.float().square().sum() if grad.dtype.itemsize < 4 else grad.square().sum()
            key = tuple(groups)
            sums[key] = sums[key] + square if key in sums else square
    if not grads:
        return torch.zeros((), device="cpu")
    total: Any = 0
    for sharded_over, square in sums.items():
        for group in sharded_over:
            dist.all_reduce(square, group=group)
        total = total + square
    norm: Tensor = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    for grad in grads:
        local = local_of(grad)
        local.mul_(scale.to(local.device, local.dtype))
    return norm
