"""Conversion of 2:4 weights for PyTorch's kernels for sparse tensor cores of NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BlockSparseError
from ...surgery.prunable import Prunable, Skip, split_refused

DTYPES = (torch.float16, torch.bfloat16)
# Supported by both cuSPARSELt and CUTLASS.
MULTIPLES = (32, 64)


def to_semi_structured(model: nn.Module, skip: Skip = ()) -> dict[str, str]:
    """Convert 2:4 sparse linear layers of a model, in place, so that they run on a GPU's sparse tensor cores.

    `torch.sparse.to_sparse_semi_structured` compresses the weights for inference, without gradients. They must be 2:4
    sparse already (`SRSTE`, or `weight * nm_mask(weight)`). On a CPU, use `nm_layout` instead.

    Args:
        model: any module, on a GPU.
        skip: modules, or names of modules or parameters, to leave unchanged; none by default.

    Returns:
        The names of the weights that are unchanged, with the reason.

    Raises:
        BlockSparseError: no weight can be converted, with the reasons; `skip` names something that the model does not
            have; PyTorch's kernels do not support the device. Nothing is changed then.

    >>> import torch, blocksparse as bs
    >>> bs.sparsity.to_semi_structured(torch.nn.Linear(64, 32, dtype=torch.float16))
    Traceback (most recent call last):
    ...
    blocksparse.errors.BlockSparseError: model: expected a linear layer whose weight can be converted, got weight: on
    cpu; only CUDA has kernels for it

    Source: Mishra et al., Accelerating sparse deep neural networks (2021).
    """

    def refusal(weight: Prunable) -> str | None:
        kind = type(weight.module)
        return (
            semi_structured_refusal(weight.matrix()) if kind is nn.Linear else f"a {kind.__name__} is no linear layer"
        )

    chosen, unchanged = split_refused(model, skip, refusal)
    if not chosen:
        reasons = ", ".join(f"{name}: {reason}" for name, reason in unchanged.items()) or "no weight"
        raise BlockSparseError.expected("model", "a linear layer whose weight can be converted", reasons)
    compress: Any = torch.sparse.to_sparse_semi_structured
    try:
        converted = [compress(weight.matrix().detach().contiguous()) for weight in chosen]
    except (RuntimeError, NotImplementedError) as error:
        raise BlockSparseError.expected("model", "a device with PyTorch's 2:4 kernels", error) from error
    for weight, sparse in zip(chosen, converted, strict=True):
        weight.module.weight = nn.Parameter(sparse, requires_grad=False)
    return unchanged


def semi_structured_refusal(weight: Tensor) -> str | None:
    """Return the reason why a weight cannot be converted, or None."""
    if weight.device.type != "cuda":
        return f"on {weight.device.type}; only CUDA has kernels for it"
    return refusal_of_values(weight)


def refusal_of_values(weight: Tensor) -> str | None:
    """Return the reason why a weight cannot be converted on any device, or None."""
    if weight.dtype not in DTYPES:
        return f"{weight.dtype} is neither float16 nor bfloat16"
    if weight.dim() != 2 or weight.shape[0] % MULTIPLES[0] or weight.shape[1] % MULTIPLES[1]:
        return f"shape {list(weight.shape)} is no multiple of {list(MULTIPLES)}"
    stored = (weight.detach() != 0).reshape(weight.shape[0], -1, 4).sum(-1)
    if (stored > 2).any():
        return "more than 2 of 4 consecutive weights are not 0"
    return None
