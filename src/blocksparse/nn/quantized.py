"""Block-sparse weights in int8, for inference, and the linear layer of one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Self

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

# How many axes of `layout.values_shape` each tensor has. The values of a convolution also have its kernel's axes.
SHAPES = {"values": 3, "scales": 2}
SCALES = "block", "row"


class QuantizedModule(LayoutModule):
    """A module with int8 `values` and a float32 scale for each output of a block, as buffers."""

    _state_names = (*LayoutModule._state_names, "scales")
    scales: Tensor

    def __init__(self, layout: BlockLayout, values: Tensor, scales: Tensor):
        super().__init__(layout)
        self.set_buffers(values, scales)

    def set_buffers(self, values: Tensor, scales: Tensor, *bias: Tensor | None) -> None:
        """Register values of the module's layout and their scales as buffers, and the bias if one is passed."""
        for name, tensor in zip(("values", "scales", "bias"), (values, scales, *bias), strict=False):
            self.__dict__.pop(name, None)  # the float layer's attribute, which can be None
            self.register_buffer(name, None if tensor is None else tensor.detach())
        self.reset_layout_buffers()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:  # casts change the bias only
            self.scales = scales.to(self.scales.device)
        return self

    def cast_bias(self, bias: Tensor | None, x: Any) -> Tensor | None:
        """Return the bias, cast to the dtype of x under autocast, where x can have 16 bits."""
        if bias is not None and isinstance(x, Tensor) and in_autocast(x):
            return bias.to(x.dtype)
        return bias

    def dequantized_values(self, dtype: torch.dtype) -> Tensor:
        """Return values * scales in a dtype."""
        scales = self.scales.reshape(*self.scales.shape, *[1] * (self.values.dim() - 2))
        return (self.values * scales).to(dtype)

    def _load_layout(self, loaded: dict[str, Any]) -> None:
        """Take over the layout of a state dict, and check that its int8 values and scales fit."""
        layout, crow, col = self._layout, loaded.get("crow_indices"), loaded.get("col_indices")
        if crow is not None and col is not None:
            self._check_blocks(loaded.get("values"))
            layout = layout_from_state(crow, col, layout)
        elif loaded:
            raise BlockSparseError.expected("layout", INDICES_REQUIRED, f"only {' and '.join(loaded)}", Page.LAYOUTS)
        tensors = [name for name in SHAPES if name in loaded]
        for name, axes in SHAPES.items():
            own, tensor = getattr(self, name), loaded.get(name)
            shape = *layout.values_shape[:axes], *own.shape[axes:]
            is_missing = tensor is None and (layout != self._layout or tensors)
            if is_missing or (tensor is not None and (tensor.shape != shape or tensor.dtype != own.dtype)):
                got = None if tensor is None else f"{list(tensor.shape)}, {tensor.dtype}"
                raise BlockSparseError.expected(name, f"{list(shape)}, {own.dtype}, of blocksparse.quantize", got)
        if layout != self._layout:
            self._layout = layout
            with torch.inference_mode(False):  # inference tensors could not be loaded into outside of this mode
                for name in SHAPES:
                    own = getattr(self, name)
                    setattr(self, name, own.new_empty(layout.nnz, *own.shape[1:]))
            self.reset_layout_buffers()


def quantized_values(layer: Any, kind: type[BlockSparseModule], scale: str) -> tuple[Tensor, Tensor]:
    """Return the int8 values of a layer and their scales, one per output of a block, or with `scale="row"` per output.

    Raises:
        BlockSparseError: the layer is not a `kind`, its values are float64, not a parameter or not finite, or `scale`
            is another word.
    """
    check_scale(scale)
    if not isinstance(layer, kind) or layer.values.dtype not in DTYPES:
        got = f"{type(layer).__name__} {getattr(getattr(layer, 'values', None), 'dtype', '')}".strip()
        expected = f"a blocksparse.nn.{kind.__name__} of {', '.join(map(str, DTYPES))}"
        raise BlockSparseError.expected("layer", expected, got)
    check_parameters(layer)
    return quantized(layer.values, layer.layout if scale == "row" else None)


