"""N:M sparsity: n weights, or n blocks, of each m consecutive ones along the inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checked import checked_block, is_int
from ...errors import BlockSparseError
from ...layout import BlockLayout
from ..selection import check_norm, norms_over


def nm_mask(weight: Tensor, n: int = 2, m: int = 4) -> Tensor:
    """Masks the n largest |w| of each m consecutive input features; among equals, the first ones.

    Args:
        weight: `[out_features, in_features]`, or `[out_channels, in_channels, *kernel]` of a convolution, where
            each tap has groups of its own: m consecutive input channels.
        n, m: 0 < n <= m; m divides the inputs.

    Returns:
        bool, of the weight's shape and device.

    Raises:
        BlockSparseError: a weight that is no such tensor, inputs that m does not divide, n or m out of range.

    >>> import torch, blocksparse as bs
    >>> bs.sparsity.nm_mask(torch.tensor([[1.0, -3.0, 2.0, 0.5, 7.0, 7.0, 7.0, 7.0]])).int()
    tensor([[0, 1, 1, 0, 1, 1, 0, 0]], dtype=torch.int32)

    Source: Mishra et al., Accelerating sparse deep neural networks (2021).
    """
    check_weight(weight)
    check_nm(n, m)
    check_inputs(weight.shape[1], m)
    groups = weight.detach().abs().movedim(1, -1).unflatten(-1, (-1, m))
    order = groups.argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., :n], True)
    return mask.flatten(-2).movedim(-1, 1).contiguous()


def nm_layout(
    weight: Tensor, n: int = 2, m: int = 4, block_size: int | tuple[int, int] = 32, *, norm: str = "l2"
) -> BlockLayout:
    """Makes an N:M layout of whole blocks: the n largest of each m consecutive blocks of a row.

    This is the form of N:M that saves time on any device: every row of blocks has equally many, and the kernels skip
    the others, so that products, memory and gradients cost n / m of all blocks. Masks of single weights save nothing
    outside of GPUs with sparse tensor cores. Tall blocks, `(16, 1)` say, N:M of vectors, are nearly as fast as square
    ones, and keep more of the magnitude: an input that is loaded serves all rows of its block.

    Args:
        weight: `[out_features, in_features]`, or `[out_channels, in_channels, *kernel]`; padded with zeros to whole
            blocks, as the modules do.
        n, m: 0 < n <= m; m divides the blocks of a row.
        block_size: an int or (rows, columns).
        norm: what makes a block large: "l2", or the "mean" or "max" of |w|.

    Raises:
        BlockSparseError: as `nm_mask`; a block size that is not positive, blocks of a row that m does not divide.

    >>> import torch, blocksparse as bs
    >>> weight = torch.tensor([[1.0, 0.0, 2.0, 2.0, 3.0, 0.0, 0.0, 4.0]])
    >>> bs.sparsity.nm_layout(weight, 1, 2, block_size=(1, 2)).mask().int()
    tensor([[0, 1, 0, 1]], dtype=torch.int32)

    Source: Mishra et al. (2021) for N:M.
    """
    check_weight(weight)
    check_norm(norm)
    block = checked_block(block_size)
    rows, cols = (-(-size // side) for size, side in zip(weight.shape, block, strict=False))
    weight = weight.detach().flatten(2) if weight.dim() > 2 else weight.detach().unsqueeze(2)
    weight = F.pad(weight, (0, 0, 0, cols * block[1] - weight.shape[1], 0, rows * block[0] - weight.shape[0]))
    blocks = weight.reshape(rows, block[0], cols, block[1], -1)
    return BlockLayout(nm_mask(norms_over(blocks, norm, (1, 3, 4)), n, m), block)


def check_weight(weight: Any) -> None:
    """Raises a BlockSparseError unless it is a dense floating-point weight of two or more dimensions, not empty."""
    if not isinstance(weight, Tensor) or weight.layout != torch.strided or weight.is_meta:
        got = f"a {weight.layout} tensor on {weight.device}" if isinstance(weight, Tensor) else type(weight).__name__
        raise BlockSparseError.expected("weight", "a dense tensor with data", got)
    if weight.dim() < 2 or weight.numel() == 0 or not weight.is_floating_point():
        got = f"shape {list(weight.shape)}, {weight.dtype}"
        raise BlockSparseError.expected("weight", "floating-point [out, in] or [out, in, *kernel], not empty", got)


def check_nm(n: Any, m: Any) -> None:
    if not is_int(n) or not is_int(m) or not 0 < n <= m:
        raise BlockSparseError.expected("n and m", "ints, 0 < n <= m", f"{n!r} and {m!r}")


def check_inputs(inputs: int, m: int) -> None:
    if inputs % m:
        raise BlockSparseError.expected("weight", f"a multiple of {m} inputs", inputs)
