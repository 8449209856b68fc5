"""The GRU and the Elman RNN, dense or block-sparse."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..errors import BlockSparseError
from ..ops.recurrent import HIDDEN, Steps, gather_rows, hidden_states, linear_of, scan
from .padding import pad
from .recurrent import Recurrent, SparseOptions, cast


class HiddenOnly(Recurrent):
    """The base of recurrent layers without a state c."""

    def forward(  # type: ignore[override]
        self, input: Tensor | PackedSequence, hx: Tensor | None = None, *, table: Tensor | None = None
    ) -> tuple[Any, Tensor]:
        """Return (outputs, final h) as torch.nn.GRU does; see `Recurrent.forward`."""
        if not isinstance(hx, Tensor | None):
            raise BlockSparseError.expected("hx", "a tensor, the initial h", type(hx).__name__)
        # The base class has a state c, which no step changes.
        states = None if hx is None else (hx, hx)
        if table is None and (result := self._fast_inference(input, states)) is not None:
            return result[:2]
        y, (h, _) = super().forward(input, states, table=table)
        return y, h

    def _run(
        self, suffix: str, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, steps: Steps
    ) -> tuple[Tensor, ...]:
        """Run one layer in one direction; see `Recurrent._run`."""
        (input_weight, input_layout), (weight, layout) = self._weights(suffix, "ih", "hh")
        biases = [getattr(self, f"bias_{name}{suffix}") if self.bias else None for name in ("ih", "hh")]
        x, h, input_weight, weight, *biases = cast(x, h, input_weight, weight, *biases)
        of_inputs = linear_of(pad(x, input_layout), input_weight, input_layout, biases[0])
        fused = hidden_states(steps, self._kind, of_inputs, index, h, weight, layout, biases[1])
        if fused is not None:
            return *fused, c
        recurrence = HIDDEN[self._kind](steps, layout)
        return *scan(recurrence, gather_rows(of_inputs, index), h, weight, biases[1]), c


class GRU(HiddenOnly):
    """`torch.nn.GRU` with weights that are dense or block-sparse.

        r = sig(x W_ir^T + b_ir + h W_hr^T + b_hr);  z = sig(x W_iz^T + b_iz + h W_hz^T + b_hz)
        n = tanh(x W_in^T + b_in + r (h W_hn^T + b_hn));  h = (1 - z) n + z h

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as torch.nn.GRU.
        layout: the blocks of each recurrent weight, `[hidden, hidden]` for all gates or `[3 hidden, hidden]`. Input
            weights of the same shape use it too.
        input_layout: the blocks of the first layer's input weight, `[hidden, input]` or `[3 hidden, input]`.
        layouts, density, block_size, device, dtype: as in `blocksparse.nn.LSTM`, as are the names of the parameters.

    Shapes: as torch.nn.GRU: `[steps, batch, input_size]` (or batch first, or without a batch, or packed) to
    `[steps, batch, hidden_size]` and the final h `[layers * directions, batch, hidden_size]`.

    Raises:
        BlockSparseError: sizes or layouts do not fit, or the input has another shape.

    Example:
        >>> import torch, blocksparse as bs
        >>> gru = bs.nn.GRU(64, 256, density=0.25)
        >>> y, h = gru(torch.randn(10, 3, 64))
        >>> y.shape, h.shape
        (torch.Size([10, 3, 256]), torch.Size([1, 3, 256]))

    Source: Cho et al., Learning phrase representations using RNN encoder-decoder (2014), in the form of cuDNN.
    """

    gates = 3
    _kind = "gru"


class RNN(HiddenOnly):
    """`torch.nn.RNN` with weights that are dense or block-sparse: h = tanh(x W_ih^T + b_ih + h W_hh^T + b_hh).

    Args:
        input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional: as torch.nn.RNN;
            the nonlinearity is "tanh" or "relu".
        layout, input_layout, layouts, density, block_size, device, dtype: as in `blocksparse.nn.GRU`, for one gate.

    Shapes are those of `blocksparse.nn.GRU`.

    Raises:
        BlockSparseError: as `blocksparse.nn.GRU`; also for an unknown nonlinearity.

    >>> import torch, blocksparse as bs
    >>> rnn = bs.nn.RNN(64, 256, density=0.25)
    >>> y, h = rnn(torch.randn(10, 3, 64))
    >>> y.shape, h.shape
    (torch.Size([10, 3, 256]), torch.Size([1, 3, 256]))

    Source: Elman, Finding structure in time (1990).
    """

    gates = 1

    @property
    def _kind(self) -> str:  # type: ignore[override]
        return self.nonlinearity

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        **options: Unpack[SparseOptions],
    ):
        if nonlinearity not in ("tanh", "relu"):
            raise BlockSparseError.expected("nonlinearity", "tanh or relu", repr(nonlinearity))
        self.nonlinearity = nonlinearity
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, **options)
