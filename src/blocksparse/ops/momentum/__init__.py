"""A step with momentum, in place, for many tensors at once."""

from __future__ import annotations

from torch import Tensor

from ...errors import BlockSparseError
from . import cpu, reference
from .op import MOMENTUM

__all__ = ["step"]


def step(
    weights: list[Tensor], velocities: list[Tensor], grads: list[Tensor], *, momentum: float, rate: float, keep: float
) -> None:
    """Step each weight: v <- momentum v - rate g;  w <- keep w + v. There must be at least one weight.

    Raises:
        BlockSparseError: a weight or velocity is lazily negated.

    >>> import torch
    >>> w, v, g = torch.ones(1), torch.ones(1), torch.ones(1)
    >>> step([w], [v], [g], momentum=0.5, rate=0.25, keep=1)
    >>> w, v
    (tensor([1.2500]), tensor([0.2500]))
    """
    for tensor in (*weights, *velocities):
        if tensor.is_neg():
            raise BlockSparseError.expected(
                "weights, velocities", "tensors without lazy negation (write tensor.resolve_neg())", "one with"
            )
    grads = [grad.resolve_neg() for grad in grads]
    backend = MOMENTUM.on(weights[0].device, weights[0].dtype)
    if backend is cpu and not cpu.serves([*weights, *velocities, *grads]):
        backend = reference
    backend.step(weights, velocities, grads, momentum=momentum, rate=rate, keep=keep)
