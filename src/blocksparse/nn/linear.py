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
    """The forward pass of a linear layer, padded to whole blocks; subclasses define the product."""

    in_features: int
    out_features: int
    activation: str | None
    bias: Tensor | None
    _product: Callable[..., Tensor]

    @property
    def weight_shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the weight, without padding."""
        return self.out_features, self.in_features

    def forward(self, input: Tensor) -> Tensor:
        """Return activation(input W^T + bias); see `compute`."""
        return self.compute(input, self.bias, self.activation)

    def compute(self, x: Tensor, bias: Tensor | None, activation: str | None, gate: Tensor | None = None) -> Tensor:
        """Return activation(x W^T + bias), with x and the bias padded to whole blocks.

        Args:
            x: `[..., in_features]`.
            bias: `[out_features]` or None; it need not be the layer's own.
            activation: a name as in the constructor, or None.
            gate: one factor per block `[nnz]`, for products that accept a gate; None (default) for none.
        """
        layout = self.layout
        padded_out, padded_in = layout.shape
        if padded_in != self.in_features:
            if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != self.in_features:
                raise BlockSparseError.expected("x", f"a tensor [..., {self.in_features}]", shape_of(x))
            x = F.pad(x, (0, padded_in - self.in_features))
        if bias is not None and padded_out != self.out_features:
            bias = F.pad(bias, (0, padded_out - self.out_features))
        more = () if gate is None else (gate,)
        y = self._product(x, self._tensor("values"), layout, bias, activation, *more)
        return y if padded_out == self.out_features else y[..., : self.out_features]

    def _tensor(self, name: str) -> Tensor | None:
        """Return the parameter or other attribute `name`, without Module's slow lookup if it is a parameter."""
        parameter: Tensor | None = self._parameters.get(name)
        return getattr(self, name) if parameter is None else parameter

    def extra_repr(self) -> str:
        activation = f", activation={self.activation!r}" if self.activation else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {self._layout_repr}, "
            f"bias={self.bias is not None}{activation}"
        )


class Linear(LinearModule, BlockSparseModule):
    """`torch.nn.Linear` with a block-sparse weight: y = activation(x W^T + b).

    Args:
        in_features, out_features: positive sizes; the module pads them to multiples of the block.
        layout: the stored blocks of the padded weight `[out_features, in_features]`.
        density: fraction of the weights that a random layout stores if no layout is given; None stores all.
        block_size: an int or (rows, columns), used if no layout is given.
        bias: whether the layer has a bias `[out_features]`.
        activation: None, "relu", "gelu" or "silu".
        device, dtype: of the parameters.

    Weights and biases are drawn as in torch.nn.Linear, uniform within 1 / sqrt(fan_in), where fan_in counts the stored
    inputs of each output.

    Shapes: `[..., in_features] -> [..., out_features]`. `forward` also accepts a `gate` `[nnz]`, as
    `blocksparse.linear`.

    Raises:
        BlockSparseError: the layout has another shape, the density is not in 0..1 or stores no block, a size is not
            positive, or the activation is unknown; in the call, for inputs that `blocksparse.linear` refuses.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Linear(100, 300, density=0.25, block_size=32)
        >>> layer
        Linear(in_features=100, out_features=300, block_size=(32, 32), nnz=10, density=0.25, bias=True)
        >>> layer(torch.randn(5, 7, 100)).shape
        torch.Size([5, 7, 300])
    """

    dense_kind: type[nn.Module] | None = None
    """The class of the layer with a weight `[in, out]` that `sparsify` replaced, such as Conv1D of transformers.

    None if it replaced a torch.nn.Linear, or if the layer was built as it is."""
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
        layout = layout_for((out_features, in_features), layout, density, block_size)
        super().__init__(layout, kernel=(), device=device, dtype=dtype)
        check_activation(activation, ACTIVATIONS)
        self.in_features = int(in_features)
        self.out_features = int(out_features)
        self.activation = activation
        self.bias = nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def forward(self, input: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return activation(input W^T + bias), with blocks multiplied by `gate` `[nnz]` if it is not None."""
        return self.compute(input, self._tensor("bias"), self.activation, gate)

    def reset_parameters(self) -> None:
        """Draw new weights and biases."""
        self.draw_parameters(self.bias)
