"""Hands 2:4 weights to PyTorch's kernels for the sparse tensor cores of NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BlockSparseError
from ...surgery.prunable import Prunable, Skip, sort_out

DTYPES = (torch.float16, torch.bfloat16)
# Supported by both cuSPARSELt and CUTLASS.
MULTIPLES = (32, 64)


def to_semi_structured(model: nn.Module, skip: Skip = ()) -> dict[str, str]:
    """Gives the linear layers of a model 2:4 sparse weights that PyTorch multiplies on a GPU's sparse tensor cores.

    The weights are compressed by `torch.sparse.to_sparse_semi_structured`, in place, for inference: they need no
    gradient. They have to be 2:4 sparse already (`SRSTE`, or `weight * nm_mask(weight)`), since what compresses them
    does not look. On a CPU, `nm_layout` has the form of N:M that saves time.

    Args:
        model: any module, on a GPU.
        skip: what is left as it is: modules, or names of modules or parameters.

    Returns:
        The names of the weights that stay as they are, with the reason.

    Raises:
        BlockSparseError: no weight that could be converted, with the reasons; something to skip that the model does not
            have; a device that PyTorch's kernels refuse. Nothing is changed then.

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

    chosen, left = sort_out(model, skip, refusal)
    if not chosen:
        reasons = ", ".join(f"{name}: {reason}" for name, reason in left.items()) or "no weight"
        raise BlockSparseError.expected("model", "a linear layer whose weight can be converted", reasons)
    compress: Any = torch.sparse.to_sparse_semi_structured
    try:
        converted = [compress(weight.matrix().detach().contiguous()) for weight in chosen]
    except (RuntimeError, NotImplementedError) as error:
        raise BlockSparseError.expected("model", "a device with PyTorch's 2:4 kernels", error) from error
    for weight, sparse in zip(chosen, converted, strict=True):
        weight.module.weight = nn.Parameter(sparse, requires_grad=False)
    return left


def semi_structured_refusal(weight: Tensor) -> str | None:
    """Why a weight cannot be handed over, or None."""
    if weight.device.type != "cuda":
        return f"on {weight.device.type}; only CUDA has kernels for it"
    return refusal_of_values(weight)


def refusal_of_values(weight: Tensor) -> str | None:
    """The same, wherever the weight is."""
    if weight.dtype not in DTYPES:
        return f"{weight.dtype} is neither float16 nor bfloat16"
    if weight.dim() != 2 or weight.shape[0] % MULTIPLES[0] or weight.shape[1] % MULTIPLES[1]:
        return f"shape {list(weight.shape)} is no multiple of {list(MULTIPLES)}"
    stored = (weight.detach() != 0).reshape(weight.shape[0], -1, 4).sum(-1)
    if (stored > 2).any():
        return "more than 2 of 4 consecutive weights are not 0"
    return None
