"""A step with momentum on the CPU: one pass over memory for all tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import cpu_core
from ..cpu_core import DTYPES

refusal = cpu_core.refusal


def serves(tensors: Sequence[Tensor]) -> bool:
    """Whether they are as the compiled core wants them: of one dtype, on the CPU, each in one piece."""
    dtype = tensors[0].dtype
    return all(
        tensor.dtype == dtype
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        for tensor in tensors
    )


def step(
    weights: list[Tensor],
    velocities: list[Tensor],
    grads: list[Tensor],
    *,
    momentum: float,
    rate: float,
    keep: float,
) -> None:
    cpu_core.core().momentum_steps(
        isa=cpu_core.isa(),
        dtype=DTYPES[weights[0].dtype],
        counts=[w.numel() for w in weights],
        weights=[w.data_ptr() for w in weights],
        velocities=[v.data_ptr() for v in velocities],
        grads=[g.data_ptr() for g in grads],
        momentum=momentum,
        rate=rate,
        keep=keep,
    )
    increment_version([*weights, *velocities])
