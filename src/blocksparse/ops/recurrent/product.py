"""A weight, block-sparse or dense, as a recurrence uses it."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import patterns
from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..linear import linear
from ..linear.op import backend_of

# dgrad by the rows of a dense weight adds to the whole output for each row. From WIDE features on, the output no longer
# fits in the L1 cache, and products with a transposed copy take half the time; the copy costs about as much as the
# products of TOKENS_OF_A_COPY tokens.
WIDE, TOKENS_OF_A_COPY = 1024, 128


class Product:
    """The products with one weight, without autograd: x W^T and grad W at each step, the weight's gradient at the end.

    Args:
        weight: `[nnz, block_out, block_in]` with a layout, `[out, in]` without.
        layout: the stored blocks, or None for a dense weight.
        tokens: rows of each x.
    """

    def __init__(self, weight: Tensor, layout: BlockLayout | None, tokens: int):
        self.shape = weight.shape
        self.layout = as_blocks(weight, tokens) if layout is None else layout
        self.weight = weight.contiguous()
        turns = layout is None and self.layout is not None and weight.shape[1] >= WIDE
        self._transposed_layout = _rows_of(*weight.T.shape) if turns else None
        self._transposed: Tensor | None = None
        self._seen = 0
        if self.layout is not None:
            self.weight = self.weight.view(self.layout.values_shape)
            self.backend = backend_of(weight)

    def forward(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """`[tokens, in] -> [tokens, out]`, x W^T + bias, into `out` if given."""
        if self.layout is not None:
            return self.backend.linear(x, self.weight, bias, self.layout, False, None, out)
        if bias is None:
            return torch.mm(x, self.weight.T, out=out)
        return torch.addmm(bias, x, self.weight.T, out=out)

    def backward(
        self, grad: Tensor, x: Tensor, needs_x: bool, needs_bias: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The gradients of x, of the weight and of the bias."""
        return self.dgrad(grad) if needs_x else None, self.wgrad(grad, x), grad.sum(0) if needs_bias else None

    def dgrad(self, grad: Tensor) -> Tensor:
        """`[tokens, out] -> [tokens, in]`."""
        if self.layout is None:
            return grad @ self.weight
        self._seen += len(grad)
        if self._transposed_layout is not None and self._seen > TOKENS_OF_A_COPY:
            return self.backend.linear(
                grad, self._copy(self._transposed_layout), None, self._transposed_layout, False, None
            )
        return self.backend.linear(grad, self.weight, None, self.layout, True, None)

    def _copy(self, layout: BlockLayout) -> Tensor:
        """The transposed weight as values of the layout."""
        if self._transposed is None:
            copy = workspace.empty(layout.shape, self.weight.dtype, self.weight.device)
            self._transposed = copy.copy_(self.weight.view(self.shape).T).view(layout.values_shape)
        return self._transposed

    def wgrad(self, grad: Tensor, x: Tensor) -> Tensor:
        """`[tokens, out], [tokens, in] ->` the gradient of the weight."""
        if self.layout is None:
            return grad.T @ x
        return self.backend.linear_wgrad(grad, x, self.layout).view(self.shape)


def linear_of(x: Tensor, weight: Tensor, layout: BlockLayout | None, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, differentiable, of a weight that is block-sparse with a layout, dense without."""
    if layout is None and not torch.is_autocast_enabled(x.device.type):
        layout = as_blocks(weight, len(x))
        weight = weight if layout is None else weight.view(layout.values_shape)
    return F.linear(x, weight, bias) if layout is None else linear(x, weight, layout, bias)


def as_blocks(weight: Tensor, tokens: int) -> BlockLayout | None:
    """Returns a layout whose values are the dense `weight` as it is in memory: blocks as wide as the weight.

    None where PyTorch's dense product is the better one: our kernels are faster than a BLAS that does not use all of
    the CPU, but not at a few tokens, nor in 16 bits.
    """
    if tokens < 8 or weight.dtype != torch.float32 or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    return _rows_of(*weight.shape)


@lru_cache(maxsize=64)
def _rows_of(out: int, in_: int) -> BlockLayout | None:
    return None if out % 32 or cpu_core.unavailable() else patterns.dense((out, in_), (32, in_))
