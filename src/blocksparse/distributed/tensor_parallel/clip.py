"""The norm of gradients of which each process has some."""

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
    """Scales the gradients of a model so that their norm is at most `max_norm`; returns the norm before.

    Where tensor parallelism gives each process its part of a layer, `torch.nn.utils.clip_grad_norm_` would take the
    part for the whole, and scale the gradients of each process differently. Parts are counted together here, as are
    shards of `fully_shard`, and what all processes have is counted once. All processes call it.

    Args:
        model: a module, parallel in any of these ways, or in none.
        max_norm: positive.

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
    # The squares of whole gradients, and of parts by the processes that have the others.
    sums: dict[Any, Tensor] = {}
    grads, seen = [], set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            grad = parameter.grad
            if grad is None or parameter in seen:
                continue
            seen.add(parameter)
            grads.append(grad)
            groups: list[Any] = []
            spread, part = getattr(module, "cut_parameters", {}).get(name), getattr(module, "part", None)
            if spread is not None:
                groups.append(spread.group)
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
        return torch.zeros(())
    total: Any = 0
    for groups_of, square in sums.items():
        for group in groups_of:
            dist.all_reduce(square, group=group)
        total = total + square
    norm: Tensor = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    for grad in grads:
        local = local_of(grad)
        local.mul_(scale.to(local.device, local.dtype))
    return norm
