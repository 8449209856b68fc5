"""The block-sparse linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..checked import shape_of
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops.checks import check_activation
from ..ops.linear import ACTIVATIONS
from .layout_module import LayoutModule
from .module import BlockSparseModule, layout_for


class LinearModule(LayoutModule):
    """The call of a linear layer, padded to whole blocks; subclasses have the product."""

    in_features: int
    out_features: int
    activation: str | None
    bias: Tensor | None
    _product: Callable[..., Tensor]

    @property
    def weight_shape(self) -> tuple[int, int]:
        """(out, in) of the weight, without padding."""
        return self.out_features, self.in_features

    def forward(self, input: Tensor) -> Tensor:
        return self.compute(input, self.bias, self.activation)

    def compute(self, x: Tensor, bias: Tensor | None, activation: str | None, *gate: Tensor | None) -> Tensor:
        """activation(x W^T + bias), whatever the module's own bias and activation are."""
        layout = self.layout
        out_features, in_features = layout.shape
        if in_features != self.in_features:
            if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != self.in_features:
                raise BlockSparseError.expected("x", f"a tensor [..., {self.in_features}]", shape_of(x))
            x = F.pad(x, (0, in_features - self.in_features))
        if bias is not None and out_features != self.out_features:
            bias = F.pad(bias, (0, out_features - self.out_features))
        y = self._product(x, self._tensor("values"), layout, bias, activation, *gate)
        return y if out_features == self.out_features else y[..., : self.out_features]

    def _tensor(self, name: str) -> Tensor | None:
        """A parameter, or what has come in its place: Module's own way to it takes as long as a small product."""
        found: Tensor | None = self._parameters.get(name)
        return getattr(self, name) if found is None else found

    def extra_repr(self) -> str:
        activation = f", activation={self.activation!r}" if self.activation else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {self._stored}, "
            f"bias={self.bias is not None}{activation}"
        )


class Linear(LinearModule, BlockSparseModule):
    """`torch.nn.Linear` with a block-sparse weight: y = activation(x W^T + b).

    Args:
        in_features, out_features: any positive sizes; what is no multiple of the block is padded inside.
        layout: which blocks of the (padded) weight `[out_features, in_features]` exist.
        density: instead of a layout, the fraction of its numbers that a random pattern stores; None for all.
        block_size: an int or (rows, columns), where no layout is given.
        bias: whether there is a bias `[out_features]`.
        activation: None, "relu", "gelu" or "silu".
        device, dtype: of the parameters.

    Weights and biases are drawn as torch.nn.Linear draws them, uniform within 1 / sqrt(fan_in), with the fan-in
    that each output really has in the layout.

    Shapes: `[..., in_features] -> [..., out_features]`. The call takes a `gate` `[nnz]` too, as `blocksparse.linear`.

    Raises:
        BlockSparseError: a layout of another shape, a density outside of 0..1 or that rounds to no block, sizes that
            are not positive, an unknown activation; in the call, inputs that `blocksparse.linear` refuses.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Linear(100, 300, density=0.25, block_size=32)
        >>> layer
        Linear(in_features=100, out_features=300, block_size=(32, 32), nnz=10, density=0.25, bias=True)
        >>> layer(torch.randn(5, 7, 100)).shape
        torch.Size([5, 7, 300])
    """

    dense_kind: Any = None
    """The class of another library that `sparsify` made it of, if that one's weight is `[in, out]`."""
    _product = staticmethod(ops.linear)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        layout: BlockLayout | None = None,
        density: float | None = None,
        block_size: int | tuple[int, int] = 32,
        bias: bool = True,
        activation: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layout_for((out_features, in_features), layout, density, block_size), (), device, dtype)
        check_activation(activation, ACTIVATIONS)
        self.in_features = int(in_features)
        self.out_features = int(out_features)
        self.activation = activation
        self.bias = nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def forward(self, input: Tensor, gate: Tensor | None = None) -> Tensor:
        return self.compute(input, self._tensor("bias"), self.activation, gate)

    def reset_parameters(self) -> None:
        """Draws weights and biases again."""
        self.draw_parameters(self.bias)