def check_scale(scale: Any) -> None:
    """Raise a BlockSparseError for anything but the words that `blocksparse.quantize` accepts as `scale`."""
    if scale not in SCALES:
        raise BlockSparseError.expected("scale", f"one of {list(SCALES)}", repr(scale))


def refuse_gate(gate: Any) -> None:
    """Raise a BlockSparseError for a gate, which int8 layers do not support."""
    if gate is not None:
        raise BlockSparseError.expected("gate", "None, as int8 layers have no gates", type(gate).__name__)


def copy_settings(module: nn.Module, kind: type[nn.Module]) -> Any:
    """Return a module of another class with the settings of this one, without parameters, buffers and children."""
    new: Any = copy.copy(module)
    new.__class__ = kind
    for name in ("_layout_is_dynamic", "_size_is_dynamic"):  # no graph was compiled for the new module
        new.__dict__.pop(name, None)
    new._parameters, new._buffers, new._modules = {}, {}, {}
    return new


class QuantizedLayer(QuantizedModule):
    """The base of int8 layers with one weight; subclasses define the product."""

    kind: ClassVar[Any]
    """The class of the floating-point layer."""
    activation: str | None
    bias: Tensor | None
    compute: Callable[..., Tensor]

    def __init__(self, layout: BlockLayout, values: Tensor, scales: Tensor):
        raise BlockSparseError(f"{type(self).__name__} is made by its method `of(layer)`, or by bs.quantize(model)")

    @classmethod
    def of(cls, layer: Any, scale: str = "block") -> Self:
        """Quantize a layer, with `scale` as in `blocksparse.quantize`.

        Raises:
            BlockSparseError: the layer is of another kind, its values are float64 or not finite, or a wrong `scale`.
        """
        values, scales = quantized_values(layer, cls.kind, scale)
        new: Self = copy_settings(layer, cls)
        new.set_buffers(values, scales, None if layer.bias is None else layer.bias.detach().clone())
        return new

    def dequantized(self) -> Any:
        """Return a floating-point layer with the quantized weight, in the dtype of the bias."""
        layer: Any = copy_settings(self, self.kind)
        layer.values = nn.Parameter(self.dequantized_values(torch.float32 if self.bias is None else self.bias.dtype))
        layer.bias = None if self.bias is None else nn.Parameter(self.bias.clone())
        layer.reset_layout_buffers(self.values.device)
        return layer

    def forward(self, input: Tensor, gate: None = None) -> Tensor:
        refuse_gate(gate)
        return self.compute(input, self.bias, self.activation)


class QuantizedLinear(QuantizedLayer, LinearModule):
    """A `Linear` with an int8 weight and a float32 scale for each output of a block; for inference.

    `blocksparse.quantize` and `of` make it. Inputs are quantized in each call. The weight takes about a quarter of the
    memory of float32 blocks in a file, and half of it on the CPU, because the kernels cache a reordered copy. Writes to
    values or scales update this copy, except writes through `.data` or numpy, which PyTorch does not count.

    Attributes:
        values: int8 `[nnz, block_out, block_in]`.
        scales: float32 `[nnz, block_out]`.
        crow_indices, col_indices: the layout's indices, as in the state dicts of other modules.
        bias: `[out_features]` or None.
        activation: None, "relu", "gelu" or "silu", fused into the product.

    Shapes: `[..., in_features] -> [..., out_features]`; float32, bfloat16 or float16, as the bias.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.QuantizedLinear.of(bs.nn.Linear(100, 300, density=0.25))
    >>> layer
    QuantizedLinear(in_features=100, out_features=300, block_size=(32, 32), nnz=10, density=0.25, bias=True)
    >>> layer(torch.randn(5, 100)).shape
    torch.Size([5, 300])

    Source: Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference
    (2018), with dynamic quantization as in torch.ao.nn.quantized.dynamic.Linear.
    """

    kind = Linear

    def _product(
        self, x: Tensor, values: Tensor, layout: BlockLayout, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        return int8_linear(x, values, self.scales, layout, self.cast_bias(bias, x), activation)
