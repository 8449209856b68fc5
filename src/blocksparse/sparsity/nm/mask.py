"""N:M masks of weights and N:M layouts of blocks, along the inputs."""

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
    """Return a mask of the n largest |w| of each m consecutive input features; among equal ones, the first.

    Args:
        weight: `[out_features, in_features]`, or `[out_channels, in_channels, *kernel]` of a convolution, where each
            tap has its own groups of m consecutive input channels.
        n: weights to mark in each group, 2 by default.
        m: weights in a group, n or more and a divisor of the inputs; 4 by default.

    Returns:
        bool, with the weight's shape and device.

    Raises:
        BlockSparseError: the weight is not such a tensor; m does not divide the inputs; n or m out of range.

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
    """Return an N:M layout of blocks: the n largest of each m consecutive blocks of a row.

    This form of N:M saves time on any device: kernels skip the other blocks, so products, memory and gradients cost
    n / m of the dense ones, and all rows cost the same. Masks of single weights save time only on sparse tensor cores.
    Tall blocks such as `(16, 1)` are nearly as fast as square ones, and keep more of the magnitude.

    Args:
        weight: `[out_features, in_features]`, or `[out_channels, in_channels, *kernel]`; padded with zeros to whole
            blocks, as modules do.
        n: blocks to keep in each group, 2 by default.
        m: blocks in a group, n or more and a divisor of the blocks of a row; 4 by default.
        block_size: an int, 32 by default, or (rows, columns).
        norm: size of a block: "l2" (default), or the "mean" or "max" of |w|.

    Raises:
        BlockSparseError: as for `nm_mask`; a block size that is not positive; m does not divide the blocks of a row.

    >>> import torch, blocksparse as bs
    >>> weight = torch.tensor([[1.0, 0.0, 2.0, 2.0, 3.0, 0.0, 0.0, 4.0]])
    >>> bs.sparsity.nm_layout(weight, 1, 2, block_size=(1, 2)).mask().int()
    tensor([[0, 1, 0, 1]], dtype=torch.int32)

    Source: Mishra et al., Accelerating sparse deep neural networks (2021), for N:M.
    """
    check_weight(weight)
    check_norm(norm)
    block = checked_block(block_size)
    rows, cols = (-(-size // side) for size, side in zip(weight.shape, block, strict=False))
    check_nm(n, m)
    if cols % m:
        expected = f"a multiple of {m} blocks in each row (pass a smaller block_size, or another m)"
        raise BlockSparseError.expected("weight", expected, f"{cols}: {weight.shape[1]} inputs in blocks of {block[1]}")
    weight = weight.detach().flatten(2) if weight.dim() > 2 else weight.detach().unsqueeze(2)
    weight = F.pad(weight, (0, 0, 0, cols * block[1] - weight.shape[1], 0, rows * block[0] - weight.shape[0]))
    blocks = weight.reshape(rows, block[0], cols, block[1], -1)
    return BlockLayout(nm_mask(norms_over(blocks, norm, (1, 3, 4)), n, m), block)


def check_weight(weight: Any) -> None:
    """Raise a BlockSparseError unless this is a dense floating-point weight of two or more dimensions, not empty."""
    if not isinstance(weight, Tensor) or weight.layout != torch.strided or weight.is_meta:
        got = f"a {weight.layout} tensor on {weight.device}" if isinstance(weight, Tensor) else type(weight).__name__
        raise BlockSparseError.expected("weight", "a dense tensor with data", got)
    if weight.dim() < 2 or weight.numel() == 0 or not weight.is_floating_point():
        got = f"shape {list(weight.shape)}, {weight.dtype}"
        raise BlockSparseError.expected("weight", "floating-point [out, in] or [out, in, *kernel], not empty", got)


def check_nm(n: Any, m: Any) -> None:
    """Raise a BlockSparseError unless 0 < n <= m."""
    if not is_int(n) or not is_int(m) or not 0 < n <= m:
        raise BlockSparseError.expected("n and m", "ints, 0 < n <= m", f"{n!r} and {m!r}")


def check_inputs(inputs: int, m: int) -> None:
    """Raise a BlockSparseError unless m divides the number of inputs."""
    if inputs % m:
        raise BlockSparseError.expected("weight", f"a multiple of {m} inputs", inputs)
