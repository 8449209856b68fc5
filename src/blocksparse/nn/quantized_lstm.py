"""The block-sparse LSTM in int8, for inference."""

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
from .padding import pad
from .quantized import QuantizedModule, copy_settings, quantized_values
from .recurrent import Recurrent, cast, to_dtype


class QuantizedWeight(QuantizedModule):
    """A `Weight` in int8, one of several weights of a module."""

    def extra_repr(self) -> str:
        return f"{self._layout.shape}, {self._layout_repr}"


class QuantizedLSTM(Recurrent):
    """An `LSTM` with int8 block-sparse weights and a float32 scale for each output of a block; for inference.

    `blocksparse.quantize` and `of` make it. Each call quantizes the inputs of all products, each row separately; gates
    and c are float32. Dense weights are not quantized.

    Attributes:
        weight_ih_l0, weight_hh_l0, ...: for each block-sparse weight a module with `values` (int8
            `[nnz, block_out, block_in]`), `scales` (float32 `[nnz, block_out]`) and the layout's indices.
        bias_ih_l0, bias_hh_l0, ..., and dense weights: as in the LSTM, but buffers.

    Shapes: as `LSTM`, batched or not, batch first or not, packed or not; float32, bfloat16 or float16, as the biases.

    Raises:
        BlockSparseError: an input has another shape or dtype, or requires a gradient.

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

    Source: as `QuantizedLinear`, with dynamic quantization as in torch.ao.nn.quantized.dynamic.LSTM.
    """

    @classmethod
    def of(cls, lstm: LSTM, scale: str = "block") -> Self:
        """Quantize an LSTM, with `scale` as in `blocksparse.quantize`.

        Raises:
            BlockSparseError: the layer is not an `LSTM` with a block-sparse weight, or its values are float64 or not
                finite, or a wrong `scale`.
        """
        if type(lstm) is not LSTM or not any(isinstance(weight, Weight) for weight in lstm.children()):
            raise BlockSparseError.expected("layer", "a block-sparse blocksparse.nn.LSTM", type(lstm).__name__)
        new: Self = copy_settings(lstm, cls)
        for name, weight in lstm.named_children():
            if isinstance(weight, Weight):
                setattr(new, name, QuantizedWeight(weight.layout, *quantized_values(weight, Weight, scale)))
        for name, parameter in lstm.named_parameters(recurse=False):
            new.register_buffer(name, parameter.detach().clone())
        return new

    def dequantized(self) -> LSTM:
        """Return an `LSTM` with the quantized weights, in the dtype of the biases."""
        new: LSTM = copy_settings(self, LSTM)
        for name, buffer in self.named_buffers(recurse=False):
            setattr(new, name, nn.Parameter(buffer.clone()))
        dtype = next((tensor.dtype for tensor in self.buffers(recurse=False)), torch.float32)
        for name, child in self.named_children():
            if isinstance(child, QuantizedWeight):
                weight = Weight(child.layout, "meta")
                weight.values = nn.Parameter(child.dequantized_values(dtype))
                weight.reset_layout_buffers(child.values.device)
                weight._used_rows_and_columns = self._used_rows_and_columns(name, child.layout)
                setattr(new, name, weight)
        return new

    def densified(self) -> Any:
        return self.dequantized().densified()

    def _run(
        self, suffix: str, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, steps: Steps
    ) -> tuple[Tensor, ...]:
        """Run one layer in one direction over all steps, with int8 weights; arguments are those of `Recurrent._run`."""
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
