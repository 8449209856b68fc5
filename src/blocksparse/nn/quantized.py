"""The block-sparse linear layer in 8 bits, for inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import BlockSparseError
from ..layout import BlockLayout, layout_of_indices
from ..ops.int8_linear import DTYPES, int8_linear, quantized
from .linear import Linear


class QuantizedLinear(nn.Module):
    """A `Linear` whose weight is int8, with a float32 scale for each output of a block.

    Inputs are rounded in each call. Made by `blocksparse.quantize`, or by `of`; without gradients. Takes about a
    quarter of the memory of float32 blocks in a file, and on the CPU half, as the kernels keep a copy in an order of
    their own.

    Attributes:
        values: int8 `[nnz, block_out, block_in]`.
        scales: float32 `[nnz, block_out]`.
        crow_indices, col_indices: of the layout, as in the state dicts of the other modules.
        bias: `[out_features]` or None.

    Shapes: `[..., in_features] -> [..., out_features]`, float32, bfloat16 or float16, as the bias is.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.QuantizedLinear.of(bs.nn.Linear(100, 300, density=0.25))
    >>> layer
    QuantizedLinear(in_features=100, out_features=300, block_size=(32, 32), nnz=10, density=0.25, bias=True)
    >>> layer(torch.randn(5, 100)).shape
    torch.Size([5, 300])

    Source: Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference
    (2018); the dynamic kind as in torch.ao.nn.quantized.dynamic.Linear.
    """

    values: Tensor
    scales: Tensor
    crow_indices: Tensor
    col_indices: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layout: BlockLayout,
        values: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        for name, tensor in (("values", values), ("scales", scales), ("bias", bias)):
            self.register_buffer(name, None if tensor is None else tensor.detach())
        self._note_layout(layout)

    @classmethod
    def of(cls, layer: Linear) -> Self:
        """The layer in 8 bits.

        Raises:
            BlockSparseError: no `Linear`, or one of float64, or with numbers that are not finite.
        """
        if not isinstance(layer, Linear) or layer.values.dtype not in DTYPES:
            got = f"{type(layer).__name__} {getattr(getattr(layer, 'values', None), 'dtype', '')}".strip()
            raise BlockSparseError.expected("layer", f"a blocksparse.nn.Linear of {', '.join(map(str, DTYPES))}", got)
        values, scales = quantized(layer.values)
        sizes = layer.in_features, layer.out_features
        bias = None if layer.bias is None else layer.bias.detach().clone()
        return cls(*sizes, layer.layout, values, scales, bias, layer.activation)

    def _note_layout(self, layout: BlockLayout) -> None:
        self.layout = layout
        for name in ("crow_indices", "col_indices"):
            self.register_buffer(name, getattr(layout, name)().to(self.values.device))

    def forward(self, input: Tensor) -> Tensor:
        layout, x = self.layout, input
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != self.in_features:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise BlockSparseError.expected("x", f"a tensor [..., {self.in_features}]", got)
        bias, (out_features, in_features) = self.bias, layout.shape
        if in_features != self.in_features:
            x = F.pad(x, (0, in_features - self.in_features))
        if bias is not None and out_features != self.out_features:
            bias = F.pad(bias, (0, out_features - self.out_features))
        y = int8_linear(x, self.values, self.scales, layout, bias, self.activation)
        return y if out_features == self.out_features else y[..., : self.out_features]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        scales = self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scales.dtype != scales.dtype:  # casts are for the bias
            self.scales = scales.to(self.scales.device)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        crow, col = (state_dict.get(prefix + name) for name in ("crow_indices", "col_indices"))
        try:
            if crow is not None and col is not None:
                layout = layout_of_indices(crow, col, self.layout.grid, self.layout.block_shape)
                if layout != self.layout:
                    self.values = self.values.new_empty(layout.values_shape)
                    self.scales = self.scales.new_empty(layout.values_shape[:2])
                    self._note_layout(layout)
        except BlockSparseError as error:
            errors.append(f"{prefix or type(self).__name__}: {error}")
        else:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        layout = self.layout
        activation = f", activation={self.activation!r}" if self.activation else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, block_size={layout.block_shape}, "
            f"nnz={layout.nnz}, density={layout.density:.4g}, bias={self.bias is not None}{activation}"
        )
