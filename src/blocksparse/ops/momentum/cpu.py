"""A step with momentum on the CPU: one pass over memory for all tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import cpu_core
from ..cpu_core import DTYPES, address
from .reference import check_count

unsupported_reason = cpu_core.unsupported_reason


def serves(tensors: Sequence[Tensor]) -> bool:
    """Return whether the compiled core can serve the tensors: one dtype, on the CPU, contiguous."""
    dtype = tensors[0].dtype
    return all(
        tensor.dtype == dtype
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        for tensor in tensors
    )


def step(
    weights: list[Tensor], velocities: list[Tensor], grads: list[Tensor], *, momentum: float, rate: float, keep: float
) -> None:
    """Step all weights in place: v <- momentum v - rate g;  w <- keep w + v."""
    dtype, shapes = weights[0].dtype, [w.shape for w in weights]

    def addresses(name: str, tensors: list[Tensor]) -> list[int]:
        check_count(name, tensors, weights)
        return [address(f"{name}[{i}]", tensor, shapes[i], dtype) for i, tensor in enumerate(tensors)]

    cpu_core.core().momentum_steps(
        isa=cpu_core.isa(), dtype=DTYPES[dtype],
        counts=[w.numel() for w in weights], weights=addresses("weights", weights),
        velocities=addresses("velocities", velocities), grads=addresses("grads", grads), momentum=momentum,
        rate=rate, keep=keep,
    )  # fmt: skip
    increment_version([*weights, *velocities])
