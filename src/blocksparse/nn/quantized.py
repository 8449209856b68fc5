"""Block-sparse weights in 8 bits, for inference, and the linear layer of one."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import BlockSparseError, Page
from ..layout import BlockLayout
from ..ops.checks import in_autocast
from ..ops.int8_linear import DTYPES, int8_linear, quantized
from ..state_indices import layout_from_state
from .layout_module import INDICES_REQUIRED, LayoutModule
from .linear import Linear, LinearModule
from .module import BlockSparseModule, check_parameters

# Axes of the layout's blocks that each tensor has; the values of a convolution have those of its kernel besides.
SHAPES = {"values": 3, "scales": 2}


class QuantizedModule(LayoutModule):
    """A module with int8 `values` and a float32 scale for each output of a block, as buffers."""

    _state_names = (*LayoutModule._state_names, "scales")
    scales: Tensor

    def __init__(self, layout: BlockLayout, values: Tensor, scales: Tensor):
        super().__init__(layout)
        self.hold(values, scales)

    def hold(self, values: Tensor, scales: Tensor, *bias: Tensor | None) -> None:
        """Take values of the module's layout and their scales, and a bias or None where it has one."""
        for name, tensor in zip(("values", "scales", "bias"), (values, scales, *bias), strict=False):
            self.__dict__.pop(name, None)  # a None of the layer that this one was made of
            self.register_buffer(name, None if tensor is None else tensor.detach())
        self.reset_layout_buffers()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:  # casts are for the bias
            self.scales = scales.to(self.scales.device)
        return self

    def cast_bias(self, bias: Tensor | None, x: Any) -> Tensor | None:
        """Return the bias as the product with x takes it: under autocast, as everywhere in it, x may be of 16 bits."""
        if bias is not None and isinstance(x, Tensor) and in_autocast(x):
            return bias.to(x.dtype)
        return bias

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return the values as they count."""
        scales = self.scales.reshape(*self.scales.shape, *[1] * (self.values.dim() - 2))
        return (self.values * scales).to(dtype)

    def _load_layout(self, given: dict[str, Any]) -> None:
        layout, crow, col = self._layout, given.get("crow_indices"), given.get("col_indices")
        if crow is not None and col is not None:
            self._check_blocks(given.get("values"))
            layout = layout_from_state(crow, col, layout)
        elif given:
            raise BlockSparseError.expected("layout", INDICES_REQUIRED, f"only {' and '.join(given)}", Page.LAYOUTS)
        tensors = [name for name in SHAPES if name in given]
        for name, axes in SHAPES.items():
            mine, tensor = getattr(self, name), given.get(name)
            shape = *layout.values_shape[:axes], *mine.shape[axes:]
            missed = tensor is None and (layout != self._layout or tensors)
            if missed or (tensor is not None and (tensor.shape != shape or tensor.dtype != mine.dtype)):
                got = None if tensor is None else f"{list(tensor.shape)}, {tensor.dtype}"
                raise BlockSparseError.expected(name, f"{list(shape)}, {mine.dtype}, of blocksparse.quantize", got)
        if layout != self._layout:
            self._layout = layout
            with torch.inference_mode(False):  # so that others can be loaded outside of it
                for name in SHAPES:
                    mine = getattr(self, name)
                    setattr(self, name, mine.new_empty(layout.nnz, *mine.shape[1:]))
            self.reset_layout_buffers()


def rounded_values(layer: Any, kind: type[BlockSparseModule]) -> tuple[Tensor, Tensor]:
    """Return the values of such a layer in 8 bits, and their scales.

    Raises:
        BlockSparseError: another layer, one of float64, values that are no parameter, or not finite.
    """
    if not isinstance(layer, kind) or layer.values.dtype not in DTYPES:
        got = f"{type(layer).__name__} {getattr(getattr(layer, 'values', None), 'dtype', '')}".strip()
        expected = f"a blocksparse.nn.{kind.__name__} of {', '.join(map(str, DTYPES))}"
        raise BlockSparseError.expected("layer", expected, got)
    check_parameters(layer)
    return quantized(layer.values)


def refuse_gate(gate: Any) -> None:
    """Raise a BlockSparseError for the gate that other layers take."""
    if gate is not None:
        raise BlockSparseError.expected("gate", "None: layers in 8 bits have no gates", type(gate).__name__)


def exchanged(module: nn.Module, kind: type[nn.Module]) -> Any:
    """Return a module of another class with the settings of this one, without parameters, buffers and children yet."""
    new: Any = copy.copy(module)
    new.__class__ = kind
    for graphs in ("_layout_is_dynamic", "_size_is_dynamic"):  # that were compiled for the other one
        new.__dict__.pop(graphs, None)
    new._parameters, new._buffers, new._modules = {}, {}, {}
    return new


class QuantizedLinear(QuantizedModule, LinearModule):
    """A `Linear` whose weight is int8, with a float32 scale for each output of a block.

    Inputs are rounded in each call. Made by `blocksparse.quantize`, or by `of`; without gradients. Takes about a
    quarter of the memory of float32 blocks in a file, and on the CPU half, as the kernels keep a copy in an order of
    their own. They make it again when values or scales are written to, but by `.data` or numpy, where PyTorch counts
    no writing.

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
        super().__init__(layout, values, scales)
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def of(cls, layer: Linear) -> Self:
        """Return the layer in 8 bits.

        Raises:
            BlockSparseError: no `Linear`, or one of float64, or with numbers that are not finite.
        """
        values, scales = rounded_values(layer, Linear)
        sizes = layer.in_features, layer.out_features
        bias = None if layer.bias is None else layer.bias.detach().clone()
        return cls(*sizes, layer.layout, values, scales, bias, layer.activation)

    def dequantized(self) -> Linear:
        """Return the `Linear` of the rounded weight, of the bias's dtype."""
        options: dict[str, Any] = {"activation": self.activation, "bias": self.bias is not None, "device": "meta"}
        layer = Linear(self.in_features, self.out_features, layout=self.layout, **options)
        layer.values = nn.Parameter(self.numbers(torch.float32 if self.bias is None else self.bias.dtype))
        layer.bias = None if self.bias is None else nn.Parameter(self.bias.clone())
        layer.reset_layout_buffers(self.values.device)
        return layer.train(self.training)

    def forward(self, input: Tensor, gate: None = None) -> Tensor:
        refuse_gate(gate)
        return super().forward(input)

    def _product(
        self, x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        return int8_linear(x, values, self.scales, layout, self.cast_bias(bias, x), activation)
