"""Products of a layout that stores all blocks, by PyTorch's dense product where that is faster than the core."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout import BlockLayout
from .. import workspace
from ..activations import ACTIVATIONS

# Instruction sets and dtypes whose dense product is faster. With AVX-512 it is slower on AMD's CPUs in float32. On
# Intel's it is 1.4 times as fast for the gradients, but its bits depend on the number of threads, as with AVX2.
FASTER = {("avx2", torch.float32)}
# The copy of the values takes as long as the product of 30 tokens, and the product is a fifth faster.
MIN_TOKENS = 256
# With fewer features the core is as fast.
MIN_FEATURES = 512


def linear(
    x: Tensor, values: Tensor, bias: Tensor | None, layout: BlockLayout, transpose: bool, activation: str | None,
    y: Tensor,
) -> None:  # fmt: skip
    """Write activation(x W^T + bias) to y, or x W with `transpose`; all operands were checked before."""
    weight = workspace.empty(layout.shape, x.dtype, x.device)
    with torch.no_grad():
        _as_grid(weight, layout).copy_(values.view(*layout.grid, *layout.block_shape))
        torch.mm(x, weight if transpose else weight.T, out=y)
        if bias is not None:
            y += bias
        if activation is not None:
            y.copy_(ACTIVATIONS[activation](y))


def linear_wgrad(grad: Tensor, x: Tensor, layout: BlockLayout, values: Tensor) -> None:
    """Write all blocks of grad^T x to `values`."""
    weight = workspace.empty(layout.shape, x.dtype, x.device)
    with torch.no_grad():
        torch.mm(grad.T, x, out=weight)
        values.view(*layout.grid, *layout.block_shape).copy_(_as_grid(weight, layout))


def _as_grid(weight: Tensor, layout: BlockLayout) -> Tensor:
    """Return a dense weight as a view `[out_blocks, in_blocks, block_out, block_in]`."""
    (rows, columns), (block_out, block_in) = layout.grid, layout.block_shape
    return weight.view(rows, block_out, columns, block_in).transpose(1, 2)
