"""The deep-transition LSTM of 2017 for small-world layouts."""

from __future__ import annotations

from typing import Unpack

import torch.nn.functional as F
from torch import Tensor

from ..checked import integer
from ..errors import BlockSparseError
from ..ops import recurrent
from ..ops.recurrent import Steps, linear_of, scan
from ..ops.recurrent.small_world_lstm import EPSILON
from .multi_weight import Size
from .padding import pad
from .recurrent import Recurrent, SparseOptions, cast, check_dtypes

_INPUTS = "input1", "input2"


class SmallWorldLSTM(Recurrent):
    """An LSTM with `depth` products through its graph of units per time step, and a layer norm after each product.

        s = norm(x U1^T) * norm(h W1^T)
        s = relu(norm(x U2^T) + norm(s W2^T))
        s = relu(norm(s Wk^T))                                    for k = 3 to depth
        i, f, g, o = norm of each gate (s W^T);  c = sig(f) c + sig(i) tanh(g);  h = sig(o) tanh(c)

    Args:
        input_size, hidden_size, num_layers, batch_first, dropout, bidirectional: as torch.nn.LSTM.
        depth: products within a time step, 2 or more; an input reaches units at this distance in one time step.
        layout: the blocks of W1 to Wdepth and of each gate in W, `[hidden, hidden]`.
        stride: units 0, stride, 2 stride, ... have weights from the inputs. U1 and U2 are `[hidden / stride, input]`,
            with 2 units or more, because the layer norm of one unit is 0.
        input_layout: the blocks of the first layer's U1 and U2.
        layouts, density, block_size, device, dtype: as `blocksparse.nn.LSTM`.

    Weights without a layout are dense. Shapes are those of `nn.LSTM`. The hidden size must be a multiple of the block,
    and so must hidden / stride if U1 and U2 have blocks, because norms would include the padding. Norms start with
    gains of 1 and biases of 0, but the forget gate's bias starts at 1.

    Raises:
        BlockSparseError: sizes or layouts do not fit, or the input has another shape.

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.watts_strogatz(512, block_size=32, neighbors=4, seed=0)
        >>> lstm = bs.nn.SmallWorldLSTM(64, 512, depth=4, layout=layout)
        >>> y, (h, c) = lstm(torch.randn(10, 3, 64))
        >>> y.shape, c.shape
        (torch.Size([10, 3, 512]), torch.Size([1, 3, 512]))

    Source: Gray, Radford, Kingma, GPU Kernels for Block-Sparse Weights (2017).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        depth: int = 4,
        stride: int = 1,
        **options: Unpack[SparseOptions],
    ):
        # With one product, the inputs would only be factors of the state, which is initially 0.
        self.depth = integer("depth", depth, 2)
        self.stride = integer("stride", stride, 1)
        if integer("hidden_size", hidden_size, 1) % stride or hidden_size < 2 * stride:
            expected = f"a multiple of the stride, {stride}, and more than it"
            raise BlockSparseError.expected("hidden_size", expected, hidden_size)
        super().__init__(input_size, hidden_size, num_layers, True, batch_first, dropout, bidirectional, **options)
        for name, (out, _) in self.sizes.items():
            if out.padded != out.real:
                expected = f"outputs that are a multiple of its block, such as {out.padded}"
                raise BlockSparseError.expected(f"the layout of {name}", expected, out.real)

    def _cell(self, inputs: Size) -> dict[str, tuple[int, Size, Size | None]]:
        """Return (gates, outputs, inputs) of each parameter; inputs are None for biases and gains."""
        hidden = self._hidden
        if hidden.padded != hidden.real:
            raise BlockSparseError.expected("hidden_size", "a multiple of the block", self.hidden_size)
        weights = {
            **dict.fromkeys(_INPUTS, (1, self._input_units, inputs)),
            **dict.fromkeys(self._step_names, (1, hidden, hidden)),
            "gates": (4, hidden, hidden),
        }
        cell: dict[str, tuple[int, Size, Size | None]] = {f"weight_{name}": sizes for name, sizes in weights.items()}
        return cell | {
            f"{kind}_{name}": (gates, out, None)
            for name, (gates, out, _) in weights.items()
            for kind in ("gain", "bias")
        }

    @property
    def _input_units(self) -> Size:
        """The units that inputs connect to: every `stride`-th."""
        units = self.hidden_size // self.stride
        return Size(units, units)

    @property
    def _step_names(self) -> list[str]:
        """Return the names of the steps inside a time step."""
        return [f"step{k}" for k in range(1, self.depth + 1)]

    def _reset(self, name: str, parameter: Tensor, bound: float) -> None:
        """Set gains to 1 and biases to 0, but those of the forget gate to 1; draw weights as the base class does."""
        if name.startswith("gain_"):
            parameter.fill_(1)
        elif name.startswith("bias_"):
            parameter.fill_(0)
            if name.startswith("bias_gates"):
                parameter[self.hidden_size : 2 * self.hidden_size] = 1
        else:
            super()._reset(name, parameter, bound)

    def _run(
        self, suffix: str, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, steps: Steps
    ) -> tuple[Tensor, ...]:
        """Run one layer in one direction; see `Recurrent._run`."""
        inputs = []
        for name in _INPUTS:
            gain, bias = getattr(self, f"gain_{name}{suffix}"), getattr(self, f"bias_{name}{suffix}")
            weight, layout = self._weight(f"weight_{name}{suffix}")
            check_dtypes(x, weight)
            y = linear_of(pad(x, layout), weight, layout)
            inputs.append(F.layer_norm(y, gain.shape, gain.to(y.dtype), bias.to(y.dtype), EPSILON).to(y.dtype))
        factors, terms = self._expand(inputs[0], 1), self._expand(inputs[1], 0)
        names = [*self._step_names, "gates"]
        weights, layouts = zip(*(self._weight(f"weight_{name}{suffix}") for name in names), strict=True)
        norms = [getattr(self, f"{kind}_{name}{suffix}") for kind in ("gain", "bias") for name in names]
        _, h, *parameters = cast(factors, h, *weights, *norms)
        return scan(recurrent.SmallWorldLSTM(steps, *layouts), factors, terms, index, h, c, *parameters)

    def _expand(self, input_units: Tensor, fill: float) -> Tensor:
        """Return `[rows, hidden]` with the numbers of the input units, every stride-th, and `fill` for other units."""
        if self.stride == 1:
            return input_units
        return F.pad(input_units.unsqueeze(-1), (0, self.stride - 1), value=fill).flatten(1)

    def extra_repr(self) -> str:
        stride = f", stride={self.stride}" * (self.stride > 1)
        return f"{super().extra_repr()}, depth={self.depth}{stride}"
