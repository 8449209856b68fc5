"""The block-sparse linear layer in 8 bits, for inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import BlockSparseError
from ..layout import BlockLayout, layout_of_indices
from ..ops.int8_linear import DTYPES, int8_linear, quantized
from .linear import Linear
from .module import OTHERS, others_in_buffers

BUFFERS = ("crow_indices", "col_indices", "values", "scales")


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
        activation: None, "relu", "gelu" or "silu", applied in the same pass.

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
    _layout: BlockLayout
    _seen: tuple[Tensor, int, Tensor, int] | None  # buffers that hold the layout, and how often these were written to

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
        if not {name for name, _ in layer.named_parameters()} <= {"values", "bias"}:
            wanted = (
                "`values` that are a parameter: remove what makes them of others (torch.nn.utils.prune.remove, say)"
            )
            raise BlockSparseError.expected("layer", wanted, [name for name, _ in layer.named_parameters()])
        values, scales = quantized(layer.values)
        sizes = layer.in_features, layer.out_features
        bias = None if layer.bias is None else layer.bias.detach().clone()
        return cls(*sizes, layer.layout, values, scales, bias, layer.activation)

    @property
    def layout(self) -> BlockLayout:
        """The blocks of the weight that `values` holds.

        Raises:
            BlockSparseError: other indices were written to the layer's buffers.
        """
        if torch.compiler.is_compiling():
            return self._layout
        crow, col = self.crow_indices, self.col_indices
        counted = not (crow.is_inference() or col.is_inference())
        seen = (crow, crow._version, col, col._version) if counted else None
        if seen is None or self._seen is None or any(a is not b for a, b in zip(seen, self._seen, strict=True)):
            if others := others_in_buffers(self):
                raise BlockSparseError.expected(others, f"those of {self._layout!r}", OTHERS)
            self._seen = seen
        return self._layout

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._seen = None  # a copy has buffers of its own

    def dequantized(self) -> Linear:
        """The `Linear` of the rounded weight, of the bias's dtype."""
        options: dict[str, Any] = {"activation": self.activation, "bias": self.bias is not None, "device": "meta"}
        layer = Linear(self.in_features, self.out_features, layout=self.layout, **options)
        values = self.values * self.scales[..., None]
        layer.values = nn.Parameter(values if self.bias is None else values.to(self.bias.dtype))
        layer.bias = None if self.bias is None else nn.Parameter(self.bias)
        layer.reset_layout_buffers(self.values.device)
        return layer.train(self.training)

    def _note_layout(self, layout: BlockLayout) -> None:
        self._layout, self._seen = layout, None
        for name in ("crow_indices", "col_indices"):
            self.register_buffer(name, getattr(layout, name)().to(self.values.device))

    def forward(self, input: Tensor, gate: None = None) -> Tensor:
        layout, x = self.layout, input
        if gate is not None:
            raise BlockSparseError.expected("gate", "None: layers in 8 bits have no gates", type(gate).__name__)
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != self.in_features:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise BlockSparseError.expected("x", f"a tensor [..., {self.in_features}]", got)
        bias, (out_features, in_features) = self.bias, layout.shape
        if bias is not None and torch.is_autocast_enabled(x.device.type):  # as everywhere in it, x may be of 16 bits
            bias = bias.to(x.dtype)
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
        crow, col, values, scales = (state_dict.get(prefix + name) for name in BUFFERS)
        try:
            layout = self._layout
            if crow is not None and col is not None:
                layout = layout_of_indices(crow, col, layout.grid, layout.block_shape)
            for name, mine, given, shape in (
                ("values", self.values, values, layout.values_shape),
                ("scales", self.scales, scales, layout.values_shape[:2]),
            ):
                missed = given is None and (layout != self._layout or values is not None or scales is not None)
                if missed or (given is not None and (given.shape != shape or given.dtype != mine.dtype)):
                    got = None if given is None else f"{list(given.shape)}, {given.dtype}"
                    raise BlockSparseError.expected(name, f"{list(shape)}, {mine.dtype}, of blocksparse.quantize", got)
            if layout != self._layout:
                self.values = self.values.new_empty(layout.values_shape)
                self.scales = self.scales.new_empty(layout.values_shape[:2])
                self._note_layout(layout)
        except BlockSparseError as error:
            errors.append(f"{prefix or type(self).__name__}: {error}")
        else:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        layout = self._layout
        activation = f", activation={self.activation!r}" if self.activation else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, block_size={layout.block_shape}, "
            f"nnz={layout.nnz}, density={layout.density:.4g}, bias={self.bias is not None}{activation}"
        )
