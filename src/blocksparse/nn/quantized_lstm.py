"""The block-sparse LSTM in 8 bits, for inference."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops import recurrent
from ..ops.int8_linear import DTYPES, check_inference
from ..ops.recurrent import Steps, scan
from .lstm import LSTM
from .module import Weight
from .quantized import QuantizedModule, exchanged, rounded_values
from .recurrent import Recurrent, cast, pad, to_dtype


class QuantizedWeight(QuantizedModule):
    """A `Weight` in 8 bits: one of several that a module has."""

    def extra_repr(self) -> str:
        return f"{self._layout.shape}, {self._layout_repr}"


class QuantizedLSTM(Recurrent):
    """An `LSTM` whose block-sparse weights are int8, with a float32 scale for each output of a block.

    The inputs of each product, those of a step and the state before it, are rounded in each call, every row by itself;
    gates and c are float32. Weights that are dense stay as they are. Made by `blocksparse.quantize`, or by `of`;
    without gradients.

    Attributes:
        weight_ih_l0, weight_hh_l0, ...: of each block-sparse weight of the LSTM a module with `values` (int8
            `[nnz, block_out, block_in]`), `scales` (float32 `[nnz, block_out]`) and the layout's indices.
        bias_ih_l0, bias_hh_l0, ..., and weights that are dense: as in the LSTM, but buffers.

    Shapes: those of `LSTM`, batched or not, batch first or not, packed or not; float32, bfloat16 or float16, as the
    biases are.

    Raises:
        BlockSparseError: inputs of another shape or dtype, or that want a gradient.

    >>> import torch, blocksparse as bs
    >>> lstm = bs.nn.QuantizedLSTM.of(bs.nn.LSTM(64, 128, density=0.25))
    >>> lstm
    QuantizedLSTM(
      64, 128
      (weight_ih_l0): QuantizedWeight((512, 64), block_size=(32, 32), nnz=8, density=0.25)
      (weight_hh_l0): QuantizedWeight((512, 128), block_size=(32, 32), nnz=16, density=0.25)
    )
    >>> y, (h, c) = lstm(torch.randn(10, 3, 64))
    >>> y.shape, c.shape
    (torch.Size([10, 3, 128]), torch.Size([1, 3, 128]))

    Source: as of `QuantizedLinear`; the dynamic kind as in torch.ao.nn.quantized.dynamic.LSTM.
    """

    @classmethod
    def of(cls, lstm: LSTM) -> Self:
        """Return the LSTM in 8 bits.

        Raises:
            BlockSparseError: no `LSTM` with a block-sparse weight, or with one of float64, or with numbers that are not
                finite.
        """
        if type(lstm) is not LSTM or not any(isinstance(weight, Weight) for weight in lstm.children()):
            raise BlockSparseError.expected("layer", "a block-sparse blocksparse.nn.LSTM", type(lstm).__name__)
        new: Self = exchanged(lstm, cls)
        for name, weight in lstm.named_children():
            if isinstance(weight, Weight):
                setattr(new, name, QuantizedWeight(weight.layout, *rounded_values(weight, Weight)))
        for name, parameter in lstm.named_parameters(recurse=False):
            new.register_buffer(name, parameter.detach().clone())
        return new

    def dequantized(self) -> LSTM:
        """Return the `LSTM` of the rounded weights, of the biases' dtype."""
        new: LSTM = exchanged(self, LSTM)
        for name, buffer in self.named_buffers(recurse=False):
            setattr(new, name, nn.Parameter(buffer.clone()))
        dtype = next((tensor.dtype for tensor in self.buffers(recurse=False)), torch.float32)
        for name, child in self.named_children():
            if isinstance(child, QuantizedWeight):
                weight = Weight(child.layout, "meta")
                weight.values = nn.Parameter(child.numbers(dtype))
                weight.reset_layout_buffers(child.values.device)
                weight._used = self._used(name, child.layout)
                setattr(new, name, weight)
        return new

    def densified(self) -> Any:
        return self.dequantized().densified()

    def _run(
        self, suffix: str, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, steps: Steps
    ) -> tuple[Tensor, ...]:
        check_inference(x=x, h=h, c=c)
        if x.dtype not in DTYPES:
            raise BlockSparseError.expected("input", f"one of {', '.join(map(str, DTYPES))}", x.dtype)
        bias = getattr(self, f"bias_ih{suffix}") + getattr(self, f"bias_hh{suffix}") if self.bias else None
        x, h = cast(x, h)
        layouts: list[BlockLayout | None] = []
        tensors: list[Tensor | None] = []
        for name in ("ih", "hh", *(["hr"] if self.proj_size else [])):
            weight = getattr(self, f"weight_{name}{suffix}")
            if isinstance(weight, QuantizedWeight):
                layouts.append(weight.layout)
                tensors += [weight.values, weight.scales]
            else:
                layouts.append(None)
                tensors += [to_dtype(weight, x.dtype), None]
        bias = None if bias is None else to_dtype(bias, x.dtype)
        return scan(
            recurrent.Int8LSTM(steps, *layouts), pad(x, layouts[0]), index, h, c, *tensors[:2], bias, *tensors[2:]
        )
